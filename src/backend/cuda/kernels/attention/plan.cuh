#pragma once

#include <cstdint>

#include "backend/cuda/attention.h"

namespace nibble::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kPrefillRows = 128;  // rows of a sequence that a block of prefill serves

/// Sequence with one row in the step: its tiles first..end are read. Others have none.
struct PlannedSequence {
  int32_t first_tile;
  int32_t end_tile;
  int32_t kv_len;
  int32_t row;
};

/// A block's share begin..end of the line, and where it begins: item = KV head and group of its
/// query heads. All that a block needs to begin, in one piece.
struct alignas(16) PlannedStart {
  int32_t sequence;
  int32_t item;
  int32_t tile;
  int32_t begin;
  int32_t end;
  int32_t blocks;
  int32_t total;
  int32_t unused;
  PlannedSequence first;
};
static_assert(sizeof(PlannedStart) == 48);

struct PlannedRows {
  int32_t sequence;
  int32_t first_row;  // of the sequence's rows
};

/// The plan in device memory. Tiles of all sequences and items are in one line of `total` tiles;
/// block b of the first `blocks` takes share_begin(b) .. share_begin(b + 1) of it.
struct PlanView {
  int32_t* prefill_count = nullptr;  // [1]
  PlannedSequence* sequences = nullptr;
  PlannedStart* starts = nullptr;     // [grid]
  int32_t* sequence_begin = nullptr;  // [sequences + 1] place in the line
  PlannedRows* prefill = nullptr;     // [prefill_blocks()]
  size_t bytes = 0;
};

/// What decode and prefill alike are told of a launch.
struct PagedArgs {
  const uint16_t* q;
  int64_t q_stride;
  uint16_t* out;
  int64_t out_stride;
  const uint8_t* pages;
  int64_t page_bytes;
  const int32_t* page_table;
  int64_t page_table_stride;
  const uint8_t* residual;  // ResidualKeys
  const int32_t* residual_table;
  int32_t tiles_per_page;
  int32_t kv_heads;
  int32_t ratio;  // query heads per KV head
  int32_t window;
  float score_factor;  // what scores, in units of codes, are multiplied by to be exponents of 2
  float value_factor;  // fp8: V's scale
  float top_factor;    // the same as score_factor of tops that states keep
  bool shared;         // AttentionForm::kShared: tops are whole exponents of 2
  const float* sinks;  // of each query head, or null
  PlanView plan;
};

/// Sizes that follow from a shape and the device.
struct DecodeGrid {
  int32_t blocks = 0;   // of the launch
  int32_t columns = 0;  // query heads that share a pass over the cache: 8 or 16
  int32_t groups = 0;   // passes per KV head
  int32_t stages = 0;   // of each warp's ring
  int32_t shared_bytes = 0;
  int32_t short_blocks = 0;  // of attention/decode_short.cuh; 0: the launch is not one of it
};

/// Blocks that may share a head: their weights take the place of the warps' sums in shared memory.
[[nodiscard]] constexpr int32_t max_parts(int32_t head_dim) {
  return head_dim < 72 ? kDecodeWarps * (head_dim + 4) : 288;
}

/// Of the current device; 0 where there is none.
[[nodiscard]] int device_attribute(cudaDeviceAttr attribute);
/// Of the current device, times 10.
[[nodiscard]] int compute_capability();

[[nodiscard]] DecodeGrid decode_grid(const AttentionShape& shape);
/// log2(e) * scale in the units in which the kernels keep scores.
[[nodiscard]] float score_factor(const AttentionShape& shape);
[[nodiscard]] int64_t prefill_blocks(int64_t sequences, int64_t rows);
[[nodiscard]] PagedArgs paged_args(const AttentionLaunch& launch);
[[nodiscard]] PlanView view_plan(void* plan, int32_t blocks, int32_t sequences, int32_t rows);

/// First tile of a block's share: block * total / blocks.
[[nodiscard]] constexpr int32_t share_begin(int32_t block, int32_t blocks, int32_t total) {
  return static_cast<int32_t>(int64_t{total} * block / blocks);
}
/// The block in whose share a tile is.
[[nodiscard]] constexpr int32_t share_owner(int32_t tile, int32_t blocks, int32_t total) {
  return static_cast<int32_t>(((int64_t{tile} + 1) * blocks - 1) / total);
}

}  // namespace nibble::cuda
