#pragma once

// Causal attention of many rows per sequence over the paged cache with warpgroup products (sm_90a),
// head_dim 64 and 128.
//
// A block serves kPrefillRows rows of a sequence and one query head: two warpgroups of 64 rows
// multiply, a third fetches. Keys and values come in chunks of 64 tokens; a bf16 page is already
// what wgmma reads (kv_layout.h), other formats are widened to bf16 by the third warpgroup. As in
// FlashAttention-3 (Shah et al. 2024) the product of the next chunk's scores runs while this
// chunk's weights and values are multiplied, and the softmax of one warpgroup while the other
// multiplies.

#include "backend/cuda/kernels/attention/prefill_sm90_chunks.cuh"
#include "backend/cuda/kernels/attention/weights.cuh"
#include "backend/cuda/kernels/quotient.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda {

constexpr int kSm90Threads = 384;

/// Softmax state of rows g and g + 8 of this lane's warp.
template <AttentionForm kForm>
struct Sm90Rows {
  static constexpr int kParts = kForm == AttentionForm::kShared ? 4 : 1;
  float top[2] = {-INFINITY, -INFINITY};
  float total[2][kParts] = {};
};

/// Scores [8 tokens / 2][4] become weights; `keep` is what earlier sums are to be multiplied by.
__device__ __forceinline__ void weigh(float (&scores)[kPrefillChunk / 2],
                                      float factor,
                                      Sm90Rows<AttentionForm::kOwn>& rows,
                                      float (&keep)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = rows.top[r];
#pragma unroll
    for (int i = 0; i < kPrefillChunk / 8; ++i) {
      top = fmaxf(top, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0U, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0U, top, 2));
    const float shift = top == -INFINITY ? 0.0F : top * factor;  // a row that has seen nothing yet
    keep[r] = ptx::exp2_approx(fmaf(rows.top[r], factor, -shift));
    rows.top[r] = top;
    rows.total[r][0] *= keep[r];
#pragma unroll
    for (int i = 0; i < kPrefillChunk / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * i + 2 * r + c];
        score = ptx::exp2_approx(fmaf(score, factor, -shift));
        rows.total[r][0] += score;
      }
    }
  }
}

/// The same in AttentionForm::kShared: tops are whole exponents; rounded weights are added in the
/// CPU's order, two neighbours of 32 tokens to a sum.
__device__ __forceinline__ void weigh(float (&scores)[kPrefillChunk / 2],
                                      float factor,
                                      Sm90Rows<AttentionForm::kShared>& rows,
                                      float (&keep)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPrefillChunk / 8; ++i) {
      largest = max_or_nan(largest, max_or_nan(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
    largest = max_or_nan(largest, __shfl_xor_sync(~0U, largest, 1));
    largest = max_or_nan(largest, __shfl_xor_sync(~0U, largest, 2));
    const float top = raised_top(rows.top[r], largest, factor);
    const float reference = top == -INFINITY ? 0.0F : top;  // a row that has seen nothing yet
    keep[r] = ptx::exp2_approx(rows.top[r] - reference);
    rows.top[r] = top;
#pragma unroll
    for (float& total : rows.total[r]) {
      total = largest < INFINITY ? total * keep[r] : NAN;
    }
#pragma unroll
    for (int i = 0; i < kPrefillChunk / 8; ++i) {
      float* const pair = &scores[4 * i + 2 * r];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        pair[c] = shared_weight(__fmaf_rn(pair[c], factor, WeightForm::kBase - reference));
      }
      round_pair(pair[0], pair[1]);
      rows.total[r][i % 4] += pair[0];
      rows.total[r][i % 4] += pair[1];
    }
  }
}

/// Weights as the operand of the next product: [16 tokens][register].
__device__ __forceinline__ void pack_weights(const float (&scores)[kPrefillChunk / 2],
                                             uint32_t (&weights)[kPrefillChunk / 16][4]) {
#pragma unroll
  for (int i = 0; i < kPrefillChunk / 4; ++i) {
    weights[i / 4][i % 4] = ptx::pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }
}

template <int kDim>
__device__ __forceinline__ void start_scores(uint32_t slot,
                                             const uint32_t (&q)[kDim / 16][4],
                                             float (&scores)[kPrefillChunk / 2]) {
#pragma unroll
  for (float& score : scores) {
    score = 0.0F;
  }
  ptx::mma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    ptx::mma_registers<ptx::MmaType::kBf16, kPrefillChunk>(scores, q[step],
                                                           Sm90Chunk<kDim>::keys(slot, step));
  }
  ptx::mma_commit();
}

template <int kDim>
__device__ __forceinline__ void start_values(uint32_t slot,
                                             const uint32_t (&weights)[kPrefillChunk / 16][4],
                                             float (&sums)[kDim / 2]) {
  ptx::mma_fence();
#pragma unroll
  for (int step = 0; step < kPrefillChunk / 16; ++step) {
    ptx::mma_registers<ptx::MmaType::kBf16, kDim, true>(sums, weights[step],
                                                        Sm90Chunk<kDim>::values(slot, step));
  }
  ptx::mma_commit();
}

/// A row's sum of weights, and 1 / it, times the factor of values.
struct Sm90Total {
  float total;
  float inverse;
};

template <AttentionForm kForm>
__device__ __forceinline__ Sm90Total
total_of(const Sm90Rows<kForm>& rows, int r, float value_factor, float sink) {
  const float(&part)[Sm90Rows<kForm>::kParts] = rows.total[r];
  float total = part[0];
  if constexpr (kForm == AttentionForm::kShared) {
    total = (part[0] + part[2]) + (part[1] + part[3]);
    total += __shfl_xor_sync(~0U, total, 2);
    total += __shfl_xor_sync(~0U, total, 1);
  } else {
    total += __shfl_xor_sync(~0U, total, 1);
    total += __shfl_xor_sync(~0U, total, 2);
  }
  total += sink;
  return {total, value_factor / total};
}

/// A multiplying warpgroup: rows [64] from `row` of the step on, `rows` of them real.
template <typename Tile, AttentionForm kForm>
__device__ __forceinline__ void attend_rows(const PrefillArgs& args,
                                            const PrefillTask& task,
                                            int group,
                                            int head,
                                            uint32_t slots,
                                            const Sm90Barriers& barriers) {
  constexpr int kDim = Tile::kHeadDim;
  using Chunk = Sm90Chunk<kDim>;
  const float factor = args.score_factor * Tile::kCodeUnit;  // codes have become values
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int own_row = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  const int32_t position = task.first_position + own_row;
  uint32_t q[kDim / 16][4];
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int row = own_row + 8 * (i & 1);
    const int64_t at = (task.first_row + row) * args.q_stride + head * kDim + i / 4 * 16 +
                       (i >> 1 & 1) * 8 + lane % 4 * 2;
    q[i / 4][i % 4] = row < task.rows ? __ldcg(reinterpret_cast<const unsigned*>(args.q + at)) : 0U;
  }
  // Passes past this warpgroup's last one are the block's last: nobody waits for their slots.
  const int32_t end = task.first_position + min(task.rows, (group + 1) * 64);
  const PassesOfRows<Tile> passes(PrefillPasses<Tile>(task),
                                  min(task.first_position + group * 64, end - 1), end);
  const int32_t count = passes.count();
  const auto await = [&](int32_t pass) {  // until it is in its slot
    const auto stage = static_cast<uint32_t>(pass % kSm90Stages);
    ptx::barrier_wait(barriers.full + 8 * stage, static_cast<uint32_t>(pass / kSm90Stages) % 2);
    return slots + stage * Chunk::kBytes;
  };
  const auto release = [&](int32_t pass) {
    if (lane == 0) {
      ptx::barrier_arrive(barriers.empty + 8 * static_cast<uint32_t>(pass % kSm90Stages));
    }
  };
  const auto skip = [&](int32_t from, int32_t to) {  // passes that other rows take
    if constexpr (Tile::kChannelKeys) {
      for (int32_t pass = from; pass < to; ++pass) {
        await(pass);
        release(pass);
      }
    }
  };
  const auto mask = [&](float(&scores)[kPrefillChunk / 2], int32_t i) {
    const PrefillPass pass = passes.passes.at(passes.at(i));
    if (!passes.masks(pass, args.window)) {
      return;
    }
    const int32_t token = pass.chunk * kPrefillChunk + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < kPrefillChunk / 2; ++e) {
      const bool seen =
          passes.sees(pass, position + (e >> 1 & 1) * 8, token + e / 4 * 8 + e % 2, args.window);
      scores[e] = seen ? scores[e] : -INFINITY;
    }
  };

  Sm90Rows<kForm> rows;
  float keep[2];
  float scores[kPrefillChunk / 2];
  uint32_t weights[kPrefillChunk / 16][4];
  float sums[kDim / 2];
#pragma unroll
  for (float& sum : sums) {
    sum = 0.0F;
  }
  skip(0, passes.at(0));
  uint32_t slot = await(passes.at(0));
  start_scores<kDim>(slot, q, scores);
  ptx::mma_wait<0>();
  ptx::pin(scores);
  mask(scores, 0);
  weigh(scores, factor, rows, keep);
  pack_weights(scores, weights);
  for (int32_t i = 0; i + 1 < count; ++i) {
    const int32_t pass = passes.at(i), next = passes.at(i + 1);
    skip(pass + 1, next);
    const uint32_t next_slot = await(next);
    start_scores<kDim>(next_slot, q, scores);
    start_values<kDim>(slot, weights, sums);
    ptx::mma_wait<1>();
    ptx::pin(scores);
    mask(scores, i + 1);
    weigh(scores, factor, rows, keep);
    ptx::mma_wait<0>();
    ptx::pin(sums);
    release(pass);  // what has read the chunk is the tensor cores, and they are done
    slot = next_slot;
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      sums[e] *= keep[e >> 1 & 1];
    }
    pack_weights(scores, weights);
  }
  start_values<kDim>(slot, weights, sums);
  ptx::mma_wait<0>();
  ptx::pin(sums);

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float unit = kForm == AttentionForm::kShared ? 1.0F : factor;  // of tops
    const float sink = sink_weight(args, head, rows.top[r] * unit);
    const Sm90Total of_row = total_of(rows, r, args.value_factor, sink);
    const auto result = [&](float sum) {
      return kForm == AttentionForm::kShared ? quotient(sum, of_row.total, of_row.inverse)
                                             : sum * of_row.inverse;
    };
    const int row = own_row + 8 * r;
    if (row >= task.rows) {
      continue;
    }
    uint16_t* const out =
        args.out + (task.first_row + row) * args.out_stride + head * kDim + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      *reinterpret_cast<uint32_t*>(out + 8 * i) =
          ptx::pack_bf16(result(sums[4 * i + 2 * r]), result(sums[4 * i + 2 * r + 1]));
    }
  }
}

/// Grid: query heads, blocks of rows. kForm: of rows up to kSharedPrefill.
template <typename Tile, AttentionForm kForm>
__global__ __launch_bounds__(kSm90Threads,
                             1) void prefill_sm90_kernel(const __grid_constant__ PrefillArgs args) {
  constexpr int kDim = Tile::kHeadDim;
  constexpr bool kWide = Tile::kFormat == KvCode::kBf16;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(8) uint64_t storage[2 * kSm90Stages + kSm90RawSlots];
  Sm90Barriers barriers{};
  barriers.full = ptx::shared_address(storage);
  barriers.empty = barriers.full + 8 * kSm90Stages;
  barriers.raw = barriers.empty + 8 * kSm90Stages;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSm90Stages; ++i) {
      ptx::barrier_init(barriers.full + 8 * i,
                        kWide ? 1 : 4 * ptx::kWarpArrivals);  // warps that widen
      ptx::barrier_init(barriers.empty + 8 * i, 8);           // warps that multiply
    }
    for (uint32_t i = 0; i < kSm90RawSlots; ++i) {
      ptx::barrier_init(barriers.raw + 8 * i, 1);
    }
    ptx::barrier_init_fence();
  }
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  __syncthreads();
  const auto index = static_cast<int32_t>(gridDim.y - 1 - blockIdx.y);  // long rows first
  if (index >= __ldcg(args.plan.prefill_count)) {
    return;
  }
  const auto head = static_cast<int32_t>(blockIdx.x);
  const PrefillTask task = prefill_task(args, index, head);
  const uint32_t slots = ptx::shared_address(shared);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (kWide) {
      ptx::registers_release<40>();
      if (warp == 0) {
        fetch_chunks<kDim>(args, task, slots, barriers, lane);
      }
    } else {
      ptx::registers_release<88>();
      widen_chunks<Tile>(args, task, slots, barriers, warp, lane);
    }
  } else {
    ptx::registers_take<kWide ? 232 : 208>();
    if constexpr (kForm == AttentionForm::kShared) {
      if (task.first_position + task.rows <= kSharedPrefill) {
        return attend_rows<Tile, kForm>(args, task, group - 1, head, slots, barriers);
      }
    }
    attend_rows<Tile, AttentionForm::kOwn>(args, task, group - 1, head, slots, barriers);
  }
}

template <KvCode kCode, int kDim, AttentionForm kForm>
cudaError_t launch_prefill_sm90_kernel(const PrefillArgs& args,
                                       dim3 blocks,
                                       const LaunchContext& context) {
  using Tile = KvTile<kCode, kDim>;
  constexpr int kRaw =
      kCode == KvCode::kBf16 ? 0 : kSm90RawSlots * (kPrefillChunk / Tile::kTokens) * Tile::kBytes;
  constexpr int kShared = kSm90Stages * static_cast<int>(Sm90Chunk<kDim>::kBytes) + kRaw;
  const auto kernel = prefill_sm90_kernel<Tile, kForm>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  return status != cudaSuccess
             ? status
             : launch(kernel, {dim3(blocks.y, blocks.x), kSm90Threads, kShared}, context, args);
}

template <KvCode kCode>
cudaError_t launch_prefill_sm90(const PrefillArgs& args,
                                int head_dim,
                                dim3 blocks,
                                const LaunchContext& context) {
  using enum AttentionForm;
  if constexpr (kCode == KvCode::kBf16) {
    if (args.shared) {
      return head_dim == 64
                 ? launch_prefill_sm90_kernel<kCode, 64, kShared>(args, blocks, context)
                 : launch_prefill_sm90_kernel<kCode, 128, kShared>(args, blocks, context);
    }
  }
  return head_dim == 64 ? launch_prefill_sm90_kernel<kCode, 64, kOwn>(args, blocks, context)
                        : launch_prefill_sm90_kernel<kCode, 128, kOwn>(args, blocks, context);
}

}  // namespace nibble::cuda
