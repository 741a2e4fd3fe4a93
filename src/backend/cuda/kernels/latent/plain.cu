// Latent attention for any dimensions and device: a block per row and head, in plain arithmetic.

#include <algorithm>
#include <numbers>

#include <cuda_fp16.h>

#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 64;  // of a step of the online softmax
constexpr int kOwn = kMostLatentDim / kThreads;

struct PlainArgs {
  LatentShape shape;
  const uint16_t* q;
  int64_t q_stride;
  uint16_t* out;
  int64_t out_stride;
  const uint8_t* pages;
  const int32_t* page_table;
  int64_t page_table_stride;
  const int32_t* row_position;
  const int32_t* row_sequence;
  float score_factor;
};

__device__ __forceinline__ float widened(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ float number_of(const PlainArgs& args,
                                           const uint8_t* page,
                                           int token,
                                           int dim) {
  const uint8_t* const at = page + latent_offset(args.shape, token, dim);
  if (!args.shape.coded() || dim >= args.shape.rank()) {
    return widened(__ldcg(reinterpret_cast<const unsigned short*>(at)));
  }
  const float scale =
      __ldcg(reinterpret_cast<const float*>(page + latent_params_offset(args.shape, token)));
  const uint8_t code = __ldcg(at);
  if (args.shape.code == KvCode::kInt8) {
    return static_cast<float>(static_cast<int8_t>(code)) * scale;
  }
  const uint32_t wide = ptx::widen_e4m3(code);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(wide))) * scale;
}

__global__ __launch_bounds__(kThreads) void plain_kernel(const PlainArgs args) {
  __shared__ float query[kMostLatentDim];
  __shared__ float scores[kTokens];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int32_t dim = args.shape.row_dim;
  const int32_t sequence = args.row_sequence[row];
  if (sequence < 0) {
    return;
  }
  const int32_t* const table = args.page_table + sequence * args.page_table_stride;
  for (int d = thread; d < dim; d += kThreads) {
    query[d] = widened(args.q[row * args.q_stride + int64_t{head} * dim + d]);
  }
  __syncthreads();
  const int32_t seen = args.row_position[row] + 1;
  float top = -INFINITY;
  float total = 0.0F;
  float sums[kOwn] = {};
  const auto page_of = [&](int32_t token) {
    return args.pages + table[token / args.shape.page_size] * latent_page_bytes(args.shape);
  };
  for (int32_t first = 0; first < seen; first += kTokens) {
    const int count = min(kTokens, seen - first);
    for (int i = thread / 32; i < count; i += kWarps) {
      const uint8_t* const page = page_of(first + i);
      float score = 0.0F;
      for (int d = lane; d < dim; d += 32) {
        score = fmaf(query[d], number_of(args, page, (first + i) % args.shape.page_size, d), score);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        score += __shfl_xor_sync(~0U, score, step);
      }
      if (lane == 0) {
        scores[i] = score * args.score_factor;
      }
    }
    __syncthreads();
    float largest = top;
    for (int i = 0; i < count; ++i) {
      largest = fmaxf(largest, scores[i]);
    }
    const float keep = ptx::exp2_approx(top - largest);
    top = largest;
    total *= keep;
#pragma unroll
    for (float& sum : sums) {
      sum *= keep;
    }
    for (int i = 0; i < count; ++i) {
      const float weight = ptx::exp2_approx(scores[i] - top);
      const uint8_t* const page = page_of(first + i);
      total += weight;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (const int d = thread + j * kThreads; d < dim) {
          sums[j] =
              fmaf(weight, number_of(args, page, (first + i) % args.shape.page_size, d), sums[j]);
        }
      }
    }
    __syncthreads();
  }
  uint16_t* const out = args.out + row * args.out_stride + int64_t{head} * dim;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (const int d = thread + j * kThreads; d < dim) {
      out[d] = static_cast<uint16_t>(ptx::pack_bf16(sums[j] / total, 0.0F));
    }
  }
}

}  // namespace

cudaError_t plain_latent(const LatentLaunch& launch, const LaunchContext& context) {
  const PlainArgs args{.shape = launch.shape,
                       .q = static_cast<const uint16_t*>(launch.q),
                       .q_stride = launch.q_stride,
                       .out = static_cast<uint16_t*>(launch.out),
                       .out_stride = launch.out_stride,
                       .pages = static_cast<const uint8_t*>(launch.pages),
                       .page_table = launch.step.page_table,
                       .page_table_stride = launch.step.page_table_stride,
                       .row_position = launch.step.row_position,
                       .row_sequence = launch.step.row_sequence,
                       .score_factor = launch.shape.scale * std::numbers::log2e_v<float>};
  const dim3 blocks(static_cast<unsigned>(launch.step.rows),
                    static_cast<unsigned>(launch.shape.heads));
  return cuda::launch(plain_kernel, {blocks, kThreads, 0}, context, args);
}

}  // namespace nibble::cuda
