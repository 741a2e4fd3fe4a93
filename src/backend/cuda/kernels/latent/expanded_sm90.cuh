#pragma once

// Causal attention of latent attention's expanded form (expanded.h) with warpgroup products
// (sm_90a): keys of 128 + 64 numbers, of which all heads share the last, and values of 128.
//
// A block serves 128 rows of a sequence and one head: two warpgroups of 64 rows multiply, a warp
// fetches tiles of 128 tokens. As in FlashAttention-3 (Shah et al. 2024) the product of the next
// tile's scores runs while this tile's weights and values are multiplied, and the warpgroups take
// turns to start products, so that the softmax of one runs under the products of the other.

#include "backend/cuda/expanded.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/ptx/wgmma_fresh_bf16.cuh"

namespace nibble::cuda {

constexpr int kExpandedThreads = 384;
constexpr int kExpandedQuery = kExpandedNope + kExpandedRope;
constexpr int kGroupRows = 64;  // of a warpgroup

struct ExpandedArgs {
  ExpandedMaps maps;
  ExpandedPiece piece;
  const uint16_t* q;
  int64_t q_stride;
  const uint16_t* rotated;  // the first row's first head's
  int32_t rotated_head;     // numbers from a head's to the next one's; rows are dense
  float* state;
  int32_t state_head;  // floats from a head's to the next one's; rows are dense
  uint16_t* out;
  int32_t heads;
  int32_t head_group;  // heads whose blocks run together, for the second cache
  float score_factor;  // what scores are multiplied by to be exponents of 2
};

/// What a block works on. Tokens are counted from the segment's first.
struct ExpandedWork {
  int32_t head;
  int32_t first_row;  // of the step
  int32_t rows;       // at most kExpandedTile
  int32_t place;      // of the first row among the tokens; may lie before them
  int32_t tokens;     // of the segment
  int32_t base;       // of the first token, in the piece
  int32_t tiles;      // that some row sees, at least one
  bool goes_on;       // rows have a state
  bool ends;          // no row sees tokens behind the segment's

  __device__ explicit ExpandedWork(const ExpandedArgs& args) {
    const auto index = static_cast<int32_t>(blockIdx.x);
    const int32_t group = index / (args.head_group * args.piece.blocks) * args.head_group;
    const int32_t heads = min(args.head_group, args.heads - group);
    const int32_t inside = index - group * args.piece.blocks;
    const int32_t block = args.piece.blocks - 1 - inside / heads;  // long rows first
    head = group + inside % heads;
    int32_t s = 0;
    while (s + 1 < args.piece.count && args.piece.segments[s + 1].block <= block) {
      ++s;
    }
    const ExpandedSegment& segment = args.piece.segments[s];
    const int32_t row = (block - segment.block) * kExpandedTile;
    first_row = segment.first_row + row;
    rows = min(kExpandedTile, segment.rows - row);
    place = segment.first_position + row - segment.first_token;
    tokens = segment.tokens;
    base = segment.base;
    tiles = (min(place + rows, tokens) + kExpandedTile - 1) / kExpandedTile;
    goes_on = segment.first_token > 0;
    ends = place + rows <= tokens;
  }
  /// Tokens that a row of the block sees.
  [[nodiscard]] __device__ int32_t seen(int32_t row) const { return min(place + row + 1, tokens); }
};

/// Shared memory of a block: two stages of keys, two of values, queries of both warpgroups; all in
/// panels of 64 numbers, a row of which is 128 bytes, swizzled.
struct ExpandedShared {
  static constexpr uint32_t kPanel = kExpandedTile * 128;
  static constexpr uint32_t kKeys = 3 * kPanel;  // the last is the rotated one
  static constexpr uint32_t kValues = 2 * kPanel;
  static constexpr uint32_t kQueryPanel = kGroupRows * 128;
  static constexpr uint32_t kQueries = 3 * kQueryPanel;
  static constexpr uint32_t kStages = 2;
  static constexpr int kBytes =
      static_cast<int>(kStages * (kKeys + kValues) + kExpandedTile / kGroupRows * kQueries);
  static constexpr uint32_t kBarriers = 4 * kStages;
  uint32_t memory;
  uint32_t barriers;

  [[nodiscard]] __device__ uint32_t keys(uint32_t tile) const {
    return memory + tile % kStages * kKeys;
  }
  [[nodiscard]] __device__ uint32_t values(uint32_t tile) const {
    return memory + kStages * kKeys + tile % kStages * kValues;
  }
  [[nodiscard]] __device__ uint32_t queries(int group) const {
    return memory + kStages * (kKeys + kValues) + static_cast<uint32_t>(group) * kQueries;
  }
  [[nodiscard]] __device__ uint32_t keys_full(uint32_t tile) const {
    return barriers + 8 * (tile % kStages);
  }
  [[nodiscard]] __device__ uint32_t values_full(uint32_t tile) const {
    return barriers + 8 * (kStages + tile % kStages);
  }
  [[nodiscard]] __device__ uint32_t keys_empty(uint32_t tile) const {
    return barriers + 8 * (2 * kStages + tile % kStages);
  }
  [[nodiscard]] __device__ uint32_t values_empty(uint32_t tile) const {
    return barriers + 8 * (3 * kStages + tile % kStages);
  }
  static __device__ void wait_full(uint32_t barrier, uint32_t tile) {
    ptx::barrier_wait(barrier, tile / kStages % 2);
  }
  static __device__ void wait_empty(uint32_t barrier, uint32_t tile) {
    if (tile >= kStages) {
      ptx::barrier_wait_to_refill(barrier, (tile / kStages - 1) % 2);
    }
  }
  /// By one thread.
  __device__ void init() const {
    for (uint32_t i = 0; i < kBarriers; ++i) {
      ptx::barrier_init(barriers + 8 * i, i < 2 * kStages ? 1 : 8);  // warps that multiply
    }
    ptx::barrier_init_fence();
  }
};

// Hardware barriers, the first of two each: of a warpgroup alone, and whose turn it is.
constexpr uint32_t kExpandedOwn = 1;
constexpr uint32_t kExpandedTurn = 3;

/// The fetching thread: all tiles, in order.
__device__ __forceinline__ void fetch_expanded(const ExpandedArgs& args,
                                               const ExpandedWork& work,
                                               const ExpandedShared& shared) {
  const auto tiles = static_cast<uint32_t>(work.tiles);
  const auto fetch_keys = [&](uint32_t tile) {
    const int row = work.base + static_cast<int>(tile) * kExpandedTile;
    const uint32_t full = shared.keys_full(tile);
    shared.wait_empty(shared.keys_empty(tile), tile);
    ptx::barrier_arrive_expect(full, ExpandedShared::kKeys);
    ptx::tensor_copy(shared.keys(tile), args.maps.keys, 0, row, 2 * work.head, full);
    ptx::tensor_copy(shared.keys(tile) + 2 * ExpandedShared::kPanel, args.maps.rotated, 0, row, 0,
                     full);
  };
  fetch_keys(0);
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      fetch_keys(tile + 1);
    }
    const uint32_t full = shared.values_full(tile);
    shared.wait_empty(shared.values_empty(tile), tile);
    ptx::barrier_arrive_expect(full, ExpandedShared::kValues);
    ptx::tensor_copy(shared.values(tile), args.maps.values, 0,
                     work.base + static_cast<int>(tile) * kExpandedTile, 2 * work.head, full);
  }
}

/// Asks for a warpgroup's queries; rows that are not there are zeros. By its 128 threads, who have
/// to wait for their copies and make them visible.
__device__ __forceinline__ void fetch_expanded_queries(const ExpandedArgs& args,
                                                       const ExpandedWork& work,
                                                       uint32_t to,
                                                       int group) {
  constexpr int kChunks = kExpandedQuery / 8;  // of a row, 16 bytes each
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 128; i < kGroupRows * kChunks; i += 128) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool there = group * kGroupRows + row < work.rows;
    const int64_t from = work.first_row + (there ? group * kGroupRows + row : 0);
    const uint16_t* const source =
        chunk < kExpandedNope / 8
            ? args.q + from * args.q_stride + work.head * kExpandedQuery + chunk * 8
            : args.rotated + (from * args.heads + work.head) * args.rotated_head +
                  (chunk * 8 - kExpandedNope);
    const int at = chunk / 8 * static_cast<int>(ExpandedShared::kQueryPanel) + row * 128 +
                   (chunk % 8 ^ row % 8) * 16;
    ptx::copy_async16(to + static_cast<uint32_t>(at), source, there ? 16 : 0);
  }
  ptx::copy_commit();
}

/// Softmax state of rows g and g + 8 of this lane's warp. Totals are of this lane's tokens.
struct ExpandedRows {
  float top[2];
  float total[2];
};

using ExpandedScores = float[kExpandedTile / 2];
using ExpandedWeights = uint32_t[kExpandedTile / 16][4];
using ExpandedSums = float[kExpandedValue / 2];

/// Scores of a tile: queries by keys.
__device__ __forceinline__ void start_expanded_scores(uint32_t queries,
                                                      uint32_t keys,
                                                      ExpandedScores& scores) {
  const uint32_t a = ptx::descriptor_address(queries);
  const uint32_t b = ptx::descriptor_address(keys);
  ptx::mma_fence();
#pragma unroll
  for (uint32_t step = 0; step < kExpandedQuery / 16; ++step) {
    const uint64_t rows =
        ptx::with_swizzle(a + step / 4 * (ExpandedShared::kQueryPanel >> 4) + step % 4 * 2);
    const uint64_t tokens =
        ptx::with_swizzle(b + step / 4 * (ExpandedShared::kPanel >> 4) + step % 4 * 2);
    if (step == 0) {
      ptx::mma_shared_fresh_bf16(scores, rows, tokens);
    } else {
      ptx::mma_shared<ptx::MmaType::kBf16, kExpandedTile>(scores, rows, tokens);
    }
  }
  ptx::mma_commit();
}

/// Values of 16 tokens from `address` on, a panel behind the other: 8 tokens are 1024 bytes.
__device__ __forceinline__ uint64_t expanded_values(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffffU) >> 4) |
         (static_cast<uint64_t>(ExpandedShared::kPanel >> 4) << 16) | (uint64_t{64} << 32) |
         (1ULL << 62);
}

/// Adds weights by values of a tile to the sums.
__device__ __forceinline__ void start_expanded_values(const ExpandedWeights& weights,
                                                      uint32_t values,
                                                      ExpandedSums& sums) {
  ptx::mma_fence();
#pragma unroll
  for (uint32_t step = 0; step < kExpandedTile / 16; ++step) {
    ptx::mma_registers<ptx::MmaType::kBf16, kExpandedValue, true>(
        sums, weights[step], expanded_values(values + step * 16 * 128));
  }
  ptx::mma_commit();
}

/// Hides the tokens of a tile that a row does not see. `seen`: of rows g and g + 8, from the tile's
/// first token on.
__device__ __forceinline__ void hide_expanded(ExpandedScores& scores, const int32_t (&seen)[2]) {
  const int own = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int e = 0; e < kExpandedTile / 2; ++e) {
    scores[e] = e / 4 * 8 + e % 2 < seen[e >> 1 & 1] - own ? scores[e] : -INFINITY;
  }
}

/// Scores [8 tokens / 2][4] become weights; `keep`: what earlier sums are to be multiplied by.
__device__ __forceinline__ void weigh_expanded(ExpandedScores& scores,
                                               float factor,
                                               ExpandedRows& rows,
                                               float (&keep)[2]) {
  constexpr int kChains = 2;
  float top[2][kChains] = {{rows.top[0], -INFINITY}, {rows.top[1], -INFINITY}};
#pragma unroll
  for (int e = 0; e < kExpandedTile / 2; ++e) {
    float& chain = top[e >> 1 & 1][e / 4 % kChains];
    chain = fmaxf(chain, scores[e]);
  }
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = fmaxf(top[r][0], top[r][1]);
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
    // A row may have seen nothing yet.
    shift[r] = largest == -INFINITY ? 0.0F : largest * factor;
    const float fallen = ptx::exp2_approx(fmaf(rows.top[r], factor, -shift[r]));
    keep[r] = rows.top[r] == largest ? 1.0F : fallen;  // no rounding where nothing has changed
    rows.top[r] = largest;
  }
  float total[2][kChains] = {};
#pragma unroll
  for (int e = 0; e < kExpandedTile / 2; ++e) {
    scores[e] = ptx::exp2_approx(fmaf(scores[e], factor, -shift[e >> 1 & 1]));
    total[e >> 1 & 1][e / 4 % kChains] += scores[e];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.total[r] = fmaf(rows.total[r], keep[r], total[r][0] + total[r][1]);
  }
}

/// What earlier tiles have added up, by the tops that are there now; and the tile's weights as the
/// operand of the next product.
__device__ __forceinline__ void take_expanded(const ExpandedScores& scores,
                                              const float (&keep)[2],
                                              ExpandedSums& sums,
                                              ExpandedWeights& weights) {
  if (__any_sync(~0U, keep[0] != 1.0F || keep[1] != 1.0F)) {
#pragma unroll
    for (int e = 0; e < kExpandedValue / 2; ++e) {
      sums[e] *= keep[e >> 1 & 1];
    }
  }
#pragma unroll
  for (int i = 0; i < kExpandedTile / 4; ++i) {
    weights[i / 4][i % 4] = ptx::pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }
}

/// The rows of a warpgroup's thread.
struct ExpandedThread {
  int group;
  int row;   // of the block: the first of its two, which lie 8 apart
  int lane;  // of the warp

  __device__ explicit ExpandedThread(int warpgroup)
      : group(warpgroup), lane(static_cast<int>(threadIdx.x) % 32) {
    row = group * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  }
};

/// Where the state of a row lies: its sums, its top and its total.
__device__ __forceinline__ float* expanded_state(const ExpandedArgs& args,
                                                 const ExpandedWork& work,
                                                 int row) {
  return args.state + (int64_t{work.first_row + row} * args.heads + work.head) * args.state_head;
}

__device__ __forceinline__ void begin_expanded(const ExpandedArgs& args,
                                               const ExpandedWork& work,
                                               const ExpandedThread& thread,
                                               ExpandedRows& rows,
                                               ExpandedSums& sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread.row + 8 * r;
    const bool has = work.goes_on && row < work.rows;
    const float* const from = expanded_state(args, work, has ? row : 0);
    rows.top[r] = has ? __ldcg(from + kExpandedValue) : -INFINITY;
    rows.total[r] = has && thread.lane % 4 == 0 ? __ldcg(from + kExpandedValue + 1) : 0.0F;
#pragma unroll
    for (int i = 0; i < kExpandedValue / 8; ++i) {
      float2 pair = make_float2(0.0F, 0.0F);
      if (has) {
        pair = __ldcg(reinterpret_cast<const float2*>(from + 8 * i + thread.lane % 4 * 2));
      }
      sums[4 * i + 2 * r] = pair.x;
      sums[4 * i + 2 * r + 1] = pair.y;
    }
  }
}

/// Results of the rows, or what they go on with.
__device__ __forceinline__ void end_expanded(const ExpandedArgs& args,
                                             const ExpandedWork& work,
                                             const ExpandedThread& thread,
                                             ExpandedRows& rows,
                                             const ExpandedSums& sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = rows.total[r];
    total += __shfl_xor_sync(~0U, total, 1);
    total += __shfl_xor_sync(~0U, total, 2);
    const int row = thread.row + 8 * r;
    if (row >= work.rows) {
      continue;
    }
    if (work.ends) {
      const float inverse = 1.0F / total;
      uint16_t* const out =
          args.out + (int64_t{work.first_row + row} * args.heads + work.head) * kExpandedValue +
          thread.lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kExpandedValue / 8; ++i) {
        *reinterpret_cast<uint32_t*>(out + 8 * i) =
            ptx::pack_bf16(sums[4 * i + 2 * r] * inverse, sums[4 * i + 2 * r + 1] * inverse);
      }
      continue;
    }
    float* const to = expanded_state(args, work, row);
#pragma unroll
    for (int i = 0; i < kExpandedValue / 8; ++i) {
      *reinterpret_cast<float2*>(to + 8 * i + thread.lane % 4 * 2) =
          make_float2(sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]);
    }
    if (thread.lane % 4 == 0) {
      to[kExpandedValue] = rows.top[r];
      to[kExpandedValue + 1] = total;
    }
  }
}

/// Hides what the thread's rows do not see of a tile, if any row of the warpgroup does not.
struct ExpandedMask {
  int32_t seen[2];
  int32_t always;  // what all rows of the warpgroup see

  __device__ ExpandedMask(const ExpandedWork& work, const ExpandedThread& thread)
      : seen{work.seen(thread.row), work.seen(thread.row + 8)},
        always(work.seen(thread.group * kGroupRows)) {}

  __device__ void hide(ExpandedScores& scores, uint32_t tile) const {
    const int32_t first = static_cast<int32_t>(tile) * kExpandedTile;
    if (first + kExpandedTile > always) {
      const int32_t rest[2] = {seen[0] - first, seen[1] - first};
      hide_expanded(scores, rest);
    }
  }
};

/// The warpgroups start their products in turns, one turn for each tile, the first one first.
struct ExpandedTurns {
  static constexpr uint32_t kBoth = 256;  // threads
  uint32_t own;
  uint32_t other;
  uint32_t tiles;

  __device__ ExpandedTurns(int group, int32_t count)
      : own(kExpandedTurn + static_cast<uint32_t>(group)),
        other(kExpandedTurn + 1 - static_cast<uint32_t>(group)),
        tiles(static_cast<uint32_t>(count)) {
    if (own != kExpandedTurn) {
      ptx::group_arrive(other, kBoth);
    }
  }
  __device__ void begin() const { ptx::group_sync(own, kBoth); }
  __device__ void end(uint32_t tile) const {
    if (own == kExpandedTurn || tile + 1 < tiles) {  // barriers are left as they were found
      ptx::group_arrive(other, kBoth);
    }
  }
};

/// A multiplying warpgroup.
__device__ __forceinline__ void multiply_expanded(const ExpandedArgs& args,
                                                  const ExpandedWork& work,
                                                  const ExpandedShared& shared,
                                                  int group) {
  const ExpandedThread thread(group);
  const auto tiles = static_cast<uint32_t>(work.tiles);
  const uint32_t queries = shared.queries(group);
  fetch_expanded_queries(args, work, queries, group);
  ExpandedRows rows;
  ExpandedSums sums;
  begin_expanded(args, work, thread, rows, sums);
  ptx::copy_wait<0>();
  ptx::fence_shared_to_async();
  ptx::group_sync(kExpandedOwn + static_cast<uint32_t>(group), 128);
  const ExpandedTurns turns(group, work.tiles);
  const ExpandedMask mask(work, thread);
  const auto wait_keys = [&](uint32_t tile) {
    if (tile < tiles) {
      shared.wait_full(shared.keys_full(tile), tile);
    }
  };
  const auto release = [&](uint32_t barrier) {
    if (thread.lane == 0) {  // each warp's products end for themselves
      ptx::barrier_arrive(barrier);
    }
  };

  float keep[2];
  ExpandedScores scores = {};
  ExpandedWeights weights;
  wait_keys(0);
  turns.begin();
  start_expanded_scores(queries, shared.keys(0), scores);
  turns.end(0);
  ptx::mma_wait<0>();
  ptx::pin(scores);
  release(shared.keys_empty(0));
  mask.hide(scores, 0);
  weigh_expanded(scores, args.score_factor, rows, keep);
  take_expanded(scores, keep, sums, weights);
  wait_keys(1);
  for (uint32_t tile = 0; tile + 1 < tiles; ++tile) {
    turns.begin();
    start_expanded_scores(queries, shared.keys(tile + 1), scores);
    shared.wait_full(shared.values_full(tile), tile);
    start_expanded_values(weights, shared.values(tile), sums);
    turns.end(tile + 1);
    ptx::mma_wait<1>();
    ptx::pin(scores);
    release(shared.keys_empty(tile + 1));
    mask.hide(scores, tile + 1);
    weigh_expanded(scores, args.score_factor, rows, keep);
    ptx::pin(scores);
    ptx::pin(rows.total);
    wait_keys(tile + 2);  // a branch here, so that no weight is made behind the wait for values
    ptx::mma_wait<0>();
    ptx::pin(sums);
    release(shared.values_empty(tile));
    take_expanded(scores, keep, sums, weights);
  }
  shared.wait_full(shared.values_full(tiles - 1), tiles - 1);
  start_expanded_values(weights, shared.values(tiles - 1), sums);
  ptx::mma_wait<0>();
  ptx::pin(sums);
  end_expanded(args, work, thread, rows, sums);
}

/// Grid: heads times blocks of rows.
__global__ __launch_bounds__(kExpandedThreads, 1) void expanded_sm90_kernel(
    const __grid_constant__ ExpandedArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[ExpandedShared::kBarriers];
  const ExpandedShared shared{ptx::shared_address(memory), ptx::shared_address(barriers)};
  if (threadIdx.x == 0) {
    shared.init();
    ptx::prefetch_tensor_map(args.maps.keys);
    ptx::prefetch_tensor_map(args.maps.rotated);
    ptx::prefetch_tensor_map(args.maps.values);
  }
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  __syncthreads();
  const ExpandedWork work(args);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    ptx::registers_release<24>();
    if (threadIdx.x == 0) {
      fetch_expanded(args, work, shared);
    }
  } else {
    ptx::registers_take<240>();
    multiply_expanded(args, work, shared, group - 1);
  }
}

}  // namespace nibble::cuda
