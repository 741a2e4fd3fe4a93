#pragma once

#include <cstdint>

#include "backend/cuda/sampling.h"

namespace nibble::cuda {

inline constexpr unsigned kEveryLane = 0xffffffffU;
inline constexpr uint32_t kMagnitudeBits = 0x7fffffffU;
inline constexpr uint32_t kInfinity = 0x7f800000U;
inline constexpr uint32_t kBanned =
    0xffabcdefU;  // stands for a banned logit: a NaN nobody computes

inline constexpr int kPieceTokens = 4096;
inline constexpr int64_t kMaxVocab = int64_t{1} << 19;
inline constexpr int kMaxPieces = static_cast<int>(kMaxVocab / kPieceTokens);
inline constexpr int kBins = 2048;
inline constexpr float kBinsPerNat = 32.0F;
inline constexpr int kWeightBits = 44;  // 2^19 weights of at most 1 << 44 stay below 2^64
inline constexpr double kWeightOne = 0x1p44;

using Key = unsigned long long;
using Weight = unsigned long long;

/// Scratch of a call; * is zero between calls.
struct SampleWorkspace {
  Key* best = nullptr;             // * [rows] largest sample_key(), 0 before the first
  Weight* weights = nullptr;       // * [rows, kBins] of rows that rank their tokens
  Weight* pieces = nullptr;        // [rows, kMaxPieces] weights that min_p leaves
  double* log_sum = nullptr;       // [rows] log(sum(exp(logits)))
  uint32_t* counts = nullptr;      // * [rows, kBins]
  uint32_t* not_finite = nullptr;  // * [rows]
  float* replaced = nullptr;       // [max_edits] logits before the edits
};

/// sample_workspace_bytes() has their sum.
__device__ inline SampleWorkspace sample_workspace(const SampleArgs& args) {
  SampleWorkspace out;
  out.best = static_cast<Key*>(args.workspace);
  out.weights = out.best + args.max_rows;
  out.pieces = out.weights + args.max_rows * kBins;
  out.log_sum = reinterpret_cast<double*>(out.pieces + args.max_rows * kMaxPieces);
  out.counts = reinterpret_cast<uint32_t*>(out.log_sum + args.max_rows);
  out.not_finite = out.counts + args.max_rows * kBins;
  out.replaced = reinterpret_cast<float*>(out.not_finite + args.max_rows);
  return out;
}

/// Whether a draw walks the tokens by likelihood.
__device__ __forceinline__ bool is_ranked(const RowSampling& sampling) {
  return sampling.top_k > 0 || sampling.top_p < 1;
}

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & kMagnitudeBits) < kInfinity;
}

/// Integers in the order of finite floats; both zeros give the same.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = (__float_as_uint(x) & kMagnitudeBits) == 0 ? 0 : __float_as_uint(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t bits) {
  return __uint_as_float((bits >> 31) != 0 ? bits & kMagnitudeBits : ~bits);
}

/// A larger key is a likelier token; of equals, the smaller id. Never 0.
__device__ __forceinline__ unsigned long long sample_key(float logit, int32_t token) {
  return (static_cast<unsigned long long>(ordered_bits(logit)) << 32) |
         (0xffffffffU - static_cast<uint32_t>(token));
}

__device__ __forceinline__ int32_t key_token(unsigned long long key) {
  return static_cast<int32_t>(0xffffffffU - static_cast<uint32_t>(key));
}

__device__ __forceinline__ float key_logit(unsigned long long key) {
  return from_ordered_bits(static_cast<uint32_t>(key >> 32));
}

/// Combines one value per thread of a block (a multiple of 32 threads), in a fixed order; all get
/// the result. `shared` has 32 elements and is free again on return.
template <typename T, typename Combine>
__device__ T combine_block(T value, T neutral, T* shared, const Combine& combine) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kEveryLane, value, offset));
  }
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : neutral;
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kEveryLane, value, offset));
  }
  __syncthreads();
  return value;
}

template <typename T>
__device__ T sum_block(T value, T* shared) {
  return combine_block(value, T{0}, shared, [](T a, T b) { return a + b; });
}

template <typename T>
__device__ T max_block(T value, T* shared) {
  return combine_block(value, T{0}, shared, [](T a, T b) { return a > b ? a : b; });
}

/// body(logit, token) for the tokens of a row from `first` to `end`, by `threads` threads of which
/// this is number `thread`; each takes ascending tokens. `first` is a multiple of 4.
template <typename Body>
__device__ __forceinline__ void for_each_logit(
    const float* logits, int64_t first, int64_t end, int thread, int threads, const Body& body) {
  constexpr int kBatch = 4;  // loads under way per thread
  const auto last = static_cast<int>(end);
  const int stride = 4 * threads;
  int token = static_cast<int>(first) + 4 * thread;
  if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
    for (; token + (kBatch - 1) * stride + 4 <= last; token += kBatch * stride) {
      float4 v[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        v[u] = *reinterpret_cast<const float4*>(logits + token + u * stride);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        body(v[u].x, token + u * stride);
        body(v[u].y, token + u * stride + 1);
        body(v[u].z, token + u * stride + 2);
        body(v[u].w, token + u * stride + 3);
      }
    }
  }
  for (; token < last; token += stride) {
    for (int j = 0; j < 4 && token + j < last; ++j) {
      body(logits[token + j], token + j);
    }
  }
}

struct Histogram {
  uint32_t counts[kBins];
  uint32_t low[kBins];  // weights: their lower and their upper words
  uint32_t high[kBins];
};

/// A row and its distribution.
struct Row {
  const float* logits;
  int64_t vocab;
  float largest;
  float inverse;

  __device__ float weight(float logit) const {
    return __float_as_uint(logit) == kBanned ? 0.0F : expf((logit - largest) * inverse);
  }
  /// Place on the axis of bins, from the largest logit on.
  __device__ float place(float logit) const { return (largest - logit) * inverse * kBinsPerNat; }
};

__device__ __forceinline__ int bin_of(float place) {
  return min(kBins - 1, static_cast<int>(place));
}

/// weight * kWeightOne, rounded down, for weights of at most 1: by shifts, as the conversion to 64
/// bits is slow.
__device__ __forceinline__ Weight fixed(float weight) {
  const uint32_t bits = __float_as_uint(weight);
  const int shift = static_cast<int>(bits >> 23) - (127 + 23 - kWeightBits);
  const uint32_t mantissa = (bits & 0x7fffffU) | 0x800000U;
  return shift >= 0 ? static_cast<Weight>(mantissa) << shift
                    : static_cast<Weight>(mantissa >> min(-shift, 31));
}

/// 64-bit sums by 32-bit atomics, which shared memory has: the carry follows the lower word.
__device__ __forceinline__ void count_token(Histogram& histogram, int bin, Weight weight) {
  atomicAdd(histogram.counts + bin, 1U);
  const auto low = static_cast<uint32_t>(weight);
  const uint32_t before = atomicAdd(histogram.low + bin, low);
  const auto high = static_cast<uint32_t>(weight >> 32) + (before + low < before ? 1U : 0U);
  if (high != 0) {
    atomicAdd(histogram.high + bin, high);
  }
}

__device__ __forceinline__ void clear(Histogram& histogram) {
  for (unsigned i = threadIdx.x; i < kBins; i += blockDim.x) {
    histogram.counts[i] = 0;
    histogram.low[i] = 0;
    histogram.high[i] = 0;
  }
  __syncthreads();
}

/// Writes the alternatives of rows with logprobs, and log_sum. Before the edits.
cudaError_t launch_top_logprobs(const SampleArgs& args, const LaunchContext& context);
/// Samples every row's token, given best and not_finite, which it leaves zero.
cudaError_t launch_draw(const SampleArgs& args, const LaunchContext& context);

}  // namespace nibble::cuda
