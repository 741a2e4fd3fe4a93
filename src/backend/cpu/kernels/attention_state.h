#pragma once

// Parts of attention that all caches but F32 share: weights of keys, and the sums of a task's query
// rows over pieces of the keys.

#include "backend/cpu/kernels/attention_exponents.h"
#include "backend/cpu/kernels/attention_rows.h"

namespace nibble::cpu {
namespace {

constexpr float kLowest = -3.4028234e38F;
constexpr float kLog2E = 1.44269504F;

/// Of weight_of: loops keep them in registers.
struct WeightConstants {
  F32x16 factors[4] = {Simd::set(WeightForm::kCubic), Simd::set(WeightForm::kQuadratic),
                       Simd::set(WeightForm::kLinear), Simd::set(WeightForm::kConstant)};
  F32x16 mantissa = Simd::from_bits(Simd::set_int(0x7fffff));
  F32x16 one = Simd::set(1.0F);
};

/// BF16 caches: 2^x of kBase + x, -96 <= x < 32, exact for integers. Shifted by eight bits, x's
/// fraction f is a mantissa and its integer part adds to an exponent: (1 + f) 2^x / 2^f. The
/// polynomial is 1 + (2^f - 1 - f) / 2 as a function of 1 + f, of least error with f(0) = 1
/// (fitted); just below a power of two, half a step of a number is one of the next, so adding bits
/// adds 2^f - 1 - f. Relative error 8.6e-5; weights are rounded to BF16 afterwards.
inline F32x16 weight_of_shifted(I32x16 x, const WeightConstants& constants) {
  const F32x16 m = Simd::and_or(x, constants.mantissa, constants.one);
  F32x16 p = Simd::fma(constants.factors[0], m, constants.factors[1]);
  p = Simd::fma(p, m, constants.factors[2]);
  p = Simd::fma(p, m, constants.factors[3]);
  return Simd::from_bits(Simd::add_int(x, Simd::bits(p)));
}

inline F32x16 weight_of(F32x16 exponent, const WeightConstants& constants) {
  return weight_of_shifted(Simd::shift_left<8>(Simd::bits(exponent)), constants);
}

/// sum * factor of sums that tiles add to: 0 instead of subnormal numbers, which tiles take for 0.
inline F32x16 rescaled(F32x16 sum, F32x16 factor) {
  const F32x16 x = Simd::mul(sum, factor);
  return Simd::select_less(magnitude(x), Simd::set(0x1p-126F), Simd::set(0.0F), x);
}

/// Sums over keys of a task's query rows: values weighted by 2^(score - top), and the weights.
struct RowStates {
  float* acc;  // [rows][padded head_dim]
  float* top;  // [rows]
  float* sum;  // [rows]
};

inline RowStates states_at(float* p, int64_t rows, int64_t padded_dim) {
  return {p, p + rows * padded_dim, p + rows * (padded_dim + 1)};
}

inline void clear_states(const RowStates& states, int64_t rows, int64_t padded_dim) {
  __builtin_memset(states.acc, 0, static_cast<size_t>(rows * padded_dim) * 4);
  for (int64_t r = 0; r < rows; ++r) {
    states.top[r] = kLowest;
    states.sum[r] = 0.0F;
  }
}

/// total += piece. Adding a piece without visible keys changes no bit.
inline void merge_states(const RowStates& total,
                         const RowStates& piece,
                         int64_t rows,
                         int64_t padded_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float top = total.top[r] > piece.top[r] ? total.top[r] : piece.top[r];
    const float keep = exp2_weight(total.top[r] - top);
    const float add = exp2_weight(piece.top[r] - top);
    total.top[r] = top;
    total.sum[r] = __builtin_fmaf(piece.sum[r], add, total.sum[r] * keep);
    for (int64_t d = r * padded_dim; d < (r + 1) * padded_dim; d += 16) {
      const F32x16 kept = Simd::mul(Simd::load(total.acc + d), Simd::set(keep));
      Simd::store(total.acc + d, Simd::fma(Simd::load(piece.acc + d), Simd::set(add), kept));
    }
  }
}

/// Adds to each row's weights that of its head's sink, a key without a value.
inline void add_sinks(const AttentionTask& task, const RowStates& total) {
  const float unit = task.kv.kernel >= 2 ? CodeWeightForm::kTooMuch : 1.0F;  // INT8, INT4
  for (int64_t r = 0; r < task.tokens * task.group; ++r) {
    total.sum[r] += unit * sink_weight(task.sinks[r % task.group], total.top[r]);
  }
}

inline void write_results(const AttentionTask& task, const RowStates& total, int64_t padded_dim) {
  const int64_t dim = task.kv.head_dim;
  const F32x16 scale = Simd::set(task.value_scale);
  if (task.sinks != nullptr) {
    add_sinks(task, total);
  }
  for (int64_t r = 0; r < task.tokens * task.group; ++r) {
    const int64_t out = r / task.group * task.out_stride + r % task.group * dim;
    float* row = total.acc + r * padded_dim;
    in_vectors(dim, [&](int64_t i, int64_t) {
      const F32x16 sum = Simd::mul(Simd::load(row + i), scale);
      Simd::store(row + i, Simd::div(sum, Simd::set(total.sum[r])));
    });
    store_result(task, row, out);
  }
}

void merge_attention(const AttentionTask& task, float* partials, int64_t pieces, int64_t stride) {
  const int64_t rows = task.tokens * task.group;
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  const auto states_of = [&](int64_t piece) {
    return states_at(partials + piece * stride, rows, padded_dim);
  };
  const RowStates total = states_of(0);
  for (int64_t piece = 1; piece < pieces; ++piece) {
    merge_states(total, states_of(piece), rows, padded_dim);
  }
  write_results(task, total, padded_dim);
}

/// Walks the pieces that the task's rows see: add(first key, end key, total, is_first) adds the
/// sums over keys of one piece to the total; is_first: the total is to become those sums. It is in
/// `memory` or the task's.
template <typename Add>
void in_pieces(const AttentionTask& task, float* memory, const Add& add) {
  const int64_t rows = task.tokens * task.group;
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  const int64_t first = first_visible(task, task.first_position);
  const int64_t end = task.first_position + task.tokens;
  const bool partial = task.partial != nullptr;
  const int64_t keys = task.piece_keys;
  const int64_t begin = partial ? task.piece * keys : first / keys * keys;
  const int64_t stop = partial ? begin + keys : end;
  const RowStates total = states_at(partial ? task.partial : memory, rows, padded_dim);
  for (int64_t piece = begin; piece < stop; piece += keys) {
    add(larger(first, piece), smaller(end, piece + keys), total, piece == begin);
  }
  if (!partial) {
    write_results(task, total, padded_dim);
  }
}

}  // namespace
}  // namespace nibble::cpu
