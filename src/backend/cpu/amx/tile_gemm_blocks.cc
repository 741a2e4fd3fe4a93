#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/amx/amx_few.h"
#include "backend/cpu/amx/tile_gemm.h"

// Rows in blocks of 4 and 8 bits times int4 in groups of as many columns (quant/block_precision.h).
// Codes of both are bytes; a tile product adds 64 columns, which blocks of 32 would fill by half:
// these are bf16 numbers, as exact, of which a product adds 32.

namespace nibble::cpu {
namespace {

/// total += sum * (scale of the row * scale of the weights), as all kernels of these do.
struct IntBlocks {
  static constexpr bool kRowScales = true;
  static constexpr int64_t kColumns = 64;
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static void product() {
    dot_s8s8<kC, kA, kB>();
  }
  [[gnu::always_inline]] static F32x16 add(const uint8_t* sums,
                                           F32x16 scale,
                                           const float* row_scale,
                                           F32x16 total) {
    return Simd::fma(Simd::to_float(Simd::load_int(sums)), Simd::mul(scale, Simd::set(*row_scale)),
                     total);
  }
};

struct FloatBlocks {
  static constexpr bool kRowScales = true;
  static constexpr int64_t kColumns = 32;
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static void product() {
    dot_bf16<kC, kA, kB>();
  }
  [[gnu::always_inline]] static F32x16 add(const uint8_t* sums,
                                           F32x16 scale,
                                           const float* row_scale,
                                           F32x16 total) {
    return Simd::fma(Simd::load(reinterpret_cast<const float*>(sums)),
                     Simd::mul(scale, Simd::set(*row_scale)), total);
  }
};

/// int4 as signed bytes. A permutation of bytes looks at six bits of each index, and its table
/// repeats after 16, so bits above a nibble need no masking.
struct Int4SignedBytes {
  static constexpr int64_t kSourceBytes = 512;
  static constexpr int64_t kParts = 8;
  static constexpr bool kDirect = false;
  alignas(16) static constexpr int8_t kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                     0,  1,  2,  3,  4,  5,  6,  7};
  [[gnu::always_inline]] static void expand(const uint8_t* source, uint8_t* out) {
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kValues)));
    const __m512i words = _mm512_loadu_si512(source);
    _mm512_store_si512(out, _mm512_permutexvar_epi8(words, table));
    _mm512_store_si512(out + 64, _mm512_permutexvar_epi8(_mm512_srli_epi16(words, 4), table));
  }
};

template <typename Panel, typename Kind, int kProducts>
void multiply_blocks(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.m <= 16) {
    tile_gemm_few<Panel, Kind, kProducts>(task, tile_begin, tile_end);
  } else {
    tile_gemm_grouped<Panel, Kind, kProducts>(task, tile_begin, tile_end);
  }
}

}  // namespace

namespace NIBBLE_ISA {

void tile_gemm_blocks(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  switch (task.w.group_size) {
    case 32:
      return multiply_blocks<Int4Pairs, FloatBlocks, 1>(task, tile_begin, tile_end);
    case 64:
      return multiply_blocks<Int4SignedBytes, IntBlocks, 1>(task, tile_begin, tile_end);
    default:
      return multiply_blocks<Int4SignedBytes, IntBlocks, 2>(task, tile_begin, tile_end);
  }
}

}  // namespace NIBBLE_ISA
}  // namespace nibble::cpu
