#pragma once

// Attention over BF16, INT8 and INT4 caches: what tiles of BF16 products do on CPUs that have them
// (amx/amx_attention.h), lane by lane. The rules that give the same bits everywhere:
// - Queries are rounded to BF16. Keys and values enter as BF16 numbers or as their integer codes
//   (INT4: minus 7.5), which are BF16 numbers; a token's scale multiplies its score or weight.
// - A product sums blocks of 32 elements: two sums from 0, of the even and of the odd elements, by
//   fused multiply-adds in order; their sum is then added to the total.
// - Keys come in blocks of 64 from multiples of 64 on. A row's weights are 2^(score - top), where
//   the subtraction is fused with the scaling and rounded to 15 binary places (weight_of); top
//   becomes the largest score of a block that has one 32 or more above it, so that sums are
//   rescaled rarely and a single key has weight 1. A score that is not finite makes the row NaN.
//   AttentionForm::kShared: top is the next whole number.
// - Sums of weights are kept per lane, key modulo 16 (AttentionForm::kShared: of rounded weights,
//   two neighbours of 32 keys to a lane), and added at the end of a piece of 2048 keys.
// Keys that a row does not see have weight 0 and change no bit: a row's result depends on its own
// position and the cache alone.

#include "backend/cpu/kernels/attention_block.h"

namespace nibble::cpu {
namespace {

/// The keys of one block that a row sees, and the row's sums.
struct BlockRow {
  int64_t first;
  int64_t last;
  const float* q;
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
                    const BlockRow& row,
                    const float* scores,
                    float* result) {
  const int64_t lo = row.first / kDotBlock * kDotBlock;
  const int64_t hi = round_up(row.last, kDotBlock);
  const F32x16 shift = Simd::set(*row.shift);
  for (int64_t j = lo; j < hi; j += 16) {
    const F32x16 exponent = scaled<kCode>(Simd::load(scores + j), block, j, row.q_sum, shift);
    Simd::store(result + j, Simd::max(Simd::set(kLeastExponent), exponent));  // NaN stays
  }
  for (int64_t j = lo; j < row.first; ++j) {
    result[j] = 0.0F;
  }
  for (int64_t j = row.last; j < hi; ++j) {
    result[j] = 0.0F;
  }
  F32x16 largest = Simd::set(0.0F);
  for (int64_t j = lo; j < hi; j += 16) {
    largest = Simd::max_bits(Simd::load(result + j), largest);
  }
  return Simd::any_bits_above(largest, kTopExponent);
}

/// The largest scaled score that the row sees.
template <int kCode>
float top_score(const KeyBlock& block, const BlockRow& row, const float* scores) {
  float largest = kLowest;
  for (int64_t j = row.first / 16 * 16; j < row.last; j += 16) {
    float lanes[16];
    const F32x16 zero = Simd::set(0.0F);
    Simd::store(lanes, scaled<kCode>(Simd::load(scores + j), block, j, row.q_sum, zero));
    for (int64_t i = larger(j, row.first); i < smaller(j + 16, row.last); ++i) {
      largest = lanes[i - j] > largest ? lanes[i - j] : largest;
    }
  }
  return largest;
}

/// Exponents of the weights of keys lo .. hi-1; raises the row's top when one is above
/// kTopExponent.
template <int kCode, bool kWholeTops>
void score_keys(const KeyBlock& block, int64_t padded_dim, const BlockRow& row, float* exponents) {
  const int64_t lo = row.first / kDotBlock * kDotBlock;
  const int64_t hi = round_up(row.last, kDotBlock);
  float scores[kKeyBlock];
  for (int64_t j = lo; j < hi; j += 16 * kDotVectors) {
    const int64_t from = smaller(j, kKeyBlock - 16 * kDotVectors);
    dot_keys(row.q, block.keys + from, round_up(padded_dim, kDotBlock), scores + from);
  }
  if (!find_exponents<kCode>(block, row, scores, exponents)) {
    return;
  }
  const float top = top_score<kCode>(block, row, scores);
  const float shift = kExponentBase - (kWholeTops ? __builtin_ceilf(top) : top);
  const float factor = exp2_weight(shift - *row.shift);
  *row.shift = shift;
  Simd::store(row.sums, Simd::mul(Simd::load(row.sums), Simd::set(factor)));
  Simd::store(row.offsets, Simd::mul(Simd::load(row.offsets), Simd::set(factor)));
  for (int64_t d = 0; d < padded_dim; d += 16) {
    Simd::store(row.acc + d, Simd::mul(Simd::load(row.acc + d), Simd::set(factor)));
  }
  if (find_exponents<kCode>(block, row, scores, exponents)) {
    Simd::store(row.sums, Simd::set(__builtin_nanf("")));
  }
}

/// AttentionForm::kShared: weights are added as they are multiplied, rounded; neighbours to one
/// lane, of 32 keys at a time.
inline F32x16 add_rounded(const float* weights, int64_t lo, int64_t hi, F32x16 sum) {
  for (int64_t j = lo; j < hi; j += kDotBlock) {
    const F32x16 first = Simd::load(weights + j);
    const F32x16 second = Simd::load(weights + j + 16);
    sum = Simd::add(Simd::add(sum, Simd::evens(first, second)), Simd::odds(first, second));
  }
  return sum;
}

template <int kCode, bool kWholeTops>
void attend_block(const KeyBlock& block, int64_t dim, const BlockRow& row) {
  const int64_t padded_dim = round_up(dim, 16);
  const int64_t lo = row.first / kDotBlock * kDotBlock;
  const int64_t hi = round_up(row.last, kDotBlock);
  float scores[kKeyBlock];  // exponents, then weights
  score_keys<kCode, kWholeTops>(block, padded_dim, row, scores);
  F32x16 sum = Simd::load(row.sums);
  F32x16 offset = Simd::load(row.offsets);
  const WeightConstants constants;
  for (int64_t j = lo; j < hi; j += 16) {
    const F32x16 exponent = Simd::load(scores + j);
    const F32x16 zero = Simd::set(0.0F);
    F32x16 weight = Simd::select_less(exponent, Simd::set(kLeastExponent), zero,
                                      weight_of(exponent, constants));
    if constexpr (!kWholeTops) {
      sum = Simd::add(sum, weight);
    }
    if constexpr (kCode == 3) {
      offset = Simd::fma(weight, Simd::load(block.value_offset + j), offset);
    }
    if constexpr (kCode != 1) {
      weight = Simd::mul(weight, Simd::load(block.value_scale + j));
    }
    Simd::store(scores + j, nearest_bf16(weight));
  }
  if constexpr (kWholeTops) {
    sum = add_rounded(scores, lo, hi, sum);
  }
  Simd::store(row.sums, sum);
  Simd::store(row.offsets, offset);
  for (int64_t j = lo; j < hi; j += kDotBlock) {
    const float* values = block.values + j * padded_dim;
    int64_t d = 0;
    for (; d + 16 * kDotVectors <= padded_dim; d += 16 * kDotVectors) {
      add_values<kDotVectors>(scores + j, values + d, padded_dim, row.acc + d);
    }
    for (; d < padded_dim; d += 16) {
      add_values<1>(scores + j, values + d, padded_dim, row.acc + d);
    }
  }
}

/// Queries as BF16 numbers and their sums.
inline void load_queries(const AttentionTask& task, const QueryRows& queries) {
  const int64_t dim = task.kv.head_dim;
  const int64_t width = round_up(dim, kDotBlock);
  for (int64_t r = 0; r < task.tokens * task.group; ++r) {
    const int64_t source = r / task.group * task.q_stride + r % task.group * dim;
    F32x16 sum = Simd::set(0.0F);
    for (int64_t d = 0; d < width; d += 16) {
      const F32x16 q = load_numbers(task.q, source + d, larger(0, smaller(16, dim - d)));
      const F32x16 rounded = nearest_bf16(q);
      Simd::store(queries.q + r * width + d, rounded);
      sum = Simd::add(sum, rounded);
    }
    queries.q_sum[r] = Simd::reduce_add(sum);
  }
}

/// Sums over the keys first .. end-1, which lie in one piece.
template <int kCode>
void sum_piece(const AttentionTask& task,
               const int64_t (&keys)[2],
               const RowStates& states,
               const QueryRows& queries,
               KeyBlock& block) {
  const int64_t dim = task.kv.head_dim;
  const int64_t padded_dim = round_up(dim, 16);
  const int64_t rows = task.tokens * task.group;
  clear_states(states, rows, padded_dim);
  for (int64_t r = 0; r < rows; ++r) {
    queries.shift[r] = kExponentBase - kLowest;
  }
  __builtin_memset(queries.sums, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(queries.offsets, 0, static_cast<size_t>(rows) * 64);
  for (int64_t at = keys[0] / kKeyBlock * kKeyBlock; at < keys[1]; at += kKeyBlock) {
    const int64_t range[2] = {larger(keys[0], at) - at, smaller(keys[1], at + kKeyBlock) - at};
    KvRows found;
    find_rows(task, at + range[0], at + range[1], 0, found);
    const int64_t end = round_up(range[1], kDotBlock);
    for (int64_t j = range[0] / kDotBlock * kDotBlock; j < end; j += 16) {
      load_keys<kCode>(task, found, range, j, block);
    }
    if (kCode == 1 && task.tokens > 1) {
      contain_values(dim, range, block);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first_position + r / task.group;
      const int64_t first = larger(first_visible(task, position) - at, range[0]);
      const int64_t last = smaller(position + 1 - at, range[1]);
      if (first < last) {
        const BlockRow row{first,
                           last,
                           queries.q + r * round_up(dim, kDotBlock),
                           queries.q_sum[r],
                           queries.sums + r * 16,
                           queries.offsets + r * 16,
                           states.acc + r * padded_dim,
                           queries.shift + r};
        if (kCode == 1 && task.whole_tops) {
          attend_block<kCode, kCode == 1>(block, dim, row);
        } else {
          attend_block<kCode, false>(block, dim, row);
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    states.top[r] = kExponentBase - queries.shift[r];
    states.sum[r] = Simd::reduce_add(Simd::load(queries.sums + r * 16));
    const F32x16 offset = Simd::set(Simd::reduce_add(Simd::load(queries.offsets + r * 16)));
    for (int64_t d = r * padded_dim; kCode == 3 && d < (r + 1) * padded_dim; d += 16) {
      Simd::store(states.acc + d, Simd::add(Simd::load(states.acc + d), offset));
    }
  }
}

template <int kCode>
void attention_of(const AttentionTask& task) {
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  const int64_t width = round_up(task.kv.head_dim, kDotBlock);
  const int64_t rows = task.tokens * task.group;
  float* at = task.scratch;
  const auto take = [&](int64_t floats) {
    float* memory = at;
    at += round_up(floats, 16);
    return memory;
  };
  KeyBlock block{take(kKeyBlock * width), take(kKeyBlock * padded_dim),
                 take(kKeyBlock),         take(kKeyBlock),
                 take(kKeyBlock),         take(kKeyBlock)};
  const QueryRows queries{take(rows * width), take(rows), take(rows * 16), take(rows * 16),
                          take(rows)};
  __builtin_memset(block.keys, 0, static_cast<size_t>(kKeyBlock * width) * 4);
  load_queries(task, queries);
  in_pieces(task, at, [&](int64_t first, int64_t end, const RowStates& states) {
    sum_piece<kCode>(task, {first, end}, states, queries, block);
  });
}

void attention(const AttentionTask& task) {
  switch (task.kv.code) {
    case 0:
      return attention_f32(task);
    case 1:
      return attention_of<1>(task);
    case 2:
      return attention_of<2>(task);
    default:
      return attention_of<3>(task);
  }
}

}  // namespace
}  // namespace nibble::cpu
