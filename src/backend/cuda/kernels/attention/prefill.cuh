#pragma once

// Causal attention of many rows per sequence over the paged cache, for sm_80 and sm_90a.
//
// A block serves kPrefillRows rows of one sequence and one query head; each of its warps 16 rows
// (FlashAttention-2, Dao 2023: scores stay in registers and are the next product's operand). Keys
// come in chunks of 64 tokens through a ring that the block shares. Codes become fp16 in registers,
// as in decode (attention/fragments.cuh).

#include "backend/cuda/kernels/attention/fragments.cuh"
#include "backend/cuda/kernels/attention/prefill_passes.cuh"
#include "backend/cuda/kernels/attention/weights.cuh"
#include "backend/cuda/kernels/quotient.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {

constexpr int kPrefillWarps = kPrefillRows / 16;
constexpr int kPrefillThreads = 32 * kPrefillWarps;
constexpr int kPrefillStages = 2;

/// Asks for a chunk's tiles; those past the sequence's end are not fetched.
template <typename Tile>
__device__ __forceinline__ void fetch_chunk(const PrefillArgs& args,
                                            const PrefillTask& task,
                                            int32_t chunk,
                                            uint32_t slot,
                                            [[maybe_unused]] uint32_t barrier) {
  constexpr int kTiles = kPrefillChunk / Tile::kTokens;
  const int32_t first = chunk * kTiles;
  const int32_t count = min(kTiles, (task.known + Tile::kTokens - 1) / Tile::kTokens - first);
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x != 0) {
    return;
  }
  ptx::fence_before_refill();
  ptx::barrier_arrive_expect(barrier, static_cast<uint32_t>(count * Tile::kBytes));
#endif
  for (int32_t i = 0; i < count; ++i) {
    const uint8_t* source = tile_of_task(args, task, first + i, Tile::kBytes);
    const uint32_t to = slot + static_cast<uint32_t>(i * Tile::kBytes);
#if __CUDA_ARCH__ >= 900
    ptx::bulk_copy(to, source, Tile::kBytes, barrier);
#else
    for (int byte = static_cast<int>(threadIdx.x) * 16; byte < Tile::kBytes;
         byte += 16 * kPrefillThreads) {
      ptx::copy_async16(to + static_cast<uint32_t>(byte), source + byte);
    }
#endif
  }
}

/// One warp's 16 rows: rows g (0) and g + 8 (1) of this lane.
template <typename Tile>
struct PrefillState {
  uint32_t q[Tile::kSteps][4];
  float q_sum[2];
  float sums[2 * Tile::kSteps][4];
  float top[2];
  float total[2];
  float offset[2];
};

template <typename Tile>
__device__ __forceinline__ void load_rows(
    PrefillState<Tile>& state, const uint16_t* q, int64_t stride, int rows, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float own = 0.0F;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      uint32_t pairs[Tile::kPairs];
      load_query_chunk<Tile>(row < rows ? q + row * stride : nullptr, chunk, lane % 4, pairs, own);
#pragma unroll
      for (int p = 0; p < Tile::kPairs; ++p) {
        const int pair = chunk * Tile::kPairs + p;
        state.q[pair / 2][pair % 2 * 2 + r] = pairs[p];
      }
    }
    own += __shfl_xor_sync(~0U, own, 1);
    own += __shfl_xor_sync(~0U, own, 2);
    state.q_sum[r] = own * Tile::kCodeUnit;
    state.top[r] = -INFINITY;
    state.total[r] = 0.0F;
    state.offset[r] = 0.0F;
  }
#pragma unroll
  for (int pair = 0; pair < 2 * Tile::kSteps; ++pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.sums[pair][i] = 0.0F;
    }
  }
}

constexpr int kChunkColumns = kPrefillChunk / 8;

/// Parameters of tokens 8 i + 2 t and the next, of K or V.
template <typename Tile>
struct ColumnParameters {
  TileParameters<Tile> of[2];
  __device__ void load(uint32_t address, int t) {
    of[0].load(address, 2 * t);
    of[1].load(address, 2 * t + 1);
  }
};

/// q in the steps of a chunk's channels of K, and what the channels' offsets add to a row's scores,
/// in units of codes.
template <typename Tile>
struct ChannelRows {
  uint32_t q[Tile::kSteps][4];
  float offset[4] = {};

  __device__ __forceinline__ ChannelRows(uint32_t parameters,
                                         const uint32_t (&whole)[Tile::kSteps][4],
                                         int t) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const ChannelWords<Tile::kHeadDim> words(parameters, chunk, t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * chunk + half;
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = i < 2 ? whole[step][i] : ptx::multiply_f16x2(whole[step][i], kSixteens);
          q[step][i] = ptx::multiply_f16x2(whole[step][i], words.scales[2 * half + i / 2]);
        }
        warp_mma<Tile>(offset, a, {words.offsets[2 * half], words.offsets[2 * half + 1]});
      }
    }
#pragma unroll
    for (float& sum : offset) {
      sum *= Tile::kCodeUnit;
    }
  }
};

/// Scores as chunk_scores() has them of a chunk's keys as they are.
///   keys  residual_tile()
///   q     the warp's rows, `rows` of them
template <typename Tile>
__device__ __forceinline__ void residual_chunk_scores(const uint8_t* keys,
                                                      const uint16_t* q,
                                                      int64_t stride,
                                                      int rows,
                                                      int lane,
                                                      float (&scores)[kPrefillChunk / 8][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (float(&four)[4] : scores) {
#pragma unroll
    for (float& score : four) {
      score = 0.0F;
    }
  }
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::kHeadDim / 32; ++chunk) {
    const uint4 low = row_words(g < rows ? q + g * stride : nullptr, chunk, t);
    const uint4 high = row_words(g + 8 < rows ? q + (g + 8) * stride : nullptr, chunk, t);
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int i = 0; i < kPrefillChunk / 8; ++i) {
      const uint4 key = key_words<Tile::kHeadDim>(keys, i * 8 + g, chunk, t);
      ptx::warp_mma_bf16(scores[i], first, {key.x, key.y});
      ptx::warp_mma_bf16(scores[i], second, {key.z, key.w});
    }
  }
#pragma unroll
  for (float(&four)[4] : scores) {
#pragma unroll
    for (float& score : four) {
      score *= Tile::kCodeUnit;
    }
  }
}

/// scores [token / 8][i] = q KT of a chunk.
template <typename Tile>
__device__ __forceinline__ void chunk_scores(uint32_t slot,
                                             const PrefillState<Tile>& state,
                                             const LaneOffsets& offsets,
                                             int lane,
                                             float (&scores)[kChunkColumns][4]) {
  const auto channels = [&] {
    if constexpr (Tile::kChannelKeys) {
      return ChannelRows<Tile>(slot + 2 * Tile::kRowsBytes, state.q, lane % 4);
    } else {
      return 0;
    }
  }();
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (Tile::kChannelKeys) {
        scores[i][j] = channels.offset[j];
      } else {
        scores[i][j] = Tile::kStatic ? -kStaticMiddle * state.q_sum[j / 2] : 0.0F;
      }
    }
  }
#pragma unroll
  for (int group = 0; group < kPrefillChunk / 16; ++group) {
    const int token = group * 16;
    const uint32_t rows = slot + static_cast<uint32_t>(token / Tile::kTokens * Tile::kBytes +
                                                       token % Tile::kTokens * Tile::kRow);
    uint32_t words[2][Tile::kChunks];
    load_words<Tile, false>(rows, offsets, words);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int pair = 2 * step + i;
          b[i] = KvForm<Tile::kFormat>::key_pair(words[half][pair / Tile::kPairs],
                                                 pair % Tile::kPairs);
        }
        if constexpr (Tile::kChannelKeys) {
          warp_mma<Tile>(scores[2 * group + half], channels.q[step], b);
        } else {
          warp_mma<Tile>(scores[2 * group + half], state.q[step], b);
        }
      }
    }
  }
  if constexpr (Tile::kHasScale && !Tile::kChannelKeys) {
#pragma unroll
    for (int tile = 0; tile < kPrefillChunk / Tile::kTokens; ++tile) {
      ColumnParameters<Tile> parameters;
      parameters.load(slot + static_cast<uint32_t>(tile * Tile::kBytes + 2 * Tile::kRowsBytes),
                      lane % 4);
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& score = scores[tile * (Tile::kTokens / 8) + i][j];
          const TileParameters<Tile>& own = parameters.of[j % 2];
          if constexpr (Tile::kHasOffset) {
            score = fmaf(score, own.scale(i), own.offset(i) * state.q_sum[j / 2]);
          } else {
            score = fmaf(state.q_sum[j / 2], -128.0F, score) * own.scale(i);
          }
        }
      }
    }
  }
}

/// Masks what rows at positions `position` and `position` + 8 do not see; `token` is the chunk's
/// first plus this lane's column.
template <typename Tile>
__device__ __forceinline__ void mask_chunk(float (&scores)[kChunkColumns][4],
                                           const PassesOfRows<Tile>& passes,
                                           const PrefillPass& pass,
                                           int position,
                                           int token,
                                           int window) {
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool seen = passes.sees(pass, position + j / 2 * 8, token + i * 8 + j % 2, window);
      scores[i][j] = seen ? scores[i][j] : -INFINITY;
    }
  }
}

/// Turns scores into weights of the new tops, and rescales the sums.
template <typename Tile, AttentionForm kForm>
__device__ __forceinline__ void weigh_chunk(float (&scores)[kChunkColumns][4],
                                            float factor,
                                            PrefillState<Tile>& state) {
  constexpr bool kShared = kForm == AttentionForm::kShared;
  const auto larger = [](float a, float b) { return kShared ? max_or_nan(a, b) : fmaxf(a, b); };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = kShared ? -INFINITY : state.top[r];
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
      top = larger(top, larger(scores[i][2 * r], scores[i][2 * r + 1]));
    }
    top = larger(top, __shfl_xor_sync(~0U, top, 1));
    top = larger(top, __shfl_xor_sync(~0U, top, 2));
    if constexpr (kShared) {
      state.total[r] = top < INFINITY ? state.total[r] : NAN;
      top = raised_top(state.top[r], top, factor);
    }
    const float unit = kShared ? 1.0F : factor;                // of tops
    const float shift = top == -INFINITY ? 0.0F : top * unit;  // a row that has seen nothing yet
    const float keep = ptx::exp2_approx(fmaf(state.top[r], unit, -shift));
    state.top[r] = top;
    state.total[r] *= keep;
    state.offset[r] *= keep;
#pragma unroll
    for (int pair = 0; pair < 2 * Tile::kSteps; ++pair) {
      state.sums[pair][2 * r] *= keep;
      state.sums[pair][2 * r + 1] *= keep;
    }
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[i][2 * r + c];
        score = kShared ? shared_weight(__fmaf_rn(score, factor, WeightForm::kBase - shift))
                        : ptx::exp2_approx(fmaf(score, factor, -shift));
      }
      if constexpr (kShared) {
        round_pair(scores[i][2 * r], scores[i][2 * r + 1]);
      }
      state.total[r] += scores[i][2 * r];
      state.total[r] += scores[i][2 * r + 1];
    }
  }
}

/// sums += weights V of a chunk.
template <typename Tile>
__device__ __forceinline__ void add_values(uint32_t slot,
                                           float (&weights)[kChunkColumns][4],
                                           const LaneOffsets& offsets,
                                           int lane,
                                           PrefillState<Tile>& state) {
  if constexpr (Tile::kStatic) {
#pragma unroll
    for (float(&pair)[4] : weights) {
#pragma unroll
      for (float& weight : pair) {
        weight *= kWeightUnit;
      }
    }
  }
  if constexpr (Tile::kHasScale) {
#pragma unroll
    for (int tile = 0; tile < kPrefillChunk / Tile::kTokens; ++tile) {
      ColumnParameters<Tile> parameters;
      parameters.load(slot + static_cast<uint32_t>(tile * Tile::kBytes + 2 * Tile::kRowsBytes +
                                                   Tile::kParameterBytes),
                      lane % 4);
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& weight = weights[tile * (Tile::kTokens / 8) + i][j];
          const TileParameters<Tile>& own = parameters.of[j % 2];
          if constexpr (Tile::kHasOffset) {
            state.offset[j / 2] = fmaf(weight, own.offset(i), state.offset[j / 2]);
          }
          weight *= own.scale(i) * kWeightUnit;
          if constexpr (Tile::kBiased) {
            state.offset[j / 2] += weight;
          }
        }
      }
    }
  }
#pragma unroll
  for (int group = 0; group < kPrefillChunk / 16; ++group) {
    const int token = group * 16;
    const uint32_t rows = slot + static_cast<uint32_t>(token / Tile::kTokens * Tile::kBytes +
                                                       token % Tile::kTokens * Tile::kRow);
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &weights[2 * group + i / 2][i % 2 * 2];
      a[i] = pack_operand<Tile>(two[0], two[1]);
    }
    uint32_t words[2][Tile::kChunks];
    load_words<Tile, true>(rows + Tile::kRowsBytes, offsets, words);
#pragma unroll
    for (int pair = 0; pair < 2 * Tile::kSteps; ++pair) {
      uint32_t b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[half] = KvForm<Tile::kFormat>::value_pair(words[half][pair / Tile::kPairs],
                                                    pair % Tile::kPairs);
      }
      warp_mma<Tile>(state.sums[pair], a, b);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void store_rows(PrefillState<Tile>& state,
                                           const PrefillArgs& args,
                                           uint16_t* out,
                                           int64_t stride,
                                           int rows,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = state.total[r];
    float offset = state.offset[r];
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      total += __shfl_xor_sync(~0U, total, step);
      offset += __shfl_xor_sync(~0U, offset, step);
    }
    if constexpr (Tile::kBiased) {
      offset *= -128.0F / kWeightUnit;
    }
    if constexpr (Tile::kStatic) {
      offset = -kStaticMiddle * total;
    }
    total += sink_weight(args, blockIdx.y, state.top[r] * args.top_factor);
    const float inverse = 1.0F / total;
    const int row = lane / 4 + 8 * r;
    if (row >= rows) {
      continue;
    }
#pragma unroll
    for (int pair = 0; pair < 2 * Tile::kSteps; ++pair) {
      float unit = args.value_factor;
      if constexpr (Tile::kInteger) {
        unit = 1.0F / (Tile::kCodeUnit * kWeightUnit * Tile::pair_factor(pair));
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float sum = fmaf(state.sums[pair][2 * r + c], unit, offset);
        const float value =
            Tile::kFormat == KvCode::kBf16 ? quotient(sum, total, inverse) : sum * inverse;
        out[row * stride + Tile::value_dim(pair, lane % 4 * 2 + c)] =
            static_cast<uint16_t>(ptx::pack_bf16(value, value));
      }
    }
  }
}

template <typename Tile, AttentionForm kForm>
__global__ __launch_bounds__(kPrefillThreads) void prefill_kernel(
    const __grid_constant__ PrefillArgs args) {
  constexpr int kTiles = kPrefillChunk / Tile::kTokens;
  constexpr uint32_t kSlot = kTiles * Tile::kBytes;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kPrefillStages];
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  const auto index = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // long rows first
  if (index >= __ldcg(args.plan.prefill_count)) {
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t slots = ptx::shared_address(shared);
  const uint32_t full = ptx::shared_address(barriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPrefillStages; ++i) {
      ptx::barrier_init(full + 8U * static_cast<uint32_t>(i), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const PrefillTask task = prefill_task(args, index, static_cast<int32_t>(blockIdx.y));
  const PrefillPasses<Tile> passes(task);
  fetch_chunk<Tile>(args, task, passes.at(0).chunk, slots, full);
#if __CUDA_ARCH__ < 900
  ptx::copy_commit();
#endif

  const int64_t head_column = int64_t{blockIdx.y} * Tile::kHeadDim;
  const int64_t row = task.first_row + warp * 16;
  const int rows = task.rows - warp * 16;
  const int position = task.first_position + warp * 16;
  PrefillState<Tile> state;
  load_rows<Tile>(state, args.q + row * args.q_stride + head_column, args.q_stride, rows, lane);
  const LaneOffsets offsets = lane_offsets<Tile>(lane);
  const PassesOfRows<Tile> own(passes, position, position + 16);
  for (int32_t i = 0; i < passes.count; ++i) {
    const PrefillPass pass = passes.at(i);
    const auto done = static_cast<uint32_t>(i);
    const uint32_t slot = slots + done % kPrefillStages * kSlot;
    if (i + 1 < passes.count) {
      const uint32_t next = (done + 1) % kPrefillStages;
      fetch_chunk<Tile>(args, task, passes.at(i + 1).chunk, slots + next * kSlot, full + 8 * next);
    }
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(full + 8 * (done % kPrefillStages), done / kPrefillStages % 2);
#else
    ptx::copy_commit();
    ptx::copy_wait<1>();
    __syncthreads();
#endif
    const int32_t token = pass.chunk * kPrefillChunk;
    if (token + kPrefillChunk > task.known) {
      for (int tile = warp; tile < kTiles; tile += kPrefillWarps) {
        const int32_t first = token + tile * Tile::kTokens;
        clear_unused<Tile>(slot + static_cast<uint32_t>(tile * Tile::kBytes), 0, task.known - first,
                           lane);
      }
      __syncthreads();
    }
    if (rows > 0 && own.takes(i)) {
      float scores[kChunkColumns][4];
      if (pass.coded) {
        chunk_scores<Tile>(slot, state, offsets, lane, scores);
      } else if constexpr (Tile::kChannelKeys) {
        residual_chunk_scores<Tile>(
            residual_tile<Tile>(args, task.sequence, pass.chunk, task.kv_head),
            args.q + row * args.q_stride + head_column, args.q_stride, rows, lane, scores);
      }
      if (own.masks(pass, args.window)) {
        mask_chunk<Tile>(scores, own, pass, position + lane / 4, token + lane % 4 * 2, args.window);
      }
      weigh_chunk<Tile, kForm>(scores, args.score_factor, state);
      add_values<Tile>(slot, scores, offsets, lane, state);
    }
    __syncthreads();  // all have read the slot that the next round fills
  }
  if (rows > 0) {
    store_rows<Tile>(state, args, args.out + row * args.out_stride + head_column, args.out_stride,
                     rows, lane);
  }
}

template <KvCode kCode, int kDim, AttentionForm kForm>
cudaError_t launch_prefill_kernel(const PrefillArgs& args,
                                  dim3 blocks,
                                  const LaunchContext& context) {
  using Tile = KvTile<kCode, kDim>;
  constexpr int kShared = kPrefillStages * kPrefillChunk / Tile::kTokens * Tile::kBytes;
  const auto kernel = prefill_kernel<Tile, kForm>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  return status != cudaSuccess ? status
                               : launch(kernel, {blocks, kPrefillThreads, kShared}, context, args);
}

template <KvCode kCode, AttentionForm kForm>
cudaError_t launch_prefill_form(const PrefillArgs& args,
                                int head_dim,
                                dim3 blocks,
                                const LaunchContext& context) {
  switch (head_dim) {
    case 64:
      return launch_prefill_kernel<kCode, 64, kForm>(args, blocks, context);
    case 128:
      return launch_prefill_kernel<kCode, 128, kForm>(args, blocks, context);
    case 256:
      return launch_prefill_kernel<kCode, 256, kForm>(args, blocks, context);
    default:
      return cudaErrorInvalidValue;
  }
}

template <KvCode kCode>
cudaError_t launch_prefill(const PrefillArgs& args,
                           int head_dim,
                           dim3 blocks,
                           const LaunchContext& context) {
  if constexpr (kCode == KvCode::kBf16) {
    if (args.shared) {
      return launch_prefill_form<kCode, AttentionForm::kShared>(args, head_dim, blocks, context);
    }
  }
  return launch_prefill_form<kCode, AttentionForm::kOwn>(args, head_dim, blocks, context);
}

}  // namespace nibble::cuda
