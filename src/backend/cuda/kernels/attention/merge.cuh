#pragma once

// The last step of decode where blocks share a head: whichever block ends last merges them all, in
// the order of the line.

#include "backend/cuda/kernels/attention/ring.cuh"
#include "backend/cuda/kernels/attention/weights.cuh"
#include "backend/cuda/kernels/quotient.cuh"

namespace nibble::cuda {

/// Which blocks share a head. A block has at most two results that are not whole heads: of its
/// first tiles (slot 2 block), and of its last (slot 2 block + 1).
struct PartialSlots {
  int32_t first_block;  // whose share holds the head's first tile
  int32_t last_block;
  int32_t first_slot;  // of first_block; the others' are their first

  __device__ int32_t slot(int32_t block) const {
    return block == first_block ? first_slot : 2 * block;
  }
};

__device__ __forceinline__ float4 quotient4(float4 v, float total) {
  const float inverse = 1.0F / total;
  return make_float4(quotient(v.x, total, inverse), quotient(v.y, total, inverse),
                     quotient(v.z, total, inverse), quotient(v.w, total, inverse));
}

__device__ __forceinline__ void add4(float4& sum, float4 v, float s) {
  sum.x = fmaf(v.x, s, sum.x), sum.y = fmaf(v.y, s, sum.y);
  sum.z = fmaf(v.z, s, sum.z), sum.w = fmaf(v.w, s, sum.w);
}

__device__ __forceinline__ void store_bf16x4(uint16_t* out, float4 v) {
  *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w));
}

/// Share of each partial result in its head, to `weights` [head][max_parts(kDim)] in shared memory.
/// A warp takes a head at a time; its loads are under way together.
///   first_head  of the group, among all query heads
template <int kDim, int kColumns>
__device__ __forceinline__ void partial_weights(const DecodeArgs& args,
                                                const PartialSlots& slots,
                                                int64_t first_head,
                                                int heads,
                                                float* weights) {
  constexpr int kParts = max_parts(kDim);
  constexpr int kEach = (kParts + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t count = slots.last_block - slots.first_block + 1;
  for (int head = static_cast<int>(threadIdx.x) / 32; head < heads; head += kDecodeWarps) {
    float2 part[kEach];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t index = lane + 32 * i;
      part[i] = make_float2(-INFINITY, 0.0F);
      if (index < count) {
        const int32_t slot = slots.slot(slots.first_block + index);
        part[i] = __ldcg(args.partial_tops + slot * kColumns + head);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      top = fmaxf(top, part[i].x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0U, top, step));
    }
    float total = 0.0F;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      part[i].x = ptx::exp2_approx((part[i].x - top) * args.top_factor);
      total = fmaf(part[i].x, part[i].y, total);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      total += __shfl_xor_sync(~0U, total, step);
    }
    total += sink_weight(args, first_head + head, top * args.top_factor);
    const float inverse = 1.0F / total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i < count) {
        weights[head * kParts + lane + 32 * i] = part[i].x * inverse;
      }
    }
  }
}

/// Merges the blocks' partial results of a head group. `weights` is shared memory of at least
/// heads * max_parts(kDim) floats.
template <int kDim, int kColumns>
__device__ __noinline__ void merge_blocks(const DecodeArgs& args,
                                          const PartialSlots& slots,
                                          int64_t first_head,
                                          int heads,
                                          float* weights,
                                          uint16_t* out) {
  constexpr int kBatch = 17;  // loads under way per thread
  partial_weights<kDim, kColumns>(args, slots, first_head, heads, weights);
  __syncthreads();
  const int32_t count = slots.last_block - slots.first_block + 1;
  for (int e = static_cast<int>(threadIdx.x); e < heads * kDim / 4; e += kDecodeThreads) {
    const int head = e / (kDim / 4);
    const int d = e % (kDim / 4) * 4;
    float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    for (int32_t start = 0; start < count; start += kBatch) {
      float4 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t index = min(start + i, count - 1);
        const int64_t row = int64_t{slots.slot(slots.first_block + index)} * kColumns + head;
        part[i] = __ldcg(reinterpret_cast<const float4*>(args.partial_sums + row * kDim + d));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool valid = start + i < count;
        add4(sum, part[i], valid ? weights[head * max_parts(kDim) + start + i] : 0.0F);
      }
    }
    store_bf16x4(out + head * kDim + d, sum);
  }
  __syncthreads();  // the weights have been read
}

}  // namespace nibble::cuda
