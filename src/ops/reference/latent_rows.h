#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/kv.h"

namespace nibble::reference {

/// Rows of latent attention in one page, as KvView lays them out.

/// row [head_dim]: the latent, then the rotated key.
void write_latent(const KvView& kv, std::byte* page, int64_t slot, const float* row);
/// Number d of a row, exactly as its codes say.
[[nodiscard]] double read_latent(const KvView& kv, const std::byte* page, int64_t slot, int64_t d);

}  // namespace nibble::reference
