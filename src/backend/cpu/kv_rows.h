#pragma once

#include "backend/cpu/attention_task.h"
#include "ops/kv.h"

namespace nibble::cpu {

/// What kernels know of a layer's pages.
[[nodiscard]] KvLayout layout_of(const KvView& kv);

}  // namespace nibble::cpu
