// What surrounds latent attention: the step's rows are normed, rotated and written to the cache,
// and its queries rotated. Angles, cosines and sines are computed in double precision and rounded
// once, as on the CPU.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kManyRows = 128;  // from here on a block does all heads of a row
constexpr int kMostPairs = kMostLatentDim / 2 / kThreads;
constexpr float kLeastScale = 1e-30F;  // of codes that are not all zero

__device__ __forceinline__ float2 load_pair(const uint16_t* from) {
  const uint32_t two = __ldcg(reinterpret_cast<const unsigned*>(from));
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000U));
}

/// Cosine and sine of pair `index` at a position.
__device__ __forceinline__ float2 turn_of(const LatentTurn& turn, int index, int32_t position) {
  double cosine = 0.0;
  double sine = 0.0;
  cosine_and_sine(static_cast<double>(position) * __ldg(turn.inv_freq + index), cosine, sine);
  return make_float2(static_cast<float>(cosine * turn.factor),
                     static_cast<float>(sine * turn.factor));
}

/// Pair `index` of numbers [dim], turned.
__device__ __forceinline__ float2 turned_pair(const LatentTurn& turn,
                                              const uint16_t* from,
                                              int index,
                                              float2 by) {
  const int half = turn.dim / 2;
  float2 pair;
  if (turn.interleaved) {
    pair = load_pair(from + 2 * index);
  } else {
    pair = make_float2(__uint_as_float(uint32_t{__ldcg(from + index)} << 16),
                       __uint_as_float(uint32_t{__ldcg(from + index + half)} << 16));
  }
  return make_float2(__fmaf_rn(pair.x, by.x, __fmul_rn(pair.y, -by.y)),
                     __fmaf_rn(pair.y, by.x, __fmul_rn(pair.x, by.y)));
}

__device__ __forceinline__ uint16_t rounded(float x) {
  return static_cast<uint16_t>(ptx::pack_bf16(x, 0.0F));
}

/// Sums over the block of two numbers of each thread.
__device__ __forceinline__ float2 sum_block(float2 own) {
  __shared__ float2 of_warps[kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    own.x += __shfl_xor_sync(~0U, own.x, step);
    own.y += __shfl_xor_sync(~0U, own.y, step);
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = own;
  }
  __syncthreads();
  float2 sum = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    sum.x += of_warps[warp].x;
    sum.y += of_warps[warp].y;
  }
  return sum;
}

__device__ __forceinline__ float squares(const uint16_t* from, int count) {
  float sum = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += kThreads) {
    const float2 pair = load_pair(from + 2 * i);
    sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
  }
  return sum;
}

/// The scale of the codes of the block's pairs: NaN if one is not finite.
__device__ __forceinline__ float scale_of_block(KvCode code, const float2 (&own)[kMostPairs]) {
  __shared__ float2 of_warps[kWarps];  // largest magnitude, and NaN or 0
  float2 all = make_float2(0.0F, 0.0F);
#pragma unroll
  for (const float2& pair : own) {
    all.x = fmaxf(all.x, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    all.y = fmaf(pair.x, 0.0F, fmaf(pair.y, 0.0F, all.y));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    all.x = fmaxf(all.x, __shfl_xor_sync(~0U, all.x, step));
    all.y += __shfl_xor_sync(~0U, all.y, step);
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = all;
  }
  __syncthreads();
  all = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    all.x = fmaxf(all.x, of_warps[warp].x);
    all.y += of_warps[warp].y;
  }
  const float scale = all.x / (code == KvCode::kInt8 ? 127.0F : 448.0F);
  return (scale < kLeastScale ? 0.0F : scale) + all.y;
}

/// Two numbers as codes, the first in the low byte.
__device__ __forceinline__ uint16_t coded(KvCode code, float2 pair, float inverse) {
  if (code == KvCode::kInt8) {
    const int first = max(-127, min(127, __float2int_rn(pair.x * inverse)));
    const int second = max(-127, min(127, __float2int_rn(pair.y * inverse)));
    return static_cast<uint16_t>((first & 0xff) | (second & 0xff) << 8);
  }
  return static_cast<uint16_t>(ptx::narrow_e4m3(pair.x * inverse, pair.y * inverse));
}

__device__ __forceinline__ bool is_bytes(KvCode code) {
  return code == KvCode::kInt8 || code == KvCode::kFp8;
}

/// Stores the block's pairs in 4 bits, a warp for each group.
__device__ __forceinline__ void store_groups(const LatentShape& shape,
                                             const float2 (&own)[kMostPairs],
                                             uint8_t* page,
                                             int32_t slot) {
  constexpr int kGroup = 128;
  __shared__ float2 all[kMostLatentDim / 2];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    all[thread + j * kThreads] = own[j];
  }
  __syncthreads();
  const int group = thread / 32;
  const int lane = thread % 32;
  if (group * kGroup >= shape.rank()) {
    return;
  }
  const float2 low = all[group * kGroup / 2 + lane];
  const float2 high = all[group * kGroup / 2 + 32 + lane];
  const HeadValues<kGroup> x{{{low.x, low.y}, {high.x, high.y}}};
  const __half2 line = KvForm<KvCode::kInt4>::fit<kGroup>(x, lane);
  const float scale = scale_of(line);
  const float offset = offset_of(line);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t codes =
        KvForm<KvCode::kInt4>::codes(x.v[half], scale > 0.0F ? 1.0F / scale : 0.0F, offset);
    page[latent_offset(shape, slot, group * kGroup + half * kGroup / 2 + 2 * lane)] =
        static_cast<uint8_t>(codes);
  }
  const float bad = sum_warp((low.x + low.y + high.x + high.y) * 0.0F);  // NaN if not finite
  if (lane == 0) {
    reinterpret_cast<__half2*>(page + latent_params_offset(shape, slot))[group] =
        __halves2half2(__low2half(line), __float2half_rn(offset + bad));
  }
}

/// A block per row.
__global__ __launch_bounds__(kThreads) void append_kernel(const LatentAppendLaunch args) {
  ptx::allow_successor();  // attention fetches what earlier steps wrote meanwhile
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t sequence = args.step.row_sequence[row];
  const int32_t position = args.step.row_position[row];
  const int half = args.turn.dim / 2;
  float2 by = make_float2(1.0F, 0.0F);
  if (thread < half) {
    by = turn_of(args.turn, thread, position);
  }
  ptx::wait_for_predecessor();
  if (sequence < 0) {
    return;
  }
  const int32_t rank = args.shape.row_dim - args.turn.dim;
  auto* const first = static_cast<uint16_t*>(args.rows) + row * args.stride;
  const uint16_t* const latent = first + args.q_rank;
  const bool norms = args.q_norm != nullptr;
  const float2 sums =
      sum_block(make_float2(norms ? squares(first, args.q_rank) : 0.0F, squares(latent, rank)));
  if (norms) {
    const float factor = rsqrtf(sums.x / static_cast<float>(args.q_rank) + args.norm_eps);
    for (int i = thread; i < args.q_rank / 2; i += kThreads) {
      const float2 pair = load_pair(first + 2 * i);
      const float2 weight = __ldg(reinterpret_cast<const float2*>(args.q_norm) + i);
      reinterpret_cast<uint32_t*>(first)[i] =
          ptx::pack_bf16(pair.x * factor * weight.x, pair.y * factor * weight.y);
    }
  }
  const int32_t page = __ldg(args.step.page_table + sequence * args.step.page_table_stride +
                             position / args.shape.page_size);
  const int32_t slot = position % args.shape.page_size;
  uint8_t* const to = static_cast<uint8_t*>(args.pages) + page * latent_page_bytes(args.shape);
  const auto place = [&](int dim) {
    return reinterpret_cast<uint16_t*>(to + latent_offset(args.shape, slot, dim));
  };
  const float factor = rsqrtf(sums.y / static_cast<float>(rank) + args.norm_eps);
  float2 own[kMostPairs];  // of the latent, those of this thread
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = thread + j * kThreads;
    own[j] = make_float2(0.0F, 0.0F);
    if (i < rank / 2) {
      const float2 pair = load_pair(latent + 2 * i);
      const float2 weight = __ldg(reinterpret_cast<const float2*>(args.latent_norm) + i);
      own[j] = make_float2(pair.x * factor * weight.x, pair.y * factor * weight.y);
    }
  }
  if (args.shape.code == KvCode::kInt4) {
    store_groups(args.shape, own, to, slot);
  }
  float inverse = 0.0F;
  if (is_bytes(args.shape.code)) {
    const float scale = scale_of_block(args.shape.code, own);
    inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
    if (thread == 0) {
      *reinterpret_cast<float*>(to + latent_params_offset(args.shape, slot)) = scale;
    }
  }
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = thread + j * kThreads;
    if (i >= rank / 2) {
      continue;
    }
    if (is_bytes(args.shape.code)) {
      *place(2 * i) = coded(args.shape.code, own[j], inverse);
    } else if (!args.shape.coded()) {
      *reinterpret_cast<uint32_t*>(place(2 * i)) = ptx::pack_bf16(own[j].x, own[j].y);
    }
  }
  for (int i = thread; i < half; i += kThreads) {
    const float2 pair = turned_pair(args.turn, latent + rank, i,
                                    i == thread ? by : turn_of(args.turn, i, position));
    *place(rank + i) = rounded(pair.x);
    *place(rank + half + i) = rounded(pair.y);
  }
}

/// Grid: rows, groups of heads.
__global__ __launch_bounds__(kThreads) void queries_kernel(const LatentQueryLaunch args) {
  extern __shared__ float2 turns[];
  ptx::allow_successor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t sequence = args.step.row_sequence[row];
  const int32_t position = args.step.row_position[row];
  const int half = args.turn.dim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kThreads) {
    turns[i] = turn_of(args.turn, i, position);
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  if (sequence < 0) {
    return;
  }
  const int step = static_cast<int>(gridDim.y) * kThreads;
  for (int at = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
       at < args.heads * half; at += step) {
    const int head = at / half;
    const int index = at % half;
    const auto* const from = static_cast<const uint16_t*>(args.q) + row * args.q_stride +
                             int64_t{head + 1} * args.head_dim - args.turn.dim;
    auto* const to = static_cast<uint16_t*>(args.out) +
                     (int64_t{row} * args.heads + head + 1) * args.out_dim - args.turn.dim;
    const float2 pair = turned_pair(args.turn, from, index, turns[index]);
    to[index] = rounded(pair.x);
    to[index + half] = rounded(pair.y);
  }
}

}  // namespace

cudaError_t append_latent(const LatentAppendLaunch& args, const LaunchContext& context) {
  return launch(append_kernel, {dim3(static_cast<unsigned>(args.step.rows)), kThreads, 0}, context,
                args);
}

cudaError_t rotate_latent_queries(const LatentQueryLaunch& args, const LaunchContext& context) {
  const int pairs = args.heads * args.turn.dim / 2;
  const int groups = args.step.rows >= kManyRows ? 1 : (pairs + kThreads - 1) / kThreads;
  const Grid grid{dim3(static_cast<unsigned>(args.step.rows), static_cast<unsigned>(groups)),
                  kThreads, static_cast<size_t>(args.turn.dim / 2) * sizeof(float2)};
  return launch(queries_kernel, grid, context, args);
}

}  // namespace nibble::cuda
