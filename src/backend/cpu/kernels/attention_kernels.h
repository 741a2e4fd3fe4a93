#pragma once

// Attention of the query heads that share one KV head, for some consecutive tokens of a sequence.
// Keys come in blocks of 64 that start at multiples of 64, whatever the page size, and each query
// row walks the blocks that it sees in order with an online softmax. So its result depends on
// its own position and the cache alone: a prompt in pieces gives the bits of a prompt at once.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

inline F32x16 decode_kv(int64_t code, const uint8_t* p, int64_t i, const float* params) {
  switch (code) {
    case 0:
      return Simd::load(reinterpret_cast<const float*>(p) + i);
    case 1:
      return load_bf16(p + 2 * i);
    case 2:
      return Simd::mul(Simd::to_float(Simd::load_s8(p + i)), Simd::set(params[0]));
    default:
      return Simd::fma(Simd::to_float(Simd::load_u4(p + i / 2)), Simd::set(params[0]),
                       Simd::set(params[1]));
  }
}

/// One token's keys or values as f32, padded with zeros to a multiple of 16.
template <int kCode>
void decode_kv_row(const KvLayout& kv, const uint8_t* row, const float* params, float* out) {
  in_vectors(kv.head_dim, [&](int64_t i, int64_t lanes) {
    if (lanes == 16) {
      Simd::store(out + i, decode_kv(kCode, row, i, params));
      return;
    }
    uint8_t bytes[64] = {};  // head_dim is a multiple of 8: half a vector is left
    const int64_t start = i * kv.row_bytes / kv.head_dim;
    __builtin_memcpy(bytes, row + start, static_cast<size_t>(kv.row_bytes - start));
    float values[16];
    Simd::store(values, decode_kv(kCode, bytes, 0, params));
    for (int64_t j = 0; j < 16; ++j) {
      out[i + j] = j < lanes ? values[j] : 0.0F;
    }
  });
}

/// Keys and values of positions first .. last-1 of the block.
template <int kCode>
void decode_kv_block(
    const AttentionTask& task, int64_t block, int64_t first, int64_t last, int64_t padded_dim) {
  const KvLayout& kv = task.kv;
  float* keys = task.scratch;
  float* values = keys + kKeyBlock * padded_dim;
  for (int64_t t = first; t < last; ++t) {
    const int64_t slot = t % kv.page_size;
    const uint8_t* head = kv.pages + task.page_list[t / kv.page_size] * kv.page_bytes +
                          task.kv_head * 2 * kv.half_bytes;
    const int64_t row = slot * kv.row_bytes;
    const int64_t params = kv.params_offset + slot * kv.row_params * 4;
    const int64_t index = (t - block) * padded_dim;
    decode_kv_row<kCode>(kv, head + row, reinterpret_cast<const float*>(head + params),
                         keys + index);
    head += kv.half_bytes;
    decode_kv_row<kCode>(kv, head + row, reinterpret_cast<const float*>(head + params),
                         values + index);
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

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <int kCode>
void attention_of(const AttentionTask& task) {
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
    const float* source = task.q + r / task.group * task.q_stride + r % task.group * dim;
    for (int64_t d = 0; d < padded_dim; d += 16) {
      Simd::store(q + r * padded_dim + d, load_lanes(source + d, smaller(16, dim - d)));
      Simd::store(acc + r * padded_dim + d, Simd::set(0.0F));
    }
    top[r] = -__builtin_inff();
    denominator[r] = 0.0F;
  }
  const int64_t window = task.window;
  const auto first_key = [&](int64_t position) {
    return window > 0 ? larger(0, position - window + 1) : 0;
  };
  const int64_t first = first_key(task.first_position);
  const int64_t end = task.first_position + task.tokens;
  for (int64_t block = first / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) {
    decode_kv_block<kCode>(task, block, larger(first, block), smaller(end, block + kKeyBlock),
                           padded_dim);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first_position + r / task.group;
      const int64_t begin = larger(first_key(position), block) - block;
      const int64_t last = smaller(position + 1, block + kKeyBlock) - block;
      if (begin < last) {
        const QueryRow row{q + r * padded_dim, acc + r * padded_dim, top + r, denominator + r};
        attend_block(keys, values, padded_dim, begin, last, task.scale, row);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* out = task.out + r / task.group * task.out_stride + r % task.group * dim;
    in_vectors(dim, [&](int64_t i, int64_t lanes) {
      const F32x16 sum = Simd::load(acc + r * padded_dim + i);
      store_lanes(out + i, lanes, Simd::div(sum, Simd::set(denominator[r])));
    });
  }
}

void attention(const AttentionTask& task) {
  switch (task.kv.code) {
    case 0:
      return attention_of<0>(task);
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
