#pragma once

// Weights of the keys of a block for one row of a row tile, in registers.

#include "backend/cpu/amx/amx_attention_steps.h"

namespace nibble::cpu {
namespace {

/// Bits first .. last-1 of those that exist.
inline uint64_t bits_between(int64_t first, int64_t last) {
  static_assert(kKeyBlock == 64);
  first = larger(first, 0);
  last = smaller(last, kKeyBlock);
  return first < last ? ~uint64_t{0} >> (64 - (last - first)) << first : 0;
}

/// The rows of a row tile and the keys of a block.
struct TileRows {
  uint8_t* scores;  // some of which become weights
  RowTile& tile;
  const PackedParams& params;
  int64_t count;  // rows
  int64_t at;     // position of the block
  int64_t first;  // of the block's keys that count
  int64_t window;
  bool whole_tops;

  TileRows(const AttentionTask& task,
           const TileTask& t,
           const TileRange& range,
           int64_t row_tile,
           uint8_t* scores_of_step)
      : scores(scores_of_step),
        tile(t.row_tiles[row_tile]),
        params(t.block.params[range.block]),
        count(smaller(16, t.rows - row_tile * 16)),
        at(range.at),
        first(range.first),
        window(task.window),
        whole_tops(task.whole_tops) {}

  [[nodiscard]] F32x16 score_scale(int64_t group) const {
    return Simd::load(params.score_scale + 16 * group);
  }

  template <int kCode>
  [[nodiscard]] bool have_no_top() const {
    return tile.shift[0] == ExponentRange<kCode>::kBase - kLowest;
  }

  /// Bit j: row `row` sees key j.
  [[nodiscard]] uint64_t seen_by(int64_t row) const {
    const int64_t position = tile.positions[row];
    const int64_t oldest = window > 0 ? larger(0, position - window + 1) : 0;
    return bits_between(larger(oldest - at, first), position + 1 - at);
  }
};

inline __mmask16 group_of(uint64_t seen, int64_t g) {
  return static_cast<__mmask16>(seen >> (16 * g));
}

template <int kCode>
[[gnu::always_inline]] inline F32x16 scaled_group(
    const TileRows& rows, int64_t row, int64_t g, F32x16 scale, F32x16 add) {
  const uint8_t* scores = rows.scores + row * 64 + g * kTileBytes;
  if constexpr (kCode == 1) {
    return Simd::fma(Simd::load(reinterpret_cast<const float*>(scores)), scale, add);
  }
  const F32x16 score = Simd::to_float(Simd::load_int(scores));
  return Simd::fma(Simd::mul(score, Simd::set(rows.tile.unit[row])), scale, add);
}

/// The same number, of which the compiler does not know that it could make it again for each row.
inline F32x16 kept(F32x16 x) { return Simd::from_bits({Simd::opaque(Simd::bits(x).v)}); }

inline F32x16 kept(float x) { return kept(Simd::set(x)); }

inline __m512i kept_bits(uint32_t x) {
  return Simd::opaque(_mm512_set1_epi32(static_cast<int>(x)));
}

inline __mmask64 kept_mask(__mmask64 x) {
#ifndef NIBBLE_PORTABLE_AVX512
  __asm__("" : "+Yk"(x));
#endif
  return x;
}

inline WeightConstants kept(WeightConstants constants) {
  for (F32x16& x : constants.factors) {
    x = kept(x);
  }
  constants.one = kept(constants.one);
  constants.mantissa = kept(constants.mantissa);
  return constants;
}

/// sum + the even ones of 32 BF16 numbers + the odd ones.
inline F32x16 add_pairs(F32x16 sum, __m512i pairs) {
  const __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000U)));
  sum = Simd::add(sum, {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))});
  return Simd::add(sum, {_mm512_castsi512_ps(odd)});
}

/// Exponents of the 64 keys of a block; kLeast for those that a row does not see.
template <int kCode>
struct RowExponents {
  using Range = ExponentRange<kCode>;
  F32x16 at[kKeyGroups];

  [[gnu::always_inline]] void clamp() {
    for (F32x16& exponent : at) {
      exponent = Simd::max(Simd::set(Range::kLeast), exponent);  // NaN stays
    }
  }

  [[nodiscard]] bool too_high() const {
    static_assert(kKeyGroups == 4);
    return Simd::any_bits_above(
        Simd::max_bits(Simd::max_bits(at[0], at[1]), Simd::max_bits(at[2], at[3])), Range::kTop);
  }

  /// Whether one is not within kLeast .. kTop, which share the bits of `mask`.
  [[gnu::always_inline]] [[nodiscard]] bool out_of_range(F32x16 least, __m512i mask) const {
    constexpr int kEitherDiffers = 0x7e;  // (a ^ c) | (b ^ c)
    const __m512i start = Simd::bits(least).v;
    const __m512i low =
        _mm512_ternarylogic_epi32(Simd::bits(at[0]).v, Simd::bits(at[1]).v, start, kEitherDiffers);
    const __m512i high =
        _mm512_ternarylogic_epi32(Simd::bits(at[2]).v, Simd::bits(at[3]).v, start, kEitherDiffers);
    return _mm512_test_epi32_mask(_mm512_or_si512(low, high), mask) != 0;
  }
};

/// The bits that the 128 octaves from kLeast on share.
template <int kCode>
constexpr uint32_t shared_bits() {
  using Range = ExponentRange<kCode>;
  const uint32_t least = __builtin_bit_cast(uint32_t, Range::kLeast);
  const uint32_t last = __builtin_bit_cast(uint32_t, Range::kTop);
  const uint32_t differ = (1U << (32 - __builtin_clz(least ^ last))) - 1;
  return ~differ;
}

/// Exponents become weights, BF16 numbers of 32 keys to a register, and add to a row's sums.
template <int kCode, bool kFull>
class WeightMaker;

template <bool kFull>
class WeightMaker<1, kFull> {
 public:
  explicit WeightMaker(const TileRows& rows)
      : upwards_(Simd::opaque(_mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080))),
        whole_tops_(rows.whole_tops) {}

  [[gnu::always_inline]] void make(const RowExponents<1>& exponents,
                                   uint64_t seen,
                                   float* sums,
                                   __m512i (&pairs)[kKeyGroups / 2]) const {
    F32x16 weight[kKeyGroups];
    F32x16 sum = Simd::load(sums);
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      weight[g] = weight_of_shifted(shifted(exponents.at[g]), constants_);
      if constexpr (!kFull) {
        weight[g].v = _mm512_maskz_mov_ps(group_of(seen, g), weight[g].v);
      }
      sum = Simd::add(sum, weight[g]);
    }
#pragma GCC unroll 2
    for (int64_t g = 0; g < kKeyGroups; g += 2) {
      pairs[g / 2] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[g + 1].v, weight[g].v));
    }
    if (whole_tops_) {
      sum = add_pairs(add_pairs(Simd::load(sums), pairs[0]), pairs[1]);
    }
    Simd::store(sums, sum);
  }

 private:
  /// By a shuffle of bytes, which another port does than the products of weights: next to tiles
  /// both get only one.
  [[gnu::always_inline]] I32x16 shifted(F32x16 exponent) const {
    return {_mm512_shuffle_epi8(Simd::bits(exponent).v, upwards_)};
  }

  WeightConstants constants_ = kept(WeightConstants{});
  __m512i upwards_;  // a byte up in each lane
  bool whole_tops_;
};

/// CodeWeightForm::excess of all fractions.
struct alignas(64) ExcessTable {
  uint8_t of[CodeWeightForm::kFractions];
  constexpr ExcessTable() : of() {
    for (int f = 0; f < CodeWeightForm::kFractions; ++f) {
      of[f] = static_cast<uint8_t>(CodeWeightForm::excess(f));
    }
  }
};
constexpr ExcessTable kExcess;

/// code_weight, of 32 keys at a time in 16 bits; what the fraction exceeds comes from a table.
template <int kCode, bool kFull>
class WeightMaker {
 public:
  explicit WeightMaker(const TileRows& rows)
      : upwards_(Simd::opaque(_mm512_set4_epi32(0x0d0c8080, 0x09088080, 0x05048080, 0x01008080))) {
    for (int64_t i = 0; i < kKeyGroups / 2; ++i) {
      logs_[i] = _mm512_loadu_si512(rows.params.logs + 32 * i);
      inverses_[i] = _mm512_loadu_si512(rows.params.inverses + 32 * i);
      excess_[i] = Simd::opaque(_mm512_load_si512(kExcess.of + 64 * i));
    }
  }

  [[gnu::always_inline]] void make(const RowExponents<kCode>& exponents,
                                   uint64_t seen,
                                   float* sums,
                                   __m512i (&pairs)[kKeyGroups / 2]) const {
    F32x16 sum = Simd::load(sums);
#pragma GCC unroll 2
    for (int64_t i = 0; i < kKeyGroups / 2; ++i) {
      const __m512i x =
          _mm512_add_epi16(low_halves(exponents.at[2 * i], exponents.at[2 * i + 1]), logs_[i]);
      const __m512i excess = _mm512_maskz_permutex2var_epi8(low_bytes_, excess_[0], x, excess_[1]);
      pairs[i] = _mm512_sub_epi16(x, excess);
      if constexpr (!kFull) {
        const __m512i low = _mm512_maskz_set1_epi32(group_of(seen, 2 * i), 0xffff);
        const __m512i all = _mm512_mask_or_epi32(low, group_of(seen, 2 * i + 1), low,
                                                 _mm512_set1_epi32(static_cast<int>(0xffff0000U)));
        pairs[i] = _mm512_and_si512(pairs[i], all);
      }
      sum = dot_pairs(sum, pairs[i], inverses_[i]);
    }
    Simd::store(sums, sum);
  }

 private:
  /// Those of `first` in low halves, those of `second` in high ones. By a shuffle of bytes, which
  /// another port does than multiply-adds: next to tiles both get only one.
  [[gnu::always_inline]] __m512i low_halves(F32x16 first, F32x16 second) const {
    return _mm512_mask_shuffle_epi8(Simd::bits(first).v, high_halves_, Simd::bits(second).v,
                                    upwards_);
  }

  /// sum + the products of high halves, + those of low ones.
  static F32x16 dot_pairs(F32x16 sum, __m512i a, __m512i b) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b))};
  }

  __m512i logs_[kKeyGroups / 2];
  __m512i inverses_[kKeyGroups / 2];
  __m512i excess_[2];
  __m512i upwards_;  // two bytes up in each lane
  __mmask64 low_bytes_ = kept_mask(0x5555555555555555);
  __mmask64 high_halves_ = kept_mask(0xcccccccccccccccc);
};

}  // namespace
}  // namespace nibble::cpu
