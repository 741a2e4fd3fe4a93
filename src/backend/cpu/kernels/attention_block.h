#pragma once

// A block of keys and values as BF16 numbers or codes, and its products with one row; see
// attention_kernels.h.

#include "backend/cpu/kernels/attention_f32.h"

namespace nibble::cpu {
namespace {

constexpr float kMiddleCode = 7.5F;
constexpr int64_t kDotVectors = Simd::kRows >= 8 ? 4 : 2;  // as many sums as registers hold

/// A block of keys and values in scratch, and the parameters of each key.
struct KeyBlock {
  float* keys;         // [head_dim padded to 32][kKeyBlock]
  float* values;       // [kKeyBlock][head_dim padded to 16]
  float* score_scale;  // all [kKeyBlock]
  float* score_offset;
  float* value_scale;
  float* value_offset;
};

struct QueryRows {
  float* q;        // [rows][head_dim padded to 32], BF16 numbers
  float* q_sum;    // [rows]
  float* sums;     // [rows][16]: weights by lane
  float* offsets;  // [rows][16]: weights times value_offset by lane
  float* shift;    // [rows]: kExponentBase - top
};

template <int kCode>
F32x16 load_codes(const uint8_t* row, int64_t i) {
  if constexpr (kCode == 1) {
    return load_bf16(row + 2 * i);
  } else if constexpr (kCode == 2) {
    return Simd::to_float(Simd::load_s8(row + i));
  } else {
    return Simd::sub(Simd::to_float(Simd::load_u4(row + i / 2)), Simd::set(kMiddleCode));
  }
}

/// Codes i .. i+15 of a row, 0 past its end.
template <int kCode>
F32x16 row_codes(const KvLayout& kv, const uint8_t* row, int64_t i) {
  if (i + 16 <= kv.head_dim) {
    return load_codes<kCode>(row, i);
  }
  uint8_t bytes[64] = {};  // head_dim is a multiple of 8: half a vector is left
  const int64_t start = i * kv.row_bytes / kv.head_dim;
  __builtin_memcpy(bytes, row + start, static_cast<size_t>(kv.row_bytes - start));
  float values[16];
  Simd::store(values, load_codes<kCode>(bytes, 0));
  return load_some(values, kv.head_dim - i);
}

inline bool is_finite(float x) { return x - x == 0.0F; }

/// A value that is not finite must not reach rows that do not see it, as 0 * NaN would: its row
/// becomes 0 and its score NaN, which spoils just those that see it.
template <int kCode>
void load_params(const KvRow& key, const KvRow& value, float scale, int64_t j, KeyBlock& block) {
  if constexpr (kCode == 1) {
    block.score_scale[j] = scale;
    return;
  }
  float value_scale = value.params[0];
  float value_offset = 0.0F;
  block.score_scale[j] = key.params[0] * scale;
  if constexpr (kCode == 3) {
    block.score_offset[j] = __builtin_fmaf(kMiddleCode, key.params[0], key.params[1]) * scale;
    value_offset = __builtin_fmaf(kMiddleCode, value_scale, value.params[1]);
  }
  if (!is_finite(value_scale) || !is_finite(value_offset)) {
    value_scale = 0.0F;
    value_offset = 0.0F;
    block.score_scale[j] = __builtin_nanf("");
  }
  block.value_scale[j] = value_scale;
  block.value_offset[j] = value_offset;
}

/// Fills keys `begin` (a multiple of 16) .. begin+15 of the block; those outside first .. last-1
/// become zeros.
template <int kCode>
void load_keys(const AttentionTask& task,
               const KvRows& rows,
               const int64_t (&range)[2],
               int64_t begin,
               KeyBlock& block) {
  const int64_t dim = task.kv.head_dim;
  const int64_t padded_dim = round_up(dim, 16);
  const float scale = task.scale * kLog2E;
  for (int64_t j = begin; j < begin + 16; ++j) {
    if (j >= range[0] && j < range[1]) {
      load_params<kCode>(rows.keys[j - range[0]], rows.values[j - range[0]], scale, j, block);
    } else {
      block.score_scale[j] = block.score_offset[j] = 0.0F;
      block.value_scale[j] = block.value_offset[j] = 0.0F;
    }
  }
  for (int64_t d = 0; d < padded_dim; d += 16) {
    F32x16 keys[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t j = begin + i;
      const bool exists = j >= range[0] && j < range[1];
      const F32x16 zero = Simd::set(0.0F);
      keys[i] = exists ? row_codes<kCode>(task.kv, rows.keys[j - range[0]].codes, d) : zero;
      const F32x16 values =
          exists ? row_codes<kCode>(task.kv, rows.values[j - range[0]].codes, d) : zero;
      Simd::store(block.values + j * padded_dim + d, values);
    }
    Simd::transpose(keys);
    for (int64_t i = 0; i < 16; ++i) {
      Simd::store(block.keys + (d + i) * kKeyBlock + begin, keys[i]);
    }
  }
}

/// Values that are not finite, see load_params, where some rows do not see all keys.
inline void contain_values(int64_t dim, const int64_t (&range)[2], KeyBlock& block) {
  const int64_t padded_dim = round_up(dim, 16);
  for (int64_t j = range[0]; j < range[1]; ++j) {
    float* values = block.values + j * padded_dim;
    F32x16 sum = Simd::set(0.0F);
    for (int64_t d = 0; d < padded_dim; d += 16) {
      sum = Simd::fma(Simd::load(values + d), Simd::set(0.0F), sum);
    }
    if (!is_finite(Simd::reduce_add(sum))) {
      __builtin_memset(values, 0, static_cast<size_t>(padded_dim) * 4);
      block.score_scale[j] = __builtin_nanf("");
    }
  }
}

/// Scores of keys j .. j + 16 kDotVectors - 1 before scaling.
inline void dot_keys(const float* q, const float* keys, int64_t dim, float* scores) {
  F32x16 total[kDotVectors];
  for (int64_t i = 0; i < kDotVectors; ++i) {
    total[i] = Simd::set(0.0F);
  }
  for (int64_t begin = 0; begin < dim; begin += kDotBlock) {
    F32x16 even[kDotVectors];
    F32x16 odd[kDotVectors];
    for (int64_t i = 0; i < kDotVectors; ++i) {
      even[i] = odd[i] = Simd::set(0.0F);
    }
    for (int64_t d = begin; d < begin + kDotBlock; d += 2) {
      const F32x16 a = Simd::set(q[d]);
      const F32x16 b = Simd::set(q[d + 1]);
      for (int64_t i = 0; i < kDotVectors; ++i) {
        even[i] = Simd::fma(a, Simd::load(keys + d * kKeyBlock + 16 * i), even[i]);
        odd[i] = Simd::fma(b, Simd::load(keys + (d + 1) * kKeyBlock + 16 * i), odd[i]);
      }
    }
    for (int64_t i = 0; i < kDotVectors; ++i) {
      total[i] = Simd::add(total[i], Simd::add(even[i], odd[i]));
    }
  }
  for (int64_t i = 0; i < kDotVectors; ++i) {
    Simd::store(scores + 16 * i, total[i]);
  }
}

/// acc += weights · values over 32 keys, for kCount vectors of dimensions.
template <int64_t kCount>
void add_values(const float* weights, const float* values, int64_t stride, float* acc) {
  F32x16 even[kCount];
  F32x16 odd[kCount];
  for (int64_t i = 0; i < kCount; ++i) {
    even[i] = odd[i] = Simd::set(0.0F);
  }
  for (int64_t j = 0; j < kDotBlock; j += 2) {
    const F32x16 a = Simd::set(weights[j]);
    const F32x16 b = Simd::set(weights[j + 1]);
    for (int64_t i = 0; i < kCount; ++i) {
      even[i] = Simd::fma(a, Simd::load(values + j * stride + 16 * i), even[i]);
      odd[i] = Simd::fma(b, Simd::load(values + (j + 1) * stride + 16 * i), odd[i]);
    }
  }
  for (int64_t i = 0; i < kCount; ++i) {
    Simd::store(acc + 16 * i, Simd::add(Simd::load(acc + 16 * i), Simd::add(even[i], odd[i])));
  }
}

}  // namespace
}  // namespace nibble::cpu
