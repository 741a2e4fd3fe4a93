#pragma once

#include "backend/cpu/attention_task.h"
#include "base/status.h"
#include "ops/kv.h"

namespace nibble::cpu {

/// What kernels know of a layer's pages.
[[nodiscard]] KvLayout layout_of(const KvView& kv);

/// kUnsupported or kInvalidArgument, with the remedy, for a cache that the kernels do not hold.
///   heads  of the queries
[[nodiscard]] Status check_kv(const KvView& kv, int64_t heads);

}  // namespace nibble::cpu
