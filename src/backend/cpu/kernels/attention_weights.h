#pragma once

// Weights of the keys of a block for one row; see attention_kernels.h.

#include "backend/cpu/kernels/attention_block.h"

namespace nibble::cpu {
namespace {

/// Keys of a block, from begin on; multiples of kDotBlock.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

/// The keys of one block that a row sees, and what the row keeps.
struct BlockRow {
  int64_t first;
  int64_t last;
  float* scores;  // [kKeyBlock], which become weights
  float* sums;
  float* acc;
  float* shift;  // ExponentRange::kBase - top
};

/// Scores of keys 16 g .. 16 g + 15 after scaling, plus `add`.
inline F32x16 scaled(F32x16 score, const KeyBlock& block, int64_t j, F32x16 add) {
  return Simd::fma(score, Simd::load(block.score_scale + j), add);
}

/// Exponents of the weights of `keys` for the row's top: at least kLeast, 0 for keys that the row
/// does not see. True when one is above kTop or NaN.
template <int kCode>
bool find_exponents(const KeyBlock& block,
                    const KeyRange& keys,
                    const BlockRow& row,
                    float* exponents) {
  using Range = ExponentRange<kCode>;
  const F32x16 shift = Simd::set(*row.shift);
  F32x16 largest = Simd::set(0.0F);
  for (int64_t j = keys.begin; j < keys.end; j += 16) {
    const F32x16 exponent = scaled(Simd::load(row.scores + j), block, j, shift);
    const F32x16 clamped = Simd::max(Simd::set(Range::kLeast), exponent);  // NaN stays
    largest = Simd::max_bits(clamped, largest);
    Simd::store(exponents + j, clamped);
  }
  if (row.first <= keys.begin && row.last >= keys.end) {
    return Simd::any_bits_above(largest, Range::kTop);
  }
  for (int64_t j = keys.begin; j < row.first; ++j) {
    exponents[j] = 0.0F;
  }
  for (int64_t j = row.last; j < keys.end; ++j) {
    exponents[j] = 0.0F;
  }
  largest = Simd::set(0.0F);
  for (int64_t j = keys.begin; j < keys.end; j += 16) {
    largest = Simd::max_bits(Simd::load(exponents + j), largest);
  }
  return Simd::any_bits_above(largest, Range::kTop);
}

/// The largest scaled score that the row sees.
template <int kCode>
float top_score(const KeyBlock& block, const BlockRow& row) {
  float largest = kLowest;
  for (int64_t j = row.first / 16 * 16; j < row.last; j += 16) {
    float lanes[16];
    const F32x16 zero = Simd::set(0.0F);
    Simd::store(lanes, scaled(Simd::load(row.scores + j), block, j, zero));
    for (int64_t i = larger(j, row.first); i < smaller(j + 16, row.last); ++i) {
      largest = lanes[i - j] > largest ? lanes[i - j] : largest;
    }
  }
  return largest;
}

/// Raises the row's top to its largest score, and finds exponents again.
template <int kCode, bool kWholeTops>
[[gnu::noinline]] void raise_top(const KeyBlock& block,
                                 const KeyRange& keys,
                                 const BlockRow& row,
                                 int64_t padded_dim,
                                 float* exponents) {
  const float top = top_score<kCode>(block, row);
  const float shift = ExponentRange<kCode>::kBase - (kWholeTops ? __builtin_ceilf(top) : top);
  const float factor = exp2_weight(shift - *row.shift);
  *row.shift = shift;
  Simd::store(row.sums, Simd::mul(Simd::load(row.sums), Simd::set(factor)));
  for (int64_t d = 0; d < padded_dim; d += 16) {
    Simd::store(row.acc + d, rescaled(Simd::load(row.acc + d), Simd::set(factor)));
  }
  if (find_exponents<kCode>(block, keys, row, exponents)) {
    Simd::store(row.sums, Simd::set(__builtin_nanf("")));
  }
}

/// The sums of a row's weights.
template <int kCode, bool kWholeTops>
struct WeightSums {
  F32x16 sum;
  WeightConstants constants;

  explicit WeightSums(const BlockRow& row) : sum(Simd::load(row.sums)) {}

  /// Weights of 32 keys, from j on, become BF16 numbers. kSome: those of exponents below kLeast
  /// are 0.
  template <bool kSome>
  [[gnu::always_inline]] void keep(
      const KeyBlock& block, const BlockRow& row, int64_t j, F32x16 first, F32x16 second) {
    if constexpr (kCode == 1) {
      first = if_seen<kSome>(first, weight_of(first, constants));
      second = if_seen<kSome>(second, weight_of(second, constants));
      if constexpr (!kWholeTops) {
        sum = Simd::add(Simd::add(sum, first), second);
      }
      first = number_as_bf16(first);
      second = number_as_bf16(second);
      if constexpr (kWholeTops) {
        sum = Simd::add(Simd::add(sum, Simd::evens(first, second)), Simd::odds(first, second));
      }
    } else {
      first = if_seen<kSome>(first, code_weight(first, Simd::load_int(block.value_log + j)));
      second =
          if_seen<kSome>(second, code_weight(second, Simd::load_int(block.value_log + j + 16)));
      sum = Simd::fma(second, Simd::load(block.value_inverse + j + 16), sum);
      sum = Simd::fma(first, Simd::load(block.value_inverse + j), sum);
    }
    Simd::store(row.scores + j, first);
    Simd::store(row.scores + j + 16, second);
  }

  void store(const BlockRow& row) const { Simd::store(row.sums, sum); }

 private:
  template <bool kSome>
  static F32x16 if_seen(F32x16 exponent, F32x16 weight) {
    if constexpr (!kSome) {
      return weight;
    }
    return Simd::select_less(exponent, Simd::set(ExponentRange<kCode>::kLeast), Simd::set(0.0F),
                             weight);
  }
};

/// weigh_row for rows that do not see all keys or whose top rises.
template <int kCode, bool kWholeTops>
[[gnu::noinline]] void weigh_carefully(const KeyBlock& block,
                                       const KeyRange& keys,
                                       const BlockRow& row,
                                       int64_t padded_dim) {
  float exponents[kKeyBlock];
  if (find_exponents<kCode>(block, keys, row, exponents)) {
    raise_top<kCode, kWholeTops>(block, keys, row, padded_dim, exponents);
  }
  WeightSums<kCode, kWholeTops> sums(row);
  for (int64_t j = keys.begin; j < keys.end; j += kDotBlock) {
    sums.template keep<true>(block, row, j, Simd::load(exponents + j),
                             Simd::load(exponents + j + 16));
  }
  sums.store(row);
}

/// Scores become weights: BF16 numbers; their sums are kept.
template <int kCode, bool kWholeTops>
void weigh_row(const KeyBlock& block,
               const KeyRange& keys,
               const BlockRow& row,
               int64_t padded_dim) {
  using Range = ExponentRange<kCode>;
  constexpr int64_t kVectors = kKeyBlock / 16;
  if (row.first > 0 || row.last < kKeyBlock) {
    return weigh_carefully<kCode, kWholeTops>(block, keys, row, padded_dim);
  }
  F32x16 exponents[kVectors];
  F32x16 largest = Simd::set(0.0F);
  const F32x16 shift = Simd::set(*row.shift);
#pragma GCC unroll 4
  for (int64_t v = 0; v < kVectors; ++v) {
    const F32x16 score = Simd::load(row.scores + 16 * v);
    exponents[v] =
        Simd::max(Simd::set(Range::kLeast), scaled(score, block, 16 * v, shift));  // NaN stays
    largest = Simd::max_bits(exponents[v], largest);
  }
  if (__builtin_expect(Simd::any_bits_above(largest, Range::kTop), 0) != 0) {
    return weigh_carefully<kCode, kWholeTops>(block, keys, row, padded_dim);
  }
  WeightSums<kCode, kWholeTops> sums(row);
#pragma GCC unroll 2
  for (int64_t v = 0; v < kVectors; v += 2) {
    sums.template keep<false>(block, row, 16 * v, exponents[v], exponents[v + 1]);
  }
  sums.store(row);
}

}  // namespace
}  // namespace nibble::cpu
