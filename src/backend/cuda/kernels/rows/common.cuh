#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "backend/cuda/row_kernels.h"

namespace nibble::cuda {

/// Blocks that own one row. A thread takes pieces of eight elements, blockDim.x pieces apart; with
/// kPieces > 0 it keeps them in registers, with kPieces == 0 (wide rows) it loads them once more.

inline constexpr int kPiece = 8;
inline constexpr int kMaxRowThreads = 1024;
inline constexpr unsigned kAllLanes = 0xffffffffU;

struct alignas(16) F32x8 {
  float v[kPiece];
};

__device__ __forceinline__ F32x8 load_f32x8(const float* p) {
  const float4 low = *reinterpret_cast<const float4*>(p);
  const float4 high = *reinterpret_cast<const float4*>(p + 4);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ F32x8 load_bf16x8(const __nv_bfloat16* p) {
  const uint4 words = *reinterpret_cast<const uint4*>(p);
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
  F32x8 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.v[2 * i] = __uint_as_float(w[i] << 16);
    out.v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000U);
  }
  return out;
}

__device__ __forceinline__ uint32_t bf16x2_bits(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_bf16x8(__nv_bfloat16* p, const F32x8& x) {
  *reinterpret_cast<uint4*>(p) =
      make_uint4(bf16x2_bits(x.v[0], x.v[1]), bf16x2_bits(x.v[2], x.v[3]),
                 bf16x2_bits(x.v[4], x.v[5]), bf16x2_bits(x.v[6], x.v[7]));
}

/// Four codes of x * factor in a word. Values that are not finite give any code.
__device__ __forceinline__ uint32_t int8x4_bits(const float* x, float factor) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // 1.5 * 2^23: the sum's last place is 1, so its low byte is the code, rounded half to even.
    // Much faster than the conversion, of which an SM does 16 per clock.
    codes[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], factor), 12582912.0F));
  }
  return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040),
                     __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

__device__ __forceinline__ uint32_t e4m3x4_bits(const float* x, float factor) {
  const float2 low = make_float2(x[0] * factor, x[1] * factor);
  const float2 high = make_float2(x[2] * factor, x[3] * factor);
  const uint32_t lower = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
  const uint32_t upper = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
  return lower | (upper << 16);
}

/// body(p, i) for each piece of the thread: its number and its first element.
template <int kPieces, typename Body>
__device__ __forceinline__ void for_each_piece(int64_t n, const Body& body) {
  if constexpr (kPieces > 0) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int64_t i = (int64_t{p} * blockDim.x + threadIdx.x) * kPiece;
      if (i < n) {
        body(p, i);
      }
    }
  } else {
    for (int64_t i = int64_t{threadIdx.x} * kPiece; i < n; i += int64_t{blockDim.x} * kPiece) {
      body(0, i);
    }
  }
}

/// The largest of one word per thread of a block of a multiple of 32 threads. `shared` has 32 words
/// and may be used again after the next barrier.
__device__ __forceinline__ uint32_t max_of_block(uint32_t value, uint32_t* shared) {
  value = __reduce_max_sync(kAllLanes, value);
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0;
  return __reduce_max_sync(kAllLanes, value);
}

/// The sum of one value per thread of a block of a multiple of 32 threads, in a fixed order.
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
  const auto sum_of_warp = [](float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      v += __shfl_xor_sync(kAllLanes, v, offset);
    }
    return v;
  };
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0.0F);
}

/// Bits of a magnitude: integers order them as floats do, and put NaNs on top.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffU;
}

/// How a row is rounded, from its largest magnitude.
struct RowFactor {
  float scale;
  float factor;  // what values are multiplied with
};

__device__ __forceinline__ RowFactor row_factor(float absmax, ActFormat format) {
  const float top = format == ActFormat::kInt8Token ? 127.0F : 448.0F;
  const float infinity = __uint_as_float(0x7f800000U);
  const float factor = top / absmax;
  return {(absmax < infinity ? absmax : __uint_as_float(0x7fc00000U)) / top,
          factor < infinity ? factor : 0.0F};
}

__device__ __forceinline__ void store_codes(uint8_t* out,
                                            const F32x8& x,
                                            float factor,
                                            ActFormat format) {
  *reinterpret_cast<uint2*>(out) =
      format == ActFormat::kInt8Token
          ? make_uint2(int8x4_bits(x.v, factor), int8x4_bits(x.v + 4, factor))
          : make_uint2(e4m3x4_bits(x.v, factor), e4m3x4_bits(x.v + 4, factor));
}

/// Scales of a row: apart, since a kernel for both would take more registers than one for tokens.
enum class RowScales : uint8_t { kOne, kGroups, kBlocks };

[[nodiscard]] __host__ __device__ constexpr RowScales scales_of(ActFormat format) {
  return format == ActFormat::kFp8Group ? RowScales::kGroups
         : in_blocks(format)            ? RowScales::kBlocks
                                        : RowScales::kOne;
}

/// Rounds and stores a row of kFp8Group: sixteen neighbouring threads have the pieces of a group.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_groups(const QuantizedRows& out,
                                             int64_t row,
                                             int64_t n,
                                             const Load& load) {
  constexpr int kGroupThreads = kFp8GroupSize / kPiece;
  uint8_t* values = static_cast<uint8_t*>(out.values) + row * n;
  float* scales = out.scales + row * row_scales(ActFormat::kFp8Group, n);
  const auto store_piece = [&](int p, int64_t i) {  // by all threads of a warp, past n too
    F32x8 x = {};
    uint32_t largest = 0;
    if (i < n) {
      x = load(p, i);
#pragma unroll
      for (const float value : x.v) {
        largest = max(largest, magnitude_bits(value));
      }
    }
#pragma unroll
    for (int distance = kGroupThreads / 2; distance > 0; distance /= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    if (i < n) {
      const RowFactor to = row_factor(__uint_as_float(largest), ActFormat::kFp8Group);
      if (i % kFp8GroupSize == 0) {
        scales[i / kFp8GroupSize] = to.scale;
      }
      store_codes(values + i, x, to.factor, ActFormat::kFp8Group);
    }
  };
  const int64_t stride = int64_t{blockDim.x} * kPiece;  // whole groups
  const int64_t first = int64_t{threadIdx.x} * kPiece;
  if constexpr (kPieces > 0) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      store_piece(p, p * stride + first);
    }
  } else {
    for (int64_t begin = 0; begin < n; begin += stride) {
      store_piece(0, begin + first);
    }
  }
}

/// How the numbers of one scale become codes (quant/block_rounding.h).
struct BlockFactor {
  float scale, factor, top;
};
/// largest: bits of a magnitude.
__device__ __forceinline__ BlockFactor block_factor(uint32_t largest, int bits, float clip) {
  const uint32_t infinity = 0x7f800000U;
  const float finite = __uint_as_float(largest < infinity ? largest : 0x7fc00000U);
  const float top = bits == 4 ? 7.0F : 127.0F;
  const float span = bits == 4 ? __fmul_rn(clip, finite) : finite;
  const float factor = __fdiv_rn(top, span);
  return {__fdiv_rn(span, top), factor < __uint_as_float(infinity) ? factor : 0.0F, top};
}

__device__ __forceinline__ uint2 block_code_bits(F32x8 x, const BlockFactor& to) {
#pragma unroll
  for (float& value : x.v) {
    value = fminf(fmaxf(__fmul_rn(value, to.factor), -to.top), to.top);
  }
  return make_uint2(int8x4_bits(x.v, 1.0F), int8x4_bits(x.v + 4, 1.0F));
}
__device__ __forceinline__ void store_block_codes(uint8_t* out,
                                                  const F32x8& x,
                                                  const BlockFactor& to) {
  *reinterpret_cast<uint2*>(out) = block_code_bits(x, to);
}

/// How rows with one scale for blocks of 4 and of 8 bits become codes (class_codes() in
/// quant/block_rounding.h).
struct ClassFactor {
  BlockFactor four, eight;  // have the same scale
  int shift;                // of codes of 4 bits

  /// x: eight numbers of one block.
  __device__ __forceinline__ void store_codes(uint8_t* out, const F32x8& x, bool of_eight) const {
    const uint2 codes = block_code_bits(x, of_eight ? eight : four);
    const int by = of_eight ? 0 : shift;
    const uint32_t kept = 0x01010101U * (0xffU << by & 0xffU);  // of each byte: not its neighbour's
    *reinterpret_cast<uint2*>(out) = make_uint2(codes.x << by & kept, codes.y << by & kept);
  }
};
/// Bits of the largest magnitudes; 0 without such blocks.
__device__ __forceinline__ ClassFactor class_factor(uint32_t four_bits,
                                                    uint32_t eight_bits,
                                                    float clip) {
  constexpr int kMostShift = 4;
  const uint32_t infinity = 0x7f800000U;
  BlockFactor four = block_factor(four_bits, 4, clip), eight = block_factor(eight_bits, 8, clip);
  if (four_bits >= infinity || eight_bits >= infinity) {
    four.scale = eight.scale = __uint_as_float(0x7fc00000U);
    return {four, eight, 0};
  }
  if (eight.scale > four.scale) {
    four.scale = eight.scale;
    four.factor = eight.factor;
    return {four, eight, 0};
  }
  int shift = eight_bits > 0 ? kMostShift : 0;
  const auto part = [](int by) { return __uint_as_float(static_cast<uint32_t>(127 - by) << 23); };
  while (shift > 0 && __fmul_rn(four.scale, part(shift)) < eight.scale) {
    --shift;
  }
  const float factor = __fmul_rn(four.factor, part(-shift));
  eight.factor = factor < __uint_as_float(infinity) ? factor : 0.0F;
  four.scale = eight.scale = __fmul_rn(four.scale, part(shift));
  return {four, eight, shift};
}

/// The block in which channel i lies; blocks have powers of two of channels.
__device__ __forceinline__ int64_t block_of(const IntBlocks& blocks, int64_t i) {
  return i >> (31 - __clz(blocks.block));
}
__device__ __forceinline__ bool is_eight(const IntBlocks& blocks, int64_t i) {
  return blocks.here ? (blocks.eight[i >> 10] >> (i >> 5 & 31) & 1U) != 0
                     : __ldg(blocks.bits + block_of(blocks, i)) == 8;
}

/// Which pieces of a thread lie in blocks of 8 bits; of wide rows it is asked for each of them.
template <int kPieces>
class PieceBits {
 public:
  __device__ __forceinline__ PieceBits(const IntBlocks& blocks, int64_t n) {
    if constexpr (kPieces > 0) {
      for_each_piece<kPieces>(
          n, [&](int p, int64_t i) { eight_ |= (is_eight(blocks, i) ? 1U : 0U) << p; });
    }
  }
  [[nodiscard]] __device__ __forceinline__ bool eight(const IntBlocks& blocks,
                                                      int p,
                                                      int64_t i) const {
    return kPieces > 0 ? (eight_ >> p & 1U) != 0 : is_eight(blocks, i);
  }

 private:
  uint32_t eight_ = 0;
};

/// The largest magnitude of eight numbers, as bits.
__device__ __forceinline__ uint32_t largest_bits(const F32x8& x) {
  uint32_t largest = 0;
#pragma unroll
  for (const float value : x.v) {
    largest = max(largest, magnitude_bits(value));
  }
  return largest;
}

/// The largest of a block's pieces, which neighbouring threads have.
__device__ __forceinline__ uint32_t max_of_channels(uint32_t largest, const IntBlocks& blocks) {
  for (int distance = blocks.block / kPiece / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  return largest;
}

/// Zeros as the scales of a row's blocks beyond its end, by all threads of a block.
__device__ __forceinline__ void clear_scales_behind(const IntBlocks& blocks,
                                                    int64_t n,
                                                    int64_t stride,
                                                    float* scales) {
  const int64_t end = int_scale_rows(blocks, n);
  for (int64_t block = block_of(blocks, n) + threadIdx.x; block < end; block += blockDim.x) {
    scales[block * stride] = 0.0F;
  }
}

/// A row of kIntBlocks with a scale for each block, all of whose pieces neighbouring threads have.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_each_block(const QuantizedRows& out,
                                                 const PieceBits<kPieces>& bits,
                                                 int64_t row,
                                                 int64_t n,
                                                 const Load& load) {
  const IntBlocks& blocks = out.blocks;
  uint8_t* values = static_cast<uint8_t*>(out.values) + row * n;
  float* scales = out.scales + row;
  const int64_t scale_stride = int_scale_stride(gridDim.x);
  const auto store_piece = [&](int p, int64_t i) {  // by all threads of a warp, past n too
    F32x8 x = {};
    if (i < n) {
      x = load(p, i);
    }
    const uint32_t largest = max_of_channels(largest_bits(x), blocks);
    if (i < n) {
      const BlockFactor to = block_factor(largest, bits.eight(blocks, p, i) ? 8 : 4, blocks.clip);
      if ((i & (blocks.block - 1)) == 0) {
        scales[block_of(blocks, i) * scale_stride] = to.scale;
      }
      store_block_codes(values + i, x, to);
    }
  };
  const int64_t stride = int64_t{blockDim.x} * kPiece;
  const int64_t first = int64_t{threadIdx.x} * kPiece;
  if constexpr (kPieces > 0) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      store_piece(p, p * stride + first);
    }
  } else {
    for (int64_t begin = 0; begin < n; begin += stride) {
      store_piece(0, begin + first);
    }
  }
  clear_scales_behind(blocks, n, scale_stride, scales);
}

/// A row in blocks of two precisions: what its thread keeps of it, where there is room, and the
/// bits of the largest magnitudes of its blocks of 8 bits and of the others.
template <int kPieces>
struct TwoClasses {
  F32x8 kept[kPieces > 0 ? kPieces : 1];
  uint32_t eight, others;

  template <typename Load>
  __device__ __forceinline__
  TwoClasses(const IntBlocks& blocks, const PieceBits<kPieces>& bits, int64_t n, const Load& load) {
    uint32_t largest[2] = {};
    for_each_piece<kPieces>(n, [&](int p, int64_t i) {
      kept[p] = load(p, i);
      const uint32_t own = largest_bits(kept[p]);
      const bool of_eight = bits.eight(blocks, p, i);
      largest[0] = max(largest[0], of_eight ? own : 0);
      largest[1] = max(largest[1], of_eight ? 0 : own);
    });
    __shared__ uint32_t shared[2][32];
    eight = max_of_block(largest[0], shared[0]);
    others = max_of_block(largest[1], shared[1]);
  }
};

/// The same with a scale for all blocks.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_block_classes(const QuantizedRows& out,
                                                    const PieceBits<kPieces>& bits,
                                                    int64_t row,
                                                    int64_t n,
                                                    const Load& load) {
  const IntBlocks& blocks = out.blocks;
  const TwoClasses<kPieces> classes(blocks, bits, n, load);
  const ClassFactor to = class_factor(classes.others, classes.eight, blocks.clip);
  if (threadIdx.x == 0) {
    out.scales[row] = to.eight.scale;
  }
  uint8_t* values = static_cast<uint8_t*>(out.values) + row * n;
  for_each_piece<kPieces>(n, [&](int p, int64_t i) {
    to.store_codes(values + i, kPieces > 0 ? classes.kept[p] : load(p, i),
                   bits.eight(blocks, p, i));
  });
}

/// A row of kBf16Blocks on its way to memory, by the bits of its largest magnitudes in INT8 and in
/// BF16.
class WideRow {
 public:
  __device__ __forceinline__ WideRow(const QuantizedRows& out, int64_t row, uint2 largest)
      : blocks_(out.blocks),
        values_(static_cast<uint8_t*>(out.values) + row * out.blocks.wide.row_bytes()),
        to_(block_factor(largest.x, 8, 1.0F)),
        spoiled_(largest.y >= kSpoils) {}
  [[nodiscard]] __device__ __forceinline__ float scale() const {
    return spoiled_ ? __uint_as_float(0x7fc00000U) : to_.scale;
  }
  /// Eight channels from i on.
  __device__ __forceinline__ void store(int64_t i, const F32x8& x) const {
    const int64_t block = block_of(blocks_, i);
    const int within = static_cast<int>(i & (blocks_.block - 1));
    uint8_t* first = values_ + blocks_.wide.places[block];
    if (blocks_.bits[block] == 8) {
      store_block_codes(first + within, x, to_);
    } else {
      store_bf16x8(reinterpret_cast<__nv_bfloat16*>(first) + within, x);
    }
  }
  /// What fills up both parts of a row of n channels: the share of one of `threads` threads.
  __device__ __forceinline__ void fill_up(int64_t n, unsigned thread, unsigned threads) const {
    const auto clear = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin + 16 * thread; i < end; i += 16 * threads) {
        *reinterpret_cast<uint4*>(values_ + i) = uint4{};
      }
    };
    const WideRows& wide = blocks_.wide;
    const int64_t int8_end = int64_t{128} * wide.int8_blocks;
    clear(wide.int8_channels, int8_end);
    clear(int8_end + 2 * (n - wide.int8_channels), wide.row_bytes());
  }

 private:
  /// From here on numbers are rounded to 2^104 at least, where fixed_unit() is NaN
  /// (quant/block_rounding.h).
  static constexpr uint32_t kSpoils = 0x737f8000U;

  const IntBlocks& blocks_;
  uint8_t* values_;
  BlockFactor to_;
  bool spoiled_;
};

/// A row of kBf16Blocks.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_wide_blocks(const QuantizedRows& out,
                                                  const PieceBits<kPieces>& bits,
                                                  int64_t row,
                                                  int64_t n,
                                                  const Load& load) {
  const TwoClasses<kPieces> classes(out.blocks, bits, n, load);
  const WideRow wide(out, row, {classes.eight, classes.others});
  if (threadIdx.x == 0) {
    out.scales[row] = wide.scale();
  }
  for_each_piece<kPieces>(
      n, [&](int p, int64_t i) { wide.store(i, kPieces > 0 ? classes.kept[p] : load(p, i)); });
  wide.fill_up(n, threadIdx.x, blockDim.x);
}

/// Rounds and stores a row in blocks; one whose channels have an order of their own lies in
/// shared memory (row_shared_bytes) meanwhile.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_blocks(const QuantizedRows& out,
                                             const PieceBits<kPieces>& bits,
                                             int64_t row,
                                             int64_t n,
                                             const Load& load) {
  const auto store = [&](const auto& from) {
    if (out.blocks.scales == BlockScales::kEach) {
      store_each_block<kPieces>(out, bits, row, n, from);
    } else if (out.blocks.scales == BlockScales::kWide) {
      store_wide_blocks<kPieces>(out, bits, row, n, from);
    } else {
      store_block_classes<kPieces>(out, bits, row, n, from);
    }
  };
  if (out.blocks.columns == nullptr) {
    return store(load);
  }
  extern __shared__ float4 memory[];
  auto* x = reinterpret_cast<float*>(memory);
  for_each_piece<kPieces>(n,
                          [&](int p, int64_t i) { *reinterpret_cast<F32x8*>(x + i) = load(p, i); });
  __syncthreads();
  store([&](int, int64_t i) {
    F32x8 y;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] = x[__ldg(out.blocks.columns + i + j)];
    }
    return y;
  });
}

/// Rounds and stores a row of a token form. load(p, i) gives the eight values from element i on.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_row(const QuantizedRows& out,
                                          int64_t row,
                                          int64_t n,
                                          const Load& load) {
  F32x8 kept[kPieces > 0 ? kPieces : 1];
  uint32_t largest = 0;
  for_each_piece<kPieces>(n, [&](int p, int64_t i) {
    kept[p] = load(p, i);
#pragma unroll
    for (const float x : kept[p].v) {
      largest = max(largest, magnitude_bits(x));
    }
  });
  __shared__ uint32_t shared[32];
  const RowFactor to = row_factor(__uint_as_float(max_of_block(largest, shared)), out.format);
  if (threadIdx.x == 0) {
    out.scales[row] = to.scale;
  }
  uint8_t* values = static_cast<uint8_t*>(out.values) + row * n;
  for_each_piece<kPieces>(n, [&](int p, int64_t i) {
    store_codes(values + i, kPieces > 0 ? kept[p] : load(p, i), to.factor, out.format);
  });
}

/// What store_scaled() is told of its thread's pieces: made before the kernel waits for its
/// predecessor, so that nothing is read late that was known early.
struct NoBits {
  __device__ __forceinline__ NoBits(const IntBlocks&, int64_t) {}
};
template <int kPieces, RowScales kScales>
using BitsOf = std::conditional_t<kScales == RowScales::kBlocks, PieceBits<kPieces>, NoBits>;

/// Rounds and stores a row of a form that has scales.
template <int kPieces, RowScales kScales, typename Load>
__device__ __forceinline__ void store_scaled(const QuantizedRows& out,
                                             const BitsOf<kPieces, kScales>& bits,
                                             int64_t row,
                                             int64_t n,
                                             const Load& load) {
  if constexpr (kScales == RowScales::kBlocks) {
    store_blocks<kPieces>(out, bits, row, n, load);
  } else if constexpr (kScales == RowScales::kGroups) {
    store_groups<kPieces>(out, row, n, load);
  } else {
    store_row<kPieces>(out, row, n, load);
  }
}

/// What a launch over rows looks like. Depends on n alone, so that sums have one order.
struct RowShape {
  int pieces = 0;  // kPieces: 1, 2, 4 or 0
  unsigned threads = 0;
};

inline RowShape row_shape(int64_t n) {
  const int64_t pieces = n / kPiece;
  const int64_t each = pieces <= 512 ? 1 : pieces <= 1024 ? 2 : 4;
  if (pieces > 4 * kMaxRowThreads) {
    return {0, kMaxRowThreads};
  }
  return {static_cast<int>(each),
          static_cast<unsigned>(((pieces + each - 1) / each + 31) / 32 * 32)};
}

/// Whether `out` can take rows of n elements.
inline bool can_store(const QuantizedRows& out, int64_t rows, int64_t n) {
  const bool whole =
      !in_blocks(out.format) ||
      (is_block_size(out.blocks.block) && n % out.blocks.block == 0 &&
       (out.format == ActFormat::kBf16Blocks) == (out.blocks.scales == BlockScales::kWide));
  return rows >= 0 && rows <= INT32_MAX && row_width_ok(n) && whole &&
         (row_scales(out.format, n) > 0 || out.format == ActFormat::kBf16);
}

/// Shared memory that store_scaled() needs for a row of n numbers.
inline size_t row_shared_bytes(const QuantizedRows& out, int64_t n) {
  return in_blocks(out.format) && out.blocks.columns != nullptr
             ? static_cast<size_t>(n) * sizeof(float)
             : 0;
}

/// Launches the instance of a row kernel that fits n, one block per row.
///   kernels: instances for 0, 1, 2 and 4 pieces
template <typename Args>
cudaError_t launch_rows(void (*const (&kernels)[4])(Args),
                        const Args& args,
                        const LaunchContext& context) {
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const RowShape shape = row_shape(args.n);
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)),
                  .threads = shape.threads,
                  .shared_bytes = row_shared_bytes(args.out, args.n)};
  const auto kernel = kernels[shape.pieces == 4 ? 3 : shape.pieces];
  constexpr size_t kUsualShared = 40 << 10;  // what a block may have without being asked, and more
  if (grid.shared_bytes > kUsualShared) {
    const cudaError_t raised = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(grid.shared_bytes));
    if (raised != cudaSuccess) {
      return raised;
    }
  }
  return launch(kernel, grid, context, args);
}

}  // namespace nibble::cuda
