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
  float q_sum;
  float* sums;
  float* offsets;
  float* acc;
  float* shift;  // kExponentBase - top
};

/// Scores of keys 16 g .. 16 g + 15 after scaling, plus `add`.
template <int kCode>
F32x16 scaled(F32x16 score, const KeyBlock& block, int64_t j, float q_sum, F32x16 add) {
  if constexpr (kCode == 3) {
    add = Simd::fma(Simd::load(block.score_offset + j), Simd::set(q_sum), add);
  }
  return Simd::fma(score, Simd::load(block.score_scale + j), add);
}

/// Exponents of the weights of keys lo .. hi-1 for the row's top: at least kLeastExponent, 0 for
/// keys that the row does not see. True when one is above kTopExponent or NaN.
template <int kCode>
bool find_exponents(const KeyBlock& block,
                    const KeyRange& keys,
                    const BlockRow& row,
                    float* exponents) {
  const F32x16 shift = Simd::set(*row.shift);
  F32x16 largest = Simd::set(0.0F);
  for (int64_t j = keys.begin; j < keys.end; j += 16) {
    const F32x16 exponent = scaled<kCode>(Simd::load(row.scores + j), block, j, row.q_sum, shift);
    const F32x16 clamped = Simd::max(Simd::set(kLeastExponent), exponent);  // NaN stays
    largest = Simd::max_bits(clamped, largest);
    Simd::store(exponents + j, clamped);
  }
  if (row.first <= keys.begin && row.last >= keys.end) {
    return Simd::any_bits_above(largest, kTopExponent);
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
  return Simd::any_bits_above(largest, kTopExponent);
}

/// The largest scaled score that the row sees.
template <int kCode>
float top_score(const KeyBlock& block, const BlockRow& row) {
  float largest = kLowest;
  for (int64_t j = row.first / 16 * 16; j < row.last; j += 16) {
    float lanes[16];
    const F32x16 zero = Simd::set(0.0F);
    Simd::store(lanes, scaled<kCode>(Simd::load(row.scores + j), block, j, row.q_sum, zero));
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
  const float shift = kExponentBase - (kWholeTops ? __builtin_ceilf(top) : top);
  const float factor = exp2_weight(shift - *row.shift);
  *row.shift = shift;
  Simd::store(row.sums, Simd::mul(Simd::load(row.sums), Simd::set(factor)));
  Simd::store(row.offsets, Simd::mul(Simd::load(row.offsets), Simd::set(factor)));
  for (int64_t d = 0; d < padded_dim; d += 16) {
    Simd::store(row.acc + d, Simd::mul(Simd::load(row.acc + d), Simd::set(factor)));
  }
  if (find_exponents<kCode>(block, keys, row, exponents)) {
    Simd::store(row.sums, Simd::set(__builtin_nanf("")));
  }
}

/// AttentionForm::kShared: weights are added as they are multiplied, rounded; neighbours to one
/// lane, of 32 keys at a time.
inline F32x16 add_rounded(const float* weights, const KeyRange& keys, F32x16 sum) {
  for (int64_t j = keys.begin; j < keys.end; j += kDotBlock) {
    const F32x16 first = Simd::load(weights + j);
    const F32x16 second = Simd::load(weights + j + 16);
    sum = Simd::add(Simd::add(sum, Simd::evens(first, second)), Simd::odds(first, second));
  }
  return sum;
}

/// The weights of 16 keys: their sum is kept, and they become BF16 numbers.
template <int kCode, bool kWholeTops>
[[gnu::always_inline]] inline void keep_weights(const KeyBlock& block,
                                                const BlockRow& row,
                                                int64_t j,
                                                F32x16 weight,
                                                F32x16& sum,
                                                F32x16& offset) {
  if constexpr (!kWholeTops) {
    sum = Simd::add(sum, weight);
  }
  if constexpr (kCode == 3) {
    offset = Simd::fma(weight, Simd::load(block.value_offset + j), offset);
  }
  if constexpr (kCode != 1) {
    weight = Simd::mul(weight, Simd::load(block.value_scale + j));
  }
  Simd::store(row.scores + j, number_as_bf16(weight));
}

template <int kCode, bool kWholeTops>
void keep_sums(const KeyRange& keys, const BlockRow& row, F32x16 sum, F32x16 offset) {
  Simd::store(row.sums, kWholeTops ? add_rounded(row.scores, keys, sum) : sum);
  if constexpr (kCode == 3) {
    Simd::store(row.offsets, offset);
  }
}

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
  F32x16 sum = Simd::load(row.sums);
  F32x16 offset = Simd::load(row.offsets);
  const WeightConstants constants;
  for (int64_t j = keys.begin; j < keys.end; j += 16) {
    const F32x16 exponent = Simd::load(exponents + j);
    const F32x16 weight = Simd::select_less(exponent, Simd::set(kLeastExponent), Simd::set(0.0F),
                                            weight_of(exponent, constants));
    keep_weights<kCode, kWholeTops>(block, row, j, weight, sum, offset);
  }
  keep_sums<kCode, kWholeTops>(keys, row, sum, offset);
}

/// Scores become weights: BF16 numbers; their sums are kept.
template <int kCode, bool kWholeTops>
void weigh_row(const KeyBlock& block,
               const KeyRange& keys,
               const BlockRow& row,
               int64_t padded_dim) {
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
    exponents[v] = Simd::max(Simd::set(kLeastExponent),
                             scaled<kCode>(score, block, 16 * v, row.q_sum, shift));  // NaN stays
    largest = Simd::max_bits(exponents[v], largest);
  }
  if (__builtin_expect(Simd::any_bits_above(largest, kTopExponent), 0) != 0) {
    return weigh_carefully<kCode, kWholeTops>(block, keys, row, padded_dim);
  }
  F32x16 sum = Simd::load(row.sums);
  F32x16 offset = Simd::load(row.offsets);
  const WeightConstants constants;
#pragma GCC unroll 4
  for (int64_t v = 0; v < kVectors; ++v) {
    keep_weights<kCode, kWholeTops>(block, row, 16 * v, weight_of(exponents[v], constants), sum,
                                    offset);
  }
  keep_sums<kCode, kWholeTops>(keys, row, sum, offset);
}

}  // namespace
}  // namespace nibble::cpu
