#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "kvcache/kv_cache_shape.h"

namespace nibble {

/// Pages that each pool can use: those of max_num_seqs sequences of max_model_len tokens; of a pool
/// with a window, of what so many sequences see and of one step, and as much again for the prefix
/// cache. `options` must be resolved as far as these.
[[nodiscard]] std::vector<int64_t> useful_pages(const EngineOptions& options,
                                                const std::vector<KvPool>& pools);

/// Pages of each pool that fit into `bytes`: as many of each, but of none more than `most`. A pool
/// with a window so never has fewer than it would if it had none. kResourceExhausted when not even
/// one of each fits.
///   shape: its num_pages do not matter
///   backend: whose memory it is; nullptr: the host's
Result<std::vector<int64_t>> share_pages(KvCacheShape shape,
                                         const std::vector<int64_t>& most,
                                         int64_t bytes,
                                         const Backend* backend);

}  // namespace nibble
