#pragma once

// Weights of the rows of a row tile: exponents of BF16 products become BF16 weights.

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

/// What the rows of a row tile and the keys of a block share; arrays begin at the tile's first row.
struct TileRows {
  uint8_t* scores;  // of which weights take the first tiles
  float* sums;
  float* offsets;
  float* shift;
  const float* q_sum;
  const int32_t* positions;
  const float* score_scale;
  const float* score_offset;
  const float* value_scale;
  const float* value_offset;
  int64_t count;  // rows
  int64_t at;     // position of the block
  int64_t first;  // of the block's keys that count
  int64_t window;
  bool whole_tops;

  TileRows(const AttentionTask& task,
           const TileTask& t,
           const TileRange& range,
           int64_t row_tile,
           int64_t buffer)
      : scores(t.scores[buffer]),
        sums(t.sums + row_tile * 256),
        offsets(t.offsets + row_tile * 256),
        shift(t.shift + row_tile * 16),
        q_sum(t.q_sum + row_tile * 16),
        positions(t.positions + row_tile * 16),
        score_scale(t.block.score_scale + range.block * kKeyBlock),
        score_offset(t.block.score_offset + range.block * kKeyBlock),
        value_scale(t.block.value_scale + range.block * kKeyBlock),
        value_offset(t.block.value_offset + range.block * kKeyBlock),
        count(smaller(16, t.rows - row_tile * 16)),
        at(range.at),
        first(range.first),
        window(task.window),
        whole_tops(task.whole_tops) {}

  /// Bit j: row `row` sees key j.
  [[nodiscard]] uint64_t seen_by(int64_t row) const {
    const int64_t position = positions[row];
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
  if constexpr (kCode == 3) {
    add = Simd::fma(Simd::load(rows.score_offset + 16 * g), Simd::set(rows.q_sum[row]), add);
  }
  const auto* scores = reinterpret_cast<const float*>(rows.scores + row * 64 + g * kTileBytes);
  return Simd::fma(Simd::load(scores), scale, add);
}

/// The same number, of which the compiler does not know that it could make it again for each row.
inline F32x16 kept(F32x16 x) { return Simd::from_bits({Simd::opaque(Simd::bits(x).v)}); }

inline F32x16 kept(float x) { return kept(Simd::set(x)); }

inline __m512i kept_bits(__m512i x) { return Simd::opaque(x); }

inline __m512i kept_bits(uint32_t x) { return kept_bits(_mm512_set1_epi32(static_cast<int>(x))); }

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

/// Weighs the rows of a row tile, one at a time. kFull: they all see the whole block.
template <int kCode, bool kFull>
class RowWeigher {
 public:
  [[gnu::always_inline]] explicit RowWeigher(const TileRows& rows)
      : rows_(rows),
        least_(kept(kLeastExponent)),
        begin_(kept_bits(0xffc00000U)),
        upwards_(kept_bits(_mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080))) {
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      score_scale_[g] = Simd::load(rows.score_scale + 16 * g);
      value_scale_[g] = kCode == 1 ? Simd::set(1.0F) : Simd::load(rows.value_scale + 16 * g);
    }
  }

  /// Weighs the next row, if one is left. Rows with exponents out of range are left for later.
  [[gnu::always_inline]] void next() {
    if (row_ < rows_.count) {
      skipped_ |= static_cast<uint32_t>(weigh(row_)) << row_;
      ++row_;
    }
  }

  /// Weighs all that are left; returns the rows with exponents out of range.
  [[gnu::always_inline]] uint32_t finish() {
    while (row_ < rows_.count) {
      next();
    }
    return skipped_;
  }

  /// Scores become weights in BF16; their sums are kept. Does nothing and returns true when an
  /// exponent is not within kLeastExponent .. kTopExponent; kSure: those are clamped.
  template <bool kSure = false>
  [[gnu::always_inline]] bool weigh(int64_t row) {
    const uint64_t seen = kFull ? ~uint64_t{0} : rows_.seen_by(row);
    F32x16 weight[kKeyGroups];
    find_exponents(row, seen, weight);
    if (kSure) {
      clamp(weight);
    } else if (__builtin_expect(out_of_range(weight), 0) != 0) {
      return true;
    }
    F32x16 sum = Simd::load(rows_.sums + row * 16);
    F32x16 offset = Simd::load(rows_.offsets + row * 16);
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      const __mmask16 mask = group_of(seen, g);
      weight[g] = weight_of_shifted(shifted(weight[g]), constants_);
      if constexpr (!kFull) {
        weight[g].v = _mm512_maskz_mov_ps(mask, weight[g].v);
      }
      sum = Simd::add(sum, weight[g]);
      if constexpr (kCode == 3) {
        const F32x16 value_offset = Simd::load(rows_.value_offset + 16 * g);
        offset.v = kFull ? Simd::fma(weight[g], value_offset, offset).v
                         : _mm512_mask3_fmadd_ps(weight[g].v, value_offset.v, offset.v, mask);
      }
      if constexpr (kCode != 1) {
        weight[g].v = kFull ? Simd::mul(weight[g], value_scale_[g]).v
                            : _mm512_maskz_mul_ps(mask, weight[g].v, value_scale_[g].v);
      }
    }
    __m512i pairs[kKeyGroups / 2];
#pragma GCC unroll 2
    for (int64_t g = 0; g < kKeyGroups; g += 2) {
      const auto pair =
          reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[g + 1].v, weight[g].v));
      _mm512_storeu_si512(rows_.scores + row * 64 + g / 2 * kTileBytes, pair);
      pairs[g / 2] = pair;
    }
    if (kCode == 1 && rows_.whole_tops) {
      sum = add_pairs(add_pairs(Simd::load(rows_.sums + row * 16), pairs[0]), pairs[1]);
    }
    Simd::store(rows_.sums + row * 16, sum);
    if constexpr (kCode == 3) {
      Simd::store(rows_.offsets + row * 16, offset);
    }
    return false;
  }

  /// Exponents of a row's weights; kLeastExponent for keys that it does not see.
  [[gnu::always_inline]] void find_exponents(int64_t row,
                                             uint64_t seen,
                                             F32x16 (&exponents)[kKeyGroups]) {
    const F32x16 shift = Simd::set(rows_.shift[row]);
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      exponents[g] = scaled_group<kCode>(rows_, row, g, score_scale_[g], shift);
      if constexpr (!kFull) {
        exponents[g].v =
            _mm512_mask_mov_ps(Simd::set(kLeastExponent).v, group_of(seen, g), exponents[g].v);
      }
    }
  }

  /// By a shuffle of bytes, which another port does than the products of weights: next to tiles
  /// both get only one.
  [[gnu::always_inline]] I32x16 shifted(F32x16 exponent) const {
    return {_mm512_shuffle_epi8(Simd::bits(exponent).v, upwards_)};
  }

  [[gnu::always_inline]] static void clamp(F32x16 (&exponents)[kKeyGroups]) {
    for (F32x16& exponent : exponents) {
      exponent = Simd::max(Simd::set(kLeastExponent), exponent);  // NaN stays
    }
  }

  [[gnu::always_inline]] static bool too_high(const F32x16 (&exponents)[kKeyGroups]) {
    static_assert(kKeyGroups == 4);
    return Simd::any_bits_above(Simd::max_bits(Simd::max_bits(exponents[0], exponents[1]),
                                               Simd::max_bits(exponents[2], exponents[3])),
                                kTopExponent);
  }

  /// Whether one is not within kLeastExponent .. kTopExponent: all numbers there begin with the
  /// same ten bits.
  [[gnu::always_inline]] bool out_of_range(const F32x16 (&exponents)[kKeyGroups]) const {
    static_assert(kLeastExponent == 384.0F && kTopExponent == 512.0F - 0x1p-15F);
    constexpr int kEitherDiffers = 0x7e;  // (a ^ c) | (b ^ c)
    const __m512i least = Simd::bits(least_).v;
    const __m512i low = _mm512_ternarylogic_epi32(
        Simd::bits(exponents[0]).v, Simd::bits(exponents[1]).v, least, kEitherDiffers);
    const __m512i high = _mm512_ternarylogic_epi32(
        Simd::bits(exponents[2]).v, Simd::bits(exponents[3]).v, least, kEitherDiffers);
    return _mm512_test_epi32_mask(_mm512_or_si512(low, high), begin_) != 0;
  }

 private:
  TileRows rows_;
  F32x16 score_scale_[kKeyGroups];
  F32x16 value_scale_[kKeyGroups];
  WeightConstants constants_ = kept(WeightConstants{});
  F32x16 least_;
  __m512i begin_;
  __m512i upwards_;  // a byte up in each lane
  int64_t row_ = 0;
  uint32_t skipped_ = 0;
};

/// kExponentBase minus the largest score that a row sees.
template <int kCode>
float shift_to_top(const TileRows& rows, int64_t row) {
  F32x16 largest = Simd::set(kLowest);
  const uint64_t seen = rows.seen_by(row);
  for (int64_t g = 0; g < kKeyGroups; ++g) {
    const F32x16 scale = Simd::load(rows.score_scale + 16 * g);
    const F32x16 score = scaled_group<kCode>(rows, row, g, scale, Simd::set(0.0F));
    largest.v = _mm512_mask_max_ps(largest.v, group_of(seen, g), score.v, largest.v);
  }
  const float top = Simd::reduce_max(largest);
  return kExponentBase - (rows.whole_tops ? __builtin_ceilf(top) : top);
}

/// Makes a row's largest score its top and rescales its sums.
template <int kCode>
void raise_top(const TileTask& t, const TileRows& rows, int64_t row_tile, int64_t row) {
  const float shift = shift_to_top<kCode>(rows, row);
  const F32x16 factor = Simd::set(exp2_weight(shift - rows.shift[row]));
  rows.shift[row] = shift;
  float* sums = rows.sums + row * 16;
  float* offsets = rows.offsets + row * 16;
  Simd::store(sums, Simd::mul(Simd::load(sums), factor));
  Simd::store(offsets, Simd::mul(Simd::load(offsets), factor));
  for (int64_t d = 0; d < 2 * t.width; ++d) {
    auto* acc = reinterpret_cast<float*>(acc_tile(t, row_tile, d) + row * 64);
    Simd::store(acc, Simd::mul(Simd::load(acc), factor));
  }
}

/// Weighs rows with exponents out of range: raises the tops of those with high ones.
template <int kCode>
[[gnu::noinline]] void weigh_skipped(const TileTask& t,
                                     const TileRows& rows,
                                     int64_t row_tile,
                                     uint32_t skipped) {
  RowWeigher<kCode, false> weigher(rows);
  const auto too_high = [&](int64_t row) {
    F32x16 exponents[kKeyGroups];
    weigher.find_exponents(row, rows.seen_by(row), exponents);
    weigher.clamp(exponents);
    return weigher.too_high(exponents);
  };
  for (; skipped != 0; skipped &= skipped - 1) {
    const int64_t row = __builtin_ctz(skipped);
    if (too_high(row)) {
      raise_top<kCode>(t, rows, row_tile, row);
      if (too_high(row)) {
        Simd::store(rows.sums + row * 16, Simd::set(__builtin_nanf("")));
      }
    }
    weigher.template weigh<true>(row);
  }
}

/// Raises the tops of rows that have seen no key: they have nothing to rescale.
template <int kCode>
[[gnu::noinline]] void find_first_tops(const TileRows& rows) {
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.shift[row] == kExponentBase - kLowest) {
      rows.shift[row] = shift_to_top<kCode>(rows, row);
    }
  }
}

/// The rows of a row tile, but for those that are returned: with exponents out of range.
template <int kCode>
uint32_t weigh_rows(const TileRows& rows, const TileRange& range) {
  if (rows.shift[0] == kExponentBase - kLowest) {
    find_first_tops<kCode>(rows);
  }
  return range.masked ? RowWeigher<kCode, false>(rows).finish()
                      : RowWeigher<kCode, true>(rows).finish();
}

}  // namespace
}  // namespace nibble::cpu
