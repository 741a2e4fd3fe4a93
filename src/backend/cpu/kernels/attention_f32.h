#pragma once

// Attention over an F32 cache, all in F32. Keys come in blocks of 64 that start at multiples of 64,
// and each query row walks the blocks that it sees in order with an online softmax.

#include "backend/cpu/kernels/attention_state.h"

namespace nibble::cpu {
namespace {

/// A row padded with zeros to a multiple of 16.
inline void copy_padded(const float* row, int64_t dim, float* out) {
  in_vectors(dim,
             [&](int64_t i, int64_t lanes) { Simd::store(out + i, load_lanes(row + i, lanes)); });
}

/// Keys and values of positions first .. last-1 of the block.
inline void copy_f32_block(
    const AttentionTask& task, int64_t block, int64_t first, int64_t last, int64_t padded_dim) {
  float* keys = task.scratch;
  float* values = keys + kKeyBlock * padded_dim;
  KvRows rows;
  find_rows(task, first, last, 0, rows);
  for (int64_t i = 0; i < last - first; ++i) {
    const int64_t at = (first - block + i) * padded_dim;
    const auto* key = reinterpret_cast<const float*>(rows.keys[i].codes);
    const auto* value = reinterpret_cast<const float*>(rows.values[i].codes);
    copy_padded(key, task.kv.head_dim, keys + at);
    copy_padded(value, task.kv.head_dim, values + at);
  }
}

struct QueryRow {
  const float* q;      // [padded_dim]
  float* acc;          // [padded_dim]
  float* top;          // largest score so far
  float* denominator;  // sum of exp(score - top)
};

/// Folds keys first .. last-1 of a block (indices within it) into one row.
void attend_block(const float* keys,
                  const float* values,
                  int64_t padded_dim,
                  int64_t first,
                  int64_t last,
                  float scale,
                  const QueryRow& row) {
  float scores[kKeyBlock];
  for (int64_t j = 0; j < kKeyBlock; ++j) {
    scores[j] = -__builtin_inff();
  }
  for (int64_t j = first; j < last; ++j) {
    F32x16 dot = Simd::set(0.0F);
    for (int64_t d = 0; d < padded_dim; d += 16) {
      dot = Simd::fma(Simd::load(row.q + d), Simd::load(keys + j * padded_dim + d), dot);
    }
    scores[j] = Simd::reduce_add(dot) * scale;
  }
  F32x16 largest = Simd::set(*row.top);
  for (int64_t j = 0; j < kKeyBlock; j += 16) {
    largest = Simd::max(largest, Simd::load(scores + j));
  }
  const float top = Simd::reduce_max(largest);
  F32x16 sum = Simd::set(0.0F);
  for (int64_t j = 0; j < kKeyBlock; j += 16) {
    const F32x16 p = exp(Simd::sub(Simd::load(scores + j), Simd::set(top)));
    Simd::store(scores + j, p);
    sum = Simd::add(sum, p);
  }
  float old[16];
  Simd::store(old, exp(Simd::set(*row.top - top)));
  *row.top = top;
  *row.denominator = __builtin_fmaf(*row.denominator, old[0], Simd::reduce_add(sum));
  for (int64_t d = 0; d < padded_dim; d += 64) {
    const int64_t vectors = padded_dim - d < 64 ? (padded_dim - d) / 16 : 4;
    F32x16 acc[4];
    for (int64_t i = 0; i < vectors; ++i) {
      acc[i] = Simd::mul(Simd::load(row.acc + d + 16 * i), Simd::set(old[0]));
    }
    if (vectors == 4) {
      for (int64_t j = first; j < last; ++j) {
        const F32x16 p = Simd::set(scores[j]);
        const float* v = values + j * padded_dim + d;
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) {
          acc[i] = Simd::fma(p, Simd::load(v + 16 * i), acc[i]);
        }
      }
    } else {
      for (int64_t j = first; j < last; ++j) {
        for (int64_t i = 0; i < vectors; ++i) {
          acc[i] = Simd::fma(Simd::set(scores[j]), Simd::load(values + j * padded_dim + d + 16 * i),
                             acc[i]);
        }
      }
    }
    for (int64_t i = 0; i < vectors; ++i) {
      Simd::store(row.acc + d + 16 * i, acc[i]);
    }
  }
}

/// Joins a row with a key whose score is `sink` and that has no value.
inline void add_sink(float sink, int64_t padded_dim, const QueryRow& row) {
  const float top = *row.top > sink ? *row.top : sink;
  float weights[16] = {*row.top - top, sink - top};
  Simd::store(weights, exp(Simd::load(weights)));
  *row.denominator = __builtin_fmaf(*row.denominator, weights[0], weights[1]);
  for (int64_t d = 0; d < padded_dim; d += 16) {
    Simd::store(row.acc + d, Simd::mul(Simd::load(row.acc + d), Simd::set(weights[0])));
  }
}

inline void attention_f32(const AttentionTask& task) {
  const int64_t dim = task.kv.head_dim;
  const int64_t padded_dim = (dim + 15) / 16 * 16;
  const int64_t rows = task.tokens * task.group;
  float* keys = task.scratch;
  float* values = keys + kKeyBlock * padded_dim;
  float* q = values + kKeyBlock * padded_dim;
  float* acc = q + kQueryRows * padded_dim;
  float* top = acc + kQueryRows * padded_dim;
  float* denominator = top + kQueryRows;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = r / task.group * task.q_stride + r % task.group * dim;
    for (int64_t d = 0; d < padded_dim; d += 16) {
      Simd::store(q + r * padded_dim + d, load_numbers(task.q, source + d, smaller(16, dim - d)));
      Simd::store(acc + r * padded_dim + d, Simd::set(0.0F));
    }
    top[r] = -__builtin_inff();
    denominator[r] = 0.0F;
  }
  const int64_t first = first_visible(task, task.first_position);
  const int64_t end = task.first_position + task.tokens;
  for (int64_t block = first / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    copy_f32_block(task, block, larger(first, block), smaller(end, block + kKeyBlock), padded_dim);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first_position + r / task.group;
      const int64_t begin = larger(first_visible(task, position), block) - block;
      const int64_t last = smaller(position + 1, block + kKeyBlock) - block;
      if (begin < last) {
        const QueryRow row{q + r * padded_dim, acc + r * padded_dim, top + r, denominator + r};
        attend_block(keys, values, padded_dim, begin, last, task.scale, row);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (task.sinks != nullptr) {
      add_sink(task.sinks[r % task.group], padded_dim,
               {q + r * padded_dim, acc + r * padded_dim, top + r, denominator + r});
    }
    const int64_t out = r / task.group * task.out_stride + r % task.group * dim;
    float* row = acc + r * padded_dim;
    in_vectors(dim, [&](int64_t i, int64_t) {
      Simd::store(row + i, Simd::div(Simd::load(row + i), Simd::set(denominator[r])));
    });
    store_result(task, row, out);
  }
}

}  // namespace
}  // namespace nibble::cpu
