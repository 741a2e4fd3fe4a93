#pragma once

#include <cstdint>

#include "base/status.h"

namespace nibble::cuda {

/// A sequence's last rows, whose tokens lie in the cache with all before.
struct LatentPrefillCase {
  int32_t heads = 0;
  int32_t rows = 0;
  int32_t kv_len = 0;
};

/// Median microseconds of the attention of a layer, with the products of its heads.
struct LatentPrefillTimes {
  double absorbed_us = 0;
  double expanded_us = 0;
  double expansion_us = 0;  // of which keys and values take this to be made
};

/// kUnavailable without a Hopper GPU, kResourceExhausted.
Result<LatentPrefillTimes> time_latent_prefill(const LatentPrefillCase& shape);

}  // namespace nibble::cuda
