#pragma once

// Queries as attention multiplies them; see attention_kernels.h.

#include "backend/cpu/kernels/attention_rows.h"
#include "ops/attention_form.h"

namespace nibble::cpu {
namespace {

// Of queries that meet codes, BF16 numbers: their magnitudes sum to less than 2^17 units, and none
// has 2^14 or more. So multiples of the unit are 16-bit integers, and as rounding adds 1/2 at most,
// products with codes of up to 127 sum to less than 127 (2^17 + 512 / 2) < 2^24 units: exactly, in
// any order, in F32 and in integers. Elements whose last place is below the unit have fewer bits
// once rounded: all stay BF16 numbers.
constexpr int32_t kSumPlaces = 16;
constexpr int32_t kLargestPlaces = 13;
constexpr float kLargestQuerySum = 0x1p100F;
constexpr int32_t kLeastUnitPower = 127 - 100;  // biased, as in a number's bits

/// The power of two whose multiples a row's elements become; NaN for rows that are not finite.
inline float query_unit(const float* q, int64_t width) {
  F32x16 sum = Simd::set(0.0F);
  F32x16 largest = Simd::set(0.0F);
  for (int64_t d = 0; d < width; d += 16) {
    const I32x16 bits = Simd::bits(Simd::load(q + d));
    const F32x16 magnitude = Simd::from_bits(Simd::and_int(bits, Simd::set_int(0x7fffffff)));
    sum = Simd::add(sum, magnitude);
    largest = Simd::max(largest, magnitude);
  }
  const float total = Simd::reduce_add(sum);
  if (!(total < kLargestQuerySum)) {
    return __builtin_nanf("");
  }
  const auto power_of = [](float x) { return __builtin_bit_cast(int32_t, x) >> 23; };
  const int64_t places =
      larger(power_of(total) - kSumPlaces, power_of(Simd::reduce_max(largest)) - kLargestPlaces);
  const auto power = static_cast<int32_t>(larger(places, kLeastUnitPower));
  return __builtin_bit_cast(float, power << 23);
}

/// Query row r, padded with zeros to `width`, as BF16 numbers; those that meet codes are multiples
/// of the unit that is returned.
inline float load_query(const AttentionTask& task, int64_t r, int64_t width, float* q) {
  const int64_t dim = task.kv.head_dim;
  const int64_t source = r / task.group * task.q_stride + r % task.group * dim;
  for (int64_t d = 0; d < width; d += 16) {
    const F32x16 x = load_numbers(task.q, source + d, larger(0, smaller(16, dim - d)));
    Simd::store(q + d, nearest_bf16(x));
  }
  if (task.kv.code == 1) {
    return 1.0F;
  }
  const float unit = query_unit(q, width);
  const F32x16 shift = Simd::set(rounding_shift(0) * unit);
  for (int64_t d = 0; d < width; d += 16) {
    Simd::store(q + d, Simd::sub(Simd::add(Simd::load(q + d), shift), shift));
  }
  return unit;
}

inline float sum_of(const float* q, int64_t width) {
  F32x16 sum = Simd::set(0.0F);
  for (int64_t d = 0; d < width; d += 16) {
    sum = Simd::add(sum, Simd::load(q + d));
  }
  return Simd::reduce_add(sum);
}

/// Multiples of a unit as pairs of 16-bit integers, in the order of key_pairs. Elements d and
/// d + kApart of every 2 kApart go to one pair.
template <int64_t kApart>
void pair_queries(const float* q, int64_t dim, float unit, int32_t* pairs) {
  int32_t codes[kMaxHeadDim];
  for (int64_t d = 0; d < dim; d += 16) {
    Simd::store_int(codes + d, Simd::to_int(Simd::mul(Simd::load(q + d), Simd::set(1.0F / unit))));
  }
  for (int64_t d = 0; d < dim; d += 2 * kApart) {
    for (int64_t i = d; i < d + kApart; ++i) {
      *pairs++ = (codes[i] & 0xffff) | codes[i + kApart] * 0x10000;
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
