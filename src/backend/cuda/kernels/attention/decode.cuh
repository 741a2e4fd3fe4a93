#pragma once

// Attention of one query row per sequence over the paged cache, for sm_80 and sm_90a.
//
// A block serves one KV head (and up to kColumns of its query heads) of one sequence at a time,
// along its share of the plan's line of tiles. Its warps take the tiles in turn, each through a
// ring of its own in shared memory, filled by bulk copies: no barrier among warps until a head is
// done. Where items are many and short a warp takes whole ones alone, so that none waits for
// another. Products are transposed: keys (and values) are the 16-row operand, query heads the
// columns, so little of the matrix unit is spent on heads that do not exist:
//   scores [16 tokens, kColumns] = K qT;  sums [head_dim, kColumns] += VT PT
// Codes become fp16 in registers without arithmetic (attention/fragments.cuh); K's scale and offset
// are applied to the scores, V's to the weights. Softmax state is per warp; warps are merged
// through shared memory, blocks that share a head through global memory by the block that finishes
// last, in the order of the line: results do not depend on timing.

#include "backend/cuda/kernels/attention/decode_scores.cuh"
#include "backend/cuda/kernels/attention/merge.cuh"
#include "backend/cuda/kernels/attention/ring.cuh"
#include "backend/cuda/kernels/attention/weights.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {

/// One warp's softmax over the tokens it has seen. Column c of n-tile n stands for query head
/// 8 n + 2 (lane % 4) + c; totals and offsets are of this lane's tokens alone.
template <typename Tile, int kColumns>
struct DecodeState {
  static constexpr int kTiles = kColumns / 8;
  float sums[Tile::kSteps][kTiles][4];
  float top[kTiles][2];
  float total[kTiles][2];
  float offset[kTiles][2];  // of integer codes, the same for all of head_dim

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = -INFINITY;
        total[n][c] = 0.0F;
        offset[n][c] = 0.0F;
      }
#pragma unroll
      for (int m = 0; m < Tile::kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = 0.0F;
        }
      }
    }
  }
};

/// Raises the state's tops to the tile's, and rescales what was summed if one has risen.
///   kForm  kShared: tops are whole exponents; a score that is not finite spoils the total
template <typename Tile, int kColumns, AttentionForm kForm>
__device__ __forceinline__ void raise_tops(
    const float (&scores)[Tile::kTokens / 16][kColumns / 8][4],
    float factor,
    DecodeState<Tile, kColumns>& state) {
  constexpr int kTiles = kColumns / 8;
  constexpr bool kShared = kForm == AttentionForm::kShared;
  const auto larger = [](float a, float b) { return kShared ? max_or_nan(a, b) : fmaxf(a, b); };
  float top[kTiles][2];
  bool risen = false;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top[n][c] = kShared ? -INFINITY : state.top[n][c];
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 8; ++i) {
        top[n][c] = larger(top[n][c], scores[i / 2][n][i % 2 * 2 + c]);
      }
      top[n][c] = larger(top[n][c], __shfl_xor_sync(~0U, top[n][c], 4));
      top[n][c] = larger(top[n][c], __shfl_xor_sync(~0U, top[n][c], 8));
      top[n][c] = larger(top[n][c], __shfl_xor_sync(~0U, top[n][c], 16));
      if constexpr (kShared) {
        risen = risen || !(__fmul_rn(top[n][c], factor) <= state.top[n][c]);
      } else {
        risen = risen || top[n][c] > state.top[n][c];
      }
    }
  }
  if (!__any_sync(~0U, risen)) {
    return;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float scale = factor;
      if constexpr (kShared) {
        state.total[n][c] = top[n][c] < INFINITY ? state.total[n][c] : NAN;
        top[n][c] = raised_top(state.top[n][c], top[n][c], factor);
        scale = 1.0F;
      }
      const float keep = ptx::exp2_approx((state.top[n][c] - top[n][c]) * scale);
      state.top[n][c] = top[n][c];
      state.total[n][c] *= keep;
      state.offset[n][c] *= keep;
#pragma unroll
      for (int m = 0; m < Tile::kSteps; ++m) {
        state.sums[m][n][c] *= keep;
        state.sums[m][n][2 + c] *= keep;
      }
    }
  }
}

/// Adds the values of a tile whose tokens low..high-1 are seen, by the tile's scores.
template <typename Tile, int kColumns, AttentionForm kForm>
__device__ __forceinline__ void add_scored(uint32_t tile,
                                           int low,
                                           int high,
                                           float (&scores)[Tile::kTokens / 16][kColumns / 8][4],
                                           const LaneOffsets& offsets,
                                           float factor,
                                           int lane,
                                           DecodeState<Tile, kColumns>& state) {
  constexpr int kTiles = kColumns / 8;
  constexpr int kGroups = Tile::kTokens / 16;
  if (low > 0 || high < Tile::kTokens) {
    mask_scores<Tile, kTiles>(scores, low, high, lane / 4);
    clear_unused<Tile>(tile, low, high, lane);
  }
  raise_tops<Tile, kColumns, kForm>(scores, factor, state);

  uint32_t weights[kGroups][kTiles][2];
  [[maybe_unused]] TileParameters<Tile> parameters;
  if constexpr (Tile::kHasScale) {
    parameters.load(tile + 2 * Tile::kRowsBytes + Tile::kParameterBytes, lane / 4);
  }
  constexpr float kUnit = Tile::kStatic ? kWeightUnitLog2 : 0.0F;  // of weights, as an exponent
#pragma unroll
  for (int i = 0; i < Tile::kTokens / 8; ++i) {
    [[maybe_unused]] const float scale = Tile::kHasScale ? parameters.scale(i) * kWeightUnit : 1.0F;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float weight[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float score = scores[i / 2][n][i % 2 * 2 + c];
        if constexpr (kForm == AttentionForm::kShared) {
          weight[c] = shared_weight(__fmaf_rn(score, factor, WeightForm::kBase - state.top[n][c]));
        } else {
          weight[c] = ptx::exp2_approx(fmaf(score, factor, kUnit - state.top[n][c] * factor));
        }
      }
      if constexpr (kForm == AttentionForm::kShared) {
        round_pair(weight[0], weight[1]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        state.total[n][c] += weight[c];
        if constexpr (Tile::kHasOffset) {
          state.offset[n][c] = fmaf(weight[c], parameters.offset(i), state.offset[n][c]);
        }
        if constexpr (Tile::kHasScale) {
          weight[c] *= scale;
        }
        if constexpr (Tile::kBiased) {
          state.offset[n][c] += weight[c];
        }
      }
      weights[i / 2][n][i % 2] = ptx::transpose_matrix(pack_operand<Tile>(weight[0], weight[1]));
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    uint32_t words[2][Tile::kChunks];
    load_words<Tile, true>(tile + Tile::kRowsBytes + static_cast<uint32_t>(group * 16 * Tile::kRow),
                           offsets, words);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = 2 * step + i % 2;
        a[i] = KvForm<Tile::kFormat>::value_pair(words[i / 2][pair / Tile::kPairs],
                                                 pair % Tile::kPairs);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        warp_mma<Tile>(state.sums[step][n], a, weights[group][n]);
      }
    }
  }
}

/// Adds a tile whose tokens low..high-1 are seen.
template <typename Tile, int kColumns, AttentionForm kForm>
__device__ __forceinline__ void add_tile(uint32_t tile,
                                         int low,
                                         int high,
                                         const DecodeQuery<Tile, kColumns>& query,
                                         const LaneOffsets& offsets,
                                         float factor,
                                         int lane,
                                         DecodeState<Tile, kColumns>& state) {
  float scores[Tile::kTokens / 16][kColumns / 8][4];
  tile_scores<Tile, kColumns>(tile, query, offsets, lane, scores);
  add_scored<Tile, kColumns, kForm>(tile, low, high, scores, offsets, factor, lane, state);
}

/// The same by its keys as they are.
template <typename Tile, int kColumns>
__device__ __forceinline__ void add_residual(const DecodeArgs& args,
                                             const uint8_t* keys,
                                             const uint16_t* q,
                                             int heads,
                                             uint32_t tile,
                                             int low,
                                             int high,
                                             const LaneOffsets& offsets,
                                             int lane,
                                             DecodeState<Tile, kColumns>& state) {
  float scores[Tile::kTokens / 16][kColumns / 8][4];
  residual_scores<Tile, kColumns>(keys, q, heads, lane, scores);
  add_scored<Tile, kColumns, AttentionForm::kOwn>(tile, low, high, scores, offsets,
                                                  args.score_factor, lane, state);
}

template <typename Tile, int kColumns>
__device__ __forceinline__ void add_tile_in_form(const DecodeArgs& args,
                                                 uint32_t tile,
                                                 int low,
                                                 int high,
                                                 const DecodeQuery<Tile, kColumns>& query,
                                                 const LaneOffsets& offsets,
                                                 int lane,
                                                 DecodeState<Tile, kColumns>& state) {
  if constexpr (Tile::kFormat == KvCode::kBf16) {
    if (args.shared) {
      add_tile<Tile, kColumns, AttentionForm::kShared>(tile, low, high, query, offsets,
                                                       args.score_factor, lane, state);
      return;
    }
  }
  add_tile<Tile, kColumns, AttentionForm::kOwn>(tile, low, high, query, offsets, args.score_factor,
                                                lane, state);
}

/// Sums over the lanes, then to shared memory: [head][head_dim + 4] sums in V's units, and tops and
/// totals [kColumns].
template <typename Tile, int kColumns>
__device__ __forceinline__ void store_state(DecodeState<Tile, kColumns>& state,
                                            int heads,
                                            float value_factor,
                                            int lane,
                                            float* sums,
                                            float2* tops) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float total = state.total[n][c];
      float offset = state.offset[n][c];
#pragma unroll
      for (int step = 4; step <= 16; step *= 2) {
        total += __shfl_xor_sync(~0U, total, step);
        if constexpr (Tile::kHasScale) {
          offset += __shfl_xor_sync(~0U, offset, step);
        }
      }
      if constexpr (Tile::kStatic) {
        total /= kWeightUnit;
        offset = -kStaticMiddle * total;
      }
      if constexpr (Tile::kBiased) {
        offset *= -128.0F / kWeightUnit;
      }
      const int head = n * 8 + lane % 4 * 2 + c;
      if (head >= heads) {
        continue;
      }
      if (lane < 4) {
        tops[head] = make_float2(state.top[n][c], total);
      }
#pragma unroll
      for (int pair = 0; pair < 2 * Tile::kSteps; ++pair) {
        float unit = value_factor;
        if constexpr (Tile::kInteger) {
          unit = 1.0F / (Tile::kCodeUnit * kWeightUnit * Tile::pair_factor(pair));
        }
        sums[head * (Tile::kHeadDim + 4) + Tile::value_dim(pair, lane / 4)] =
            fmaf(state.sums[pair / 2][n][pair % 2 * 2 + c], unit, offset);
      }
    }
  }
}

/// Gives an item out that one warp has seen all of, from its own state in shared memory.
template <typename Tile>
__device__ __forceinline__ void give_item(const DecodeArgs& args,
                                          int64_t first_head,
                                          int heads,
                                          const float* sums,
                                          const float2* tops,
                                          uint16_t* out) {
  constexpr int kDim = Tile::kHeadDim;
  for (int e = static_cast<int>(threadIdx.x) % 32; e < heads * kDim / 4; e += 32) {
    const int head = e / (kDim / 4);
    const int d = e % (kDim / 4) * 4;
    const float2 own = tops[head];
    const float total = own.y + sink_weight(args, first_head + head, own.x * args.top_factor);
    const float4 sum = *reinterpret_cast<const float4*>(sums + head * (kDim + 4) + d);
    store_bf16x4(out + head * kDim + d, quotient4(sum, total));
  }
}

/// The barriers of a warp's ring, by its lanes.
__device__ __forceinline__ void init_ring_of_warp(uint64_t* barriers, int32_t stages, int lane) {
  if (lane == 0) {
    for (int i = 0; i < stages; ++i) {
      ptx::barrier_init(ptx::shared_address(barriers + i), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncwarp();
}

/// Which blocks share an item that lies from `begin` to `end` on the line.
__device__ __forceinline__ void find_slots(int32_t begin,
                                           int32_t end,
                                           const BlockShare& share,
                                           PartialSlots& slots) {
  slots.first_block = share_owner(begin, share.blocks, share.total);
  slots.last_block = share_owner(end - 1, share.blocks, share.total);
  slots.first_slot =
      2 * slots.first_block + (share_begin(slots.first_block, share.blocks, share.total) != begin);
}

template <typename Tile, int kColumns, DecodeItems kItems>
__global__ __launch_bounds__(kDecodeThreads,
                             2) void decode_kernel(const __grid_constant__ DecodeArgs args) {
  constexpr int kDim = Tile::kHeadDim;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint8_t* const rest = shared + kDecodeWarps * args.stages * Tile::kBytes;
  auto* const barriers = reinterpret_cast<uint64_t*>(rest);  // [warp][4]
  auto* const is_last = reinterpret_cast<int32_t*>(rest + 128);
  auto* const tops = reinterpret_cast<float2*>(rest + 256);  // [warp][kColumns]
  const int heads_at_most = min(args.ratio, kColumns);
  auto* const sums = reinterpret_cast<float*>(tops + kDecodeWarps * kColumns);
  const int warp_sums = heads_at_most * (kDim + 4);

  ptx::allow_successor();
  const auto block = static_cast<int32_t>(blockIdx.x);
  LineWalker walker;
  const BlockShare share = walker.start(args, block);
  if (share.begin == share.end) {
    ptx::wait_for_predecessor();  // a grid that has ended tells its successor that all before have
    return;
  }
  const auto [begin, end, blocks, total, planned_alone] = share;
  init_ring_of_warp(barriers + warp * 4, args.stages, lane);
  TileRing<Tile, kItems> ring;
  ring.slots =
      ptx::shared_address(shared) + static_cast<uint32_t>(warp * args.stages * Tile::kBytes);
  ring.barriers = ptx::shared_address(barriers + warp * 4);
  ring.stages = args.stages;
  ring.warp = warp;
  ring.planned_alone = planned_alone;
  ring.segments = {walker, begin, end, begin, 0};
  ShareSegments segments = ring.segments;
  const bool alone = ring.alone();
  ring.start(args);
  int filled = 0;
  if (ring.remaining > 0) {
    for (; filled < args.stages && !ring.is_fresh(); ++filled) {
      ring.fill(args, lane);
      if (ring.remaining == 0) {
        ++filled;
        break;
      }
    }
  }
  ptx::wait_for_predecessor();
  for (; filled < args.stages; ++filled) {
    ring.fill(args, lane);
  }

  const LaneOffsets offsets = lane_offsets<Tile>(lane);
  for (; segments.more(); segments.next(args)) {
    const LineWalker& place = segments.walker;
    const int32_t count = segments.count();
    const WarpTiles own(segments, alone, warp);
    const bool one_warp = alone && segments.whole();
    if (one_warp && own.first >= count) {
      continue;
    }
    const int32_t kv_head = place.at.item / args.groups;
    const int32_t first_head = place.at.item % args.groups * kColumns;
    const int heads = min(args.ratio - first_head, kColumns);
    const int64_t column = int64_t{kv_head * args.ratio + first_head} * kDim;
    const int64_t row = place.sequence.row;
    uint16_t* const out = args.out + row * args.out_stride + column;
    DecodeQuery<Tile, kColumns> query;
    query.load(args.q + row * args.q_stride + column, heads, lane);
    DecodeState<Tile, kColumns> state;
    state.clear();
    const int32_t kv_len = place.sequence.kv_len;
    const int32_t oldest = args.window > 0 ? max(0, kv_len - args.window) : 0;
    for (int32_t i = own.first; i < count; i += own.step) {
      const int32_t token = (place.at.tile + i) * Tile::kTokens;
      const uint32_t tile = ring.wait();
      if (!Tile::kChannelKeys || place.at.tile + i + 1 < place.sequence.end_tile) {
        add_tile_in_form<Tile, kColumns>(args, tile, oldest - token, kv_len - token, query, offsets,
                                         lane, state);
      } else if constexpr (Tile::kChannelKeys) {  // the query's own tile
        add_residual<Tile, kColumns>(
            args, residual_tile<Tile>(args, place.at.sequence, place.at.tile + i, kv_head),
            args.q + row * args.q_stride + column, heads, tile, oldest - token, kv_len - token,
            offsets, lane, state);
      }
      ring.release(args, lane);
    }
    store_state<Tile, kColumns>(state, heads, args.value_factor, lane, sums + warp * warp_sums,
                                tops + warp * kColumns);
    if (one_warp) {
      __syncwarp();
      give_item<Tile>(args, column / kDim, heads, sums + warp * warp_sums, tops + warp * kColumns,
                      out);
      __syncwarp();  // the state has been read
      continue;
    }
    __syncthreads();

    // The head is whole if all its tiles are ours.
    const int32_t head_begin = segments.item_begin();
    const int32_t head_end = segments.item_end();
    const bool whole = segments.whole();
    PartialSlots slots{};
    if (!whole) {
      find_slots(head_begin, head_end, share, slots);
    }
    for (int e = static_cast<int>(threadIdx.x); e < heads * kDim / 4; e += kDecodeThreads) {
      const int head = e / (kDim / 4);
      const int d = e % (kDim / 4) * 4;
      float top = tops[head].x;
#pragma unroll
      for (int w = 1; w < kDecodeWarps; ++w) {
        top = fmaxf(top, tops[w * kColumns + head].x);
      }
      float head_total = 0.0F;
      float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) {
        const float2 part = tops[w * kColumns + head];
        const float weight = ptx::exp2_approx((part.x - top) * args.top_factor);
        head_total = fmaf(part.y, weight, head_total);
        add4(sum, *reinterpret_cast<const float4*>(sums + w * warp_sums + head * (kDim + 4) + d),
             weight);
      }
      if (whole) {
        head_total += sink_weight(args, column / kDim + head, top * args.top_factor);
        store_bf16x4(out + head * kDim + d, quotient4(sum, head_total));
      } else {
        const int32_t slot = slots.slot(block) * kColumns + head;
        *reinterpret_cast<float4*>(args.partial_sums + int64_t{slot} * kDim + d) = sum;
        if (d == 0) {
          args.partial_tops[slot] = make_float2(top, head_total);
        }
      }
    }
    __syncthreads();  // the warps' states have been read, the partial results written
    if (!whole) {
      if (threadIdx.x == 0) {
        const auto others = static_cast<uint32_t>(slots.last_block - slots.first_block);
        uint32_t* const counter = args.arrivals + slots.first_block;
        *is_last = ptx::add_acquire_release(counter, 1) == others ? 1 : 0;
        if (*is_last != 0) {
          *counter = 0;
        }
      }
      __syncthreads();
      if (*is_last != 0) {
        merge_blocks<kDim, kColumns>(args, slots, column / kDim, heads, sums, out);
      }
    }
  }
}

template <KvCode kCode, int kDim, int kColumns>
cudaError_t launch_decode_kernel(const DecodeArgs& args,
                                 const DecodeGrid& grid,
                                 const LaunchContext& context) {
  // What a head's beginning and end cost counts where its tiles are soon read.
  constexpr bool kMayBeAlone = kColumns == 8 && kDim <= 128 && kCode != KvCode::kBf16;
  constexpr DecodeItems kMany = kMayBeAlone ? DecodeItems::kAlone : DecodeItems::kOfAllWarps;
  const auto kernel = grid.many_items
                          ? decode_kernel<KvTile<kCode, kDim>, kColumns, kMany>
                          : decode_kernel<KvTile<kCode, kDim>, kColumns, DecodeItems::kOfAllWarps>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes);
  if (status != cudaSuccess) {
    return status;
  }
  const Grid where{dim3(static_cast<unsigned>(grid.blocks)), kDecodeThreads,
                   static_cast<size_t>(grid.shared_bytes)};
  return launch(kernel, where, context, args);
}

template <KvCode kCode>
cudaError_t launch_decode(const DecodeArgs& args,
                          const DecodeGrid& grid,
                          int head_dim,
                          const LaunchContext& context) {
  const bool wide = grid.columns == 16;
  switch (head_dim) {
    case 64:
      return wide ? launch_decode_kernel<kCode, 64, 16>(args, grid, context)
                  : launch_decode_kernel<kCode, 64, 8>(args, grid, context);
    case 128:
      return wide ? launch_decode_kernel<kCode, 128, 16>(args, grid, context)
                  : launch_decode_kernel<kCode, 128, 8>(args, grid, context);
    case 256:
      return launch_decode_kernel<kCode, 256, 8>(args, grid, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
