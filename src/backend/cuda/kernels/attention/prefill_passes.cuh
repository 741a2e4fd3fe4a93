#pragma once

// What a block of prefill works on: its rows, and the chunks of the cache that these read.

#include "backend/cuda/kernels/attention/fragments.cuh"
#include "backend/cuda/kernels/attention/launch.h"

namespace nibble::cuda {

constexpr int kPrefillChunk = 64;  // tokens

/// What a block works on.
struct PrefillTask {
  int32_t sequence;
  int32_t rows;            // of the block, at most kPrefillRows
  int64_t first_row;       // of the step
  int32_t first_position;  // of the first row
  int32_t kv_head;
  int32_t first_chunk;
  int32_t end_chunk;
  int32_t known;  // tokens in the cache
};

/// A tile of a task's KV head, in the cache.
__device__ __forceinline__ const uint8_t* tile_of_task(const PrefillArgs& args,
                                                       const PrefillTask& task,
                                                       int32_t tile,
                                                       int tile_bytes) {
  const int32_t in_table = tile / args.tiles_per_page;
  const int64_t page =
      max(0, __ldg(args.page_table + task.sequence * args.page_table_stride + in_table));
  return args.pages + page * args.page_bytes +
         int64_t{task.kv_head * args.tiles_per_page + tile - in_table * args.tiles_per_page} *
             tile_bytes;
}

__device__ __forceinline__ PrefillTask prefill_task(const PrefillArgs& args,
                                                    int32_t index,
                                                    int32_t head) {
  const int2 planned = __ldcg(reinterpret_cast<const int2*>(args.plan.prefill) + index);
  PrefillTask task{};
  task.sequence = planned.x;
  const int32_t begin = __ldg(args.q_begin + planned.x);
  const int32_t q_len = __ldg(args.q_begin + planned.x + 1) - begin;
  task.known = __ldg(args.kv_len + planned.x);
  task.rows = min(kPrefillRows, q_len - planned.y);
  task.first_row = begin + planned.y;
  task.first_position = task.known - q_len + planned.y;
  task.kv_head = head / args.ratio;
  const int32_t oldest = args.window > 0 ? max(0, task.first_position - args.window + 1) : 0;
  task.first_chunk = oldest / kPrefillChunk;
  task.end_chunk = (task.first_position + task.rows - 1) / kPrefillChunk + 1;
  return task;
}

/// A chunk that a block reads: by its codes, or, of a format with a residual, for the rows among
/// its tokens by its keys as they are.
struct PrefillPass {
  int32_t chunk;
  bool coded;
};

/// The passes of a task: all chunks in front of its last row's by codes, then those of its rows as
/// they are; or all chunks by codes, where the format has no residual.
template <typename Tile>
struct PrefillPasses {
  int32_t first;  // chunk
  int32_t coded;  // passes; those as they are come behind
  int32_t own;    // first chunk of these
  int32_t count;

  __device__ __forceinline__ explicit PrefillPasses(const PrefillTask& task) {
    first = task.first_chunk;
    if constexpr (Tile::kChannelKeys) {
      own = task.first_position / kPrefillChunk;
      coded = task.end_chunk - 1 - first;
      count = coded + task.end_chunk - own;
    } else {
      own = 0;
      coded = count = task.end_chunk - first;
    }
  }
  [[nodiscard]] __device__ __forceinline__ PrefillPass at(int32_t i) const {
    return i < coded ? PrefillPass{first + i, true} : PrefillPass{own + i - coded, false};
  }
};

/// What rows from position `begin` to `end` - 1 take of a task's passes: the first `coded`, and
/// `own` from pass `first_own` on.
template <typename Tile>
struct PassesOfRows {
  PrefillPasses<Tile> passes;
  int32_t begin, end;
  int32_t coded, first_own, own;

  __device__ __forceinline__ PassesOfRows(const PrefillPasses<Tile>& all, int32_t from, int32_t to)
      : passes(all), begin(from), end(to) {
    const int32_t last = (end - 1) / kPrefillChunk;
    if constexpr (Tile::kChannelKeys) {
      coded = min(all.coded, last - all.first);
      first_own = all.coded + begin / kPrefillChunk - all.own;
      own = last - begin / kPrefillChunk + 1;
    } else {
      coded = min(all.count, last + 1 - all.first);
      first_own = coded;
      own = 0;
    }
  }
  [[nodiscard]] __device__ __forceinline__ int32_t count() const { return coded + own; }
  /// The pass that is the i-th of these.
  [[nodiscard]] __device__ __forceinline__ int32_t at(int32_t i) const {
    return i < coded ? i : first_own + i - coded;
  }
  [[nodiscard]] __device__ __forceinline__ bool takes(int32_t pass) const {
    return pass < coded || (pass >= first_own && pass < first_own + own);
  }
  /// Whether any of the rows may not see all tokens of the pass.
  [[nodiscard]] __device__ __forceinline__ bool masks(const PrefillPass& pass,
                                                      int32_t window) const {
    const int32_t token = pass.chunk * kPrefillChunk;
    const bool early = window > 0 && token <= end - 1 - window;
    const bool mixed = Tile::kChannelKeys && (!pass.coded || pass.chunk >= begin / kPrefillChunk);
    return token + kPrefillChunk - 1 > begin || early || mixed;
  }
  /// Whether the row at `position` sees the pass's key of `token`.
  [[nodiscard]] __device__ __forceinline__ bool sees(const PrefillPass& pass,
                                                     int32_t position,
                                                     int32_t token,
                                                     int32_t window) const {
    const int32_t back = position - token;
    const bool own_group = Tile::kChannelKeys && position / kPrefillChunk == pass.chunk;
    return back >= 0 && (window == 0 || back < window) &&
           (!Tile::kChannelKeys || own_group != pass.coded);
  }
};

}  // namespace nibble::cuda
