#pragma once

// Queries of latent attention over rows in codes, as the kernels of sm_90a multiply them: made once
// for each row of the line (latent_sm90.cu), as images of the shared memory of an item's block; by
// the block itself in prefill, where an item has many tiles.

#include "backend/cuda/kernels/latent/codes.cuh"

namespace nibble::cuda {

constexpr float kLeastLatentScale = 1e-30F;  // what is smaller counts as zero

__device__ __forceinline__ void store4(uint32_t shared, uint32_t value) {
  ptx::store_shared4(shared, value);
}
__device__ __forceinline__ void store8(uint32_t shared, uint2 value) {
  ptx::store_shared8(shared, value);
}
__device__ __forceinline__ void store4(uint8_t* at, uint32_t value) {
  *reinterpret_cast<uint32_t*>(at) = value;
}
__device__ __forceinline__ void store8(uint8_t* at, uint2 value) {
  *reinterpret_cast<uint2*>(at) = value;
}

/// What a lane has of a query: numbers 8 lane..+7 and 256 + 8 lane..+7, and two rotated ones. All
/// are zeros of a query that is not there.
struct RawQuery {
  uint4 parts[2];
  uint32_t turned;

  __device__ __forceinline__ void load(const LatentArgs& args,
                                       const LatentSegment& segment,
                                       int query,
                                       int lane) {
    const bool there = query < segment.queries(args);
    const auto* const from = reinterpret_cast<const uint4*>(segment.query(args, there ? query : 0));
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    parts[0] = there ? from[lane] : zeros;
    parts[1] = there ? from[32 + lane] : zeros;
    turned = there ? reinterpret_cast<const uint32_t*>(from)[kLatentValues / 2 + lane] : 0;
  }
  __device__ __forceinline__ void unpack(float (&x)[16]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t words[4] = {parts[half].x, parts[half].y, parts[half].z, parts[half].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[half * 8 + 2 * i] = __uint_as_float(words[i] << 16);
        x[half * 8 + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
      }
    }
  }
};

/// The largest magnitude among a warp's numbers.
__device__ __forceinline__ float largest_of_warp(float top) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0U, top, step));
  }
  return top;
}

/// Queries for rows in 8 bits: rows of high codes, rows of low ones, rotated parts in bf16.
template <typename Codes, int kQueries>
struct CodedQueries {
  static constexpr int kCount = kQueries;
  static constexpr bool kImages = true;
  static constexpr uint32_t kLow = kQueries * kLatentValues;
  static constexpr uint32_t kRope = 2 * kLow;
  static constexpr uint32_t kBytes = kRope + kQueries * 2 * (kLatentDim - kLatentValues);

  /// A warp's query, `to` being where the item's lie; its scale is what products of its codes are
  /// to be multiplied with.
  template <typename To>
  static __device__ __forceinline__ void store(
      const RawQuery& raw, int query, To to, float* scales, int lane) {
    float x[16];
    raw.unpack(x);
    float top = 0.0F;
    float bad = 0.0F;  // not 0 if a number is not finite
#pragma unroll
    for (const float number : x) {
      top = fmaxf(top, fabsf(number));
      bad = fmaf(number, 0.0F, bad);
    }
    top = largest_of_warp(top);
    const bool finite = __all_sync(~0U, bad == 0.0F);
    const float inverse = top < kLeastLatentScale ? 0.0F : __fdividef(Codes::kTop, top);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 codes[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          four[j] = x[half * 8 + i * 4 + j] * inverse;
        }
        codes[i] = Codes::split(four);
      }
      const auto place = static_cast<uint32_t>(
          latent_place(kLatentValues, query, half * (kLatentValues / 2) + lane * 8));
      store8(to + place, make_uint2(codes[0].x, codes[1].x));
      store8(to + kLow + place, make_uint2(codes[0].y, codes[1].y));
    }
    store4(to + kRope + static_cast<uint32_t>(latent_place(128, query, lane * 4)), raw.turned);
    if (lane == 0) {
      scales[query] = finite ? top * (1.0F / Codes::kTop) : NAN;
    }
  }
};

/// Queries for rows in 4 bits: fp16, numbers in the order in which widen_int4() gives those of
/// rows, and rotated parts in bf16; each query times a power of two that makes its largest number
/// 1 to 2.
template <int kQueries>
struct ScaledQueries {
  static constexpr int kCount = kQueries;
  static constexpr bool kImages = true;
  static constexpr uint32_t kRope = kQueries * 2 * kLatentValues;
  static constexpr uint32_t kBytes = kRope + kQueries * 2 * (kLatentDim - kLatentValues);

  template <typename To>
  static __device__ __forceinline__ void store(
      const RawQuery& raw, int query, To to, float* scales, int lane) {
    float x[16];
    raw.unpack(x);
    const float turned[2] = {__uint_as_float(raw.turned << 16),
                             __uint_as_float(raw.turned & 0xffff0000U)};
    float top = fmaxf(fabsf(turned[0]), fabsf(turned[1]));
#pragma unroll
    for (const float number : x) {
      top = fmaxf(top, fabsf(number));
    }
    const uint32_t exponent = __float_as_uint(largest_of_warp(top)) >> 23;
    const bool usual = exponent > 0 && exponent < 254;
    const float inverse = usual ? __uint_as_float((254U - exponent) << 23) : 1.0F;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = half * 8 + lane / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = chunk * kInt4Chunk + i * 8 + lane % 4 * 2;
        store4(to + static_cast<uint32_t>(latent_place(2 * kLatentValues, query, 2 * place)),
               ptx::pack_f16(x[half * 8 + i] * inverse, x[half * 8 + i + 4] * inverse));
      }
    }
    store4(to + kRope + static_cast<uint32_t>(latent_place(128, query, lane * 4)),
           ptx::pack_bf16(turned[0] * inverse, turned[1] * inverse));
    if (lane == 0) {
      scales[query] = 1.0F / inverse;
    }
  }
};

/// Queries for rows in bf16, which are as they came.
template <int kQueries>
struct PlainQueries {
  static constexpr int kCount = kQueries;
  static constexpr bool kImages = false;
  static constexpr uint32_t kBytes = kQueries / 8 * kLatentGroup;
};

/// What a block has of its item's queries.
struct QueryPlace {
  uint32_t codes;
  float* scales;
  uint32_t barrier;  // of one arrival, for images
};

/// Bytes of an item's image: its queries as they lie in shared memory, then their scales.
template <typename Queries>
constexpr uint32_t kQueryImage = Queries::kBytes + 4 * Queries::kCount;

/// The queries of a segment of the line, its block's number `taken`, from their image. By 128
/// threads, none of which reads the queries before any more; they need no further barrier.
template <typename Queries>
requires Queries::kImages __device__ __forceinline__ void take_queries(const LatentArgs& args,
                                                                       const LatentSegment& segment,
                                                                       const QueryPlace& to,
                                                                       uint32_t taken,
                                                                       int thread,
                                                                       const LatentLine& /*work*/) {
  constexpr uint32_t kBytes = kQueryImage<Queries>;
  if (thread == 0) {
    const int64_t item =
        int64_t{segment.sequence} * args.line_items + segment.first_query / Queries::kCount;
    const uint8_t* const image = args.images + item * kBytes;
    ptx::barrier_arrive_expect(to.barrier, kBytes);
    ptx::bulk_copy(to.codes, image, Queries::kBytes, to.barrier);
    ptx::bulk_copy(ptx::shared_address(to.scales), image + Queries::kBytes, 4 * Queries::kCount,
                   to.barrier);
  }
  ptx::barrier_wait(to.barrier, taken % 2);
}

/// The queries of a block of prefill, which it makes itself; the threads have to wait for one
/// another after it. While copies of tiles fill the memory system a load takes microseconds: up to
/// 8 queries of a warp are on their way together.
template <typename Queries>
requires Queries::kImages __device__ __forceinline__ void take_queries(
    const LatentArgs& args,
    const LatentSegment& segment,
    const QueryPlace& to,
    uint32_t /*taken*/,
    int thread,
    const LatentBlock& /*work*/) {
  constexpr int kQueries = Queries::kCount;
  constexpr int kOfWarp = kQueries / 4;
  constexpr int kAhead = kOfWarp < 8 ? kOfWarp : 8;
  const int lane = thread % 32;
#pragma unroll 1
  for (int first = thread / 32; first < kQueries; first += 4 * kAhead) {
    RawQuery raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      raw[i].load(args, segment, first + 4 * i, lane);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      Queries::store(raw[i], first + 4 * i, to.codes, to.scales, lane);
    }
  }
  ptx::fence_shared_to_async();
}

/// The same of queries as they came.
template <typename Queries, typename Work>
__device__ __forceinline__ void take_queries(const LatentArgs& args,
                                             const LatentSegment& segment,
                                             const QueryPlace& to,
                                             uint32_t /*taken*/,
                                             int thread,
                                             const Work& /*work*/) {
  fetch_queries<Queries::kCount>(args, segment, to.codes, thread);
  ptx::copy_wait<0>();
  ptx::fence_shared_to_async();
}

}  // namespace nibble::cuda
