#pragma once

// How the packed weights of one tile product become 16 rows of 64 bytes: kParts parts, each of
// which can be expanded alone.

#include "backend/cpu/amx/choose_tiles.h"
#include "backend/cpu/kernels/gemm_levels.h"

namespace nibble::cpu {
namespace {

/// Weights that lie in memory as tiles.
struct DirectPanel {
  static constexpr int64_t kSourceBytes = kTileBytes;
  static constexpr bool kDirect = true;
};

/// int4 as unsigned bytes for int8 activations.
struct Int4Bytes {
  static constexpr int64_t kSourceBytes = 512;
  static constexpr int64_t kParts = 8;
  static constexpr bool kDirect = false;
  [[gnu::always_inline]] static void expand(const uint8_t* source, uint8_t* out) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i words = _mm512_loadu_si512(source);
    _mm512_store_si512(out, _mm512_and_si512(words, mask));
    _mm512_store_si512(out + 64, _mm512_and_si512(_mm512_srli_epi16(words, 4), mask));
  }
};

/// int4 in groups of two levels as unsigned bytes for int8 activations. A product is of one group.
struct LevelsBytes {
  static constexpr int64_t kSourceBytes = 512;
  static constexpr int64_t kParts = 8;
  static constexpr bool kDirect = false;
  LevelsGroup group;

  LevelsBytes(const PackedWeights& w, const uint8_t* source) : group(LevelsGroup::at(w, source)) {}
  [[gnu::always_inline]] void expand(const uint8_t* source, uint8_t* out) const {
    Simd::store_int(out, group.weights<0>(source));
    Simd::store_int(out + 64, group.weights<1>(source));
  }
};

/// The BF16 numbers that 4-bit codes stand for, by code.
struct Int4Values {  // codes 0 to 15 are -8 to 7
  static constexpr uint16_t kValues[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                           0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                           0x4080, 0x40a0, 0x40c0, 0x40e0};
};
struct Fp4Values {  // E2M1
  static constexpr uint16_t kValues[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                           0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                           0xc000, 0xc040, 0xc080, 0xc0c0};
};

/// 4-bit codes as bf16 pairs. A permutation of 16-bit lanes looks at five bits of each index, and
/// its table repeats after 16, so bits above a nibble need no masking.
template <typename Values>
struct NibblePairs {
  static constexpr int64_t kSourceBytes = 256;
  static constexpr int64_t kParts = 4;
  static constexpr bool kDirect = false;
  [[gnu::always_inline]] static void expand(const uint8_t* source, uint8_t* out) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(Values::kValues));
    const __m512i table = _mm512_broadcast_i64x4(values);
    const auto store = [&](__m512i indices, uint8_t * to) __attribute__((always_inline)) {
      _mm512_store_si512(to, _mm512_permutexvar_epi16(indices, table));
    };
    const __m512i words = _mm512_loadu_si512(source);
    store(words, out);  // columns 0 and 1
    store(_mm512_srli_epi16(words, 4), out + 64);
    store(_mm512_srli_epi16(words, 8), out + 128);
    store(_mm512_srli_epi16(words, 12), out + 192);
  }
};

using Int4Pairs = NibblePairs<Int4Values>;
using Fp4Pairs = NibblePairs<Fp4Values>;

/// Any codec whose values bf16 holds exactly.
template <typename Codec>
struct CodecPairs {
  static constexpr int64_t kSourceBytes = 4 * Codec::kStepBytes;
  static constexpr int64_t kParts = 4;
  static constexpr bool kDirect = false;
  template <int kColumn>
  static void pair(const typename Codec::Step& step, uint8_t* out) {
    const I32x16 low = Simd::bits(Codec::template column<kColumn, 16>(step));
    const I32x16 high = Simd::bits(Codec::template column<kColumn + 1, 16>(step));
    const I32x16 mask = Simd::set_int(static_cast<int>(0xffff0000U));
    Simd::store_int(out, Simd::or_int(Simd::shift_right<16>(low), Simd::and_int(high, mask)));
  }
  [[gnu::always_inline]] static void expand(const uint8_t* source, uint8_t* out) {
    const typename Codec::Step step = Codec::step(source);
    pair<0>(step, out);
    pair<2>(step, out + 64);
    pair<4>(step, out + 128);
    pair<6>(step, out + 192);
  }
};

template <typename Panel>
constexpr int64_t kPartSource = Panel::kSourceBytes / Panel::kParts;
template <typename Panel>
constexpr int64_t kPartBytes = kTileBytes / Panel::kParts;

/// Parts begin to end - 1 of a tile.
template <typename Panel, int kBegin = 0, int kEnd = Panel::kParts>
[[gnu::always_inline]] inline void expand_tile(const uint8_t* source, uint8_t* tile) {
#pragma GCC unroll 8
  for (int64_t part = kBegin; part < kEnd; ++part) {
    Panel::expand(source + part * kPartSource<Panel>, tile + part * kPartBytes<Panel>);
  }
}

/// A tile of a panel that asks the matrix for more than the codes, or of any other.
template <typename Panel>
[[gnu::always_inline]] inline void expand_tile(const PackedWeights& w,
                                               const uint8_t* source,
                                               uint8_t* tile) {
  if constexpr (requires { Panel(w, source); }) {
    const Panel panel(w, source);
#pragma GCC unroll 8
    for (int64_t part = 0; part < Panel::kParts; ++part) {
      panel.expand(source + part * kPartSource<Panel>, tile + part * kPartBytes<Panel>);
    }
  } else {
    expand_tile<Panel>(source, tile);
  }
}

}  // namespace
}  // namespace nibble::cpu
