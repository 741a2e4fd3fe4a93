#pragma once

// Queries as attention multiplies them; see attention_kernels.h.

#include "backend/cpu/kernels/attention_rows.h"
#include "ops/attention_form.h"

namespace nibble::cpu {
namespace {

// Queries that meet codes are INT8 codes themselves, so that their products are exact in integers;
// what they lose is what an INT8 cache loses of a key.
constexpr float kMostQueryCode = 127.0F;
constexpr float kLargestQuery = 0x1p100F;
constexpr float kLeastLargestQuery = 0x1p-100F;

/// Elements d .. d + 15 of query row r as BF16 numbers, 0 past its end.
inline F32x16 query_dims(const AttentionTask& task, int64_t r, int64_t d) {
  const int64_t dim = task.kv.head_dim;
  const int64_t source = r / task.group * task.q_stride + r % task.group * dim;
  return nearest_bf16(load_numbers(task.q, source + d, larger(0, smaller(16, dim - d))));
}

/// Query row r, padded with zeros to `width`.
inline void load_query(const AttentionTask& task, int64_t r, int64_t width, float* q) {
  for (int64_t d = 0; d < width; d += 16) {
    Simd::store(q + d, query_dims(task, r, d));
  }
}

/// A query row as codes of -127 to 127.
struct QueryCodes {
  int32_t codes[kMaxHeadDim] = {};  // 0 past head_dim
  float unit = __builtin_nanf("");  // stays NaN for rows that are not finite; their codes are 0
  int32_t sum = 0;                  // of all codes

  QueryCodes(const AttentionTask& task, int64_t r) {
    const int64_t dim = task.kv.head_dim;
    F32x16 largest = Simd::set(kLeastLargestQuery);
    F32x16 spoiled = Simd::set(0.0F);  // NaN where an element is not finite
    for (int64_t d = 0; d < dim; d += 16) {
      const F32x16 q = query_dims(task, r, d);
      largest = Simd::max(largest, magnitude(q));
      spoiled = Simd::fma(q, Simd::set(0.0F), spoiled);
    }
    const float most = Simd::reduce_max(largest);
    if (Simd::reduce_add(spoiled) != 0.0F || most >= kLargestQuery) {
      return;
    }
    unit = most / kMostQueryCode;
    const F32x16 inverse = Simd::set(kMostQueryCode / most);
    for (int64_t d = 0; d < dim; d += 16) {
      const I32x16 rounded = Simd::to_int(Simd::mul(query_dims(task, r, d), inverse));
      Simd::store_int(codes + d, rounded);
      sum += Simd::reduce_add_int(rounded);
    }
  }
};

/// Codes as pairs of 16-bit integers, in the order of key_pairs. Elements d and d + kApart of every
/// 2 kApart go to one pair.
template <int64_t kApart>
void pair_queries(const int32_t* codes, int64_t dim, int32_t* pairs) {
  for (int64_t d = 0; d < dim; d += 2 * kApart) {
    for (int64_t i = d; i < d + kApart; ++i) {
      *pairs++ = (codes[i] & 0xffff) | codes[i + kApart] * 0x10000;
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
