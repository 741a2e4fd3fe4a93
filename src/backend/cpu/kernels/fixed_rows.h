#pragma once

// Rows of activations in fixed point (FixedRow).

#include "backend/cpu/kernels/common.h"
#include "ops/attention_form.h"

namespace nibble::cpu {
namespace {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kNanBits = 0x7fc00000;
constexpr int32_t kExponentStep = 1 << 23;
constexpr float kLeastTop = 0x1p-100F;    // units are at least 2^-13 of this
constexpr float kInfiniteTop = 0x1p104F;  // from here on numbers count as infinite
constexpr int64_t kGroupsAtOnce = 16;

/// Lane i: the largest lane of v[i].
[[gnu::always_inline]] inline I32x16 max_of_each(I32x16 (&v)[16]) {
#pragma GCC unroll 4
  for (int count = 8; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const F32x16 a = Simd::from_bits(v[2 * i]);
      const F32x16 b = Simd::from_bits(v[2 * i + 1]);
      v[i] = Simd::max_int(Simd::bits(Simd::evens(a, b)), Simd::bits(Simd::odds(a, b)));
    }
  }
  return v[0];
}

/// The units of groups with these largest magnitudes.
[[gnu::always_inline]] inline F32x16 units_by_largest(F32x16 largest) {
  const F32x16 top = nearest_bf16(largest);
  const I32x16 power =
      Simd::and_int(Simd::bits(Simd::max(top, Simd::set(kLeastTop))), Simd::set_int(kInfinityBits));
  const F32x16 unit = Simd::from_bits(Simd::sub_int(power, Simd::set_int(13 * kExponentStep)));
  const F32x16 nan = Simd::from_bits(Simd::set_int(kNanBits));
  return Simd::select_less(top, Simd::set(kInfiniteTop), unit, nan);
}

/// The units of 16 groups, the first of which begins at `column`; of fewer at the row's end.
template <Element kType>
inline F32x16 units_of(const FixedRow& row, int64_t column) {
  const ConstNumbers x{row.x.data, kType};
  I32x16 largest[kGroupsAtOnce];
  for (I32x16& of_group : largest) {
    of_group = Simd::set_int(0);
    for (int64_t end = column + row.group_size; column < row.k && column < end; column += 16) {
      const I32x16 bits = Simd::bits(load_numbers(x, column, 16));
      of_group = Simd::max_int(of_group, Simd::and_int(bits, Simd::set_int(kMagnitude)));
    }
  }
  return units_by_largest(Simd::from_bits(max_of_each(largest)));
}

/// body(first column, unit) for every group.
template <Element kType, typename Body>
[[gnu::always_inline]] inline void in_groups(const FixedRow& row, const Body& body) {
  int64_t column = 0;
  while (column < row.k) {
    float units[kGroupsAtOnce];
    Simd::store(units, units_of<kType>(row, column));
    for (const float unit : units) {
      if (column < row.k) {
        body(column, unit);
        column += row.group_size;
      }
    }
  }
}

/// 16 values as BF16; anything where they are not numbers.
template <Element kType>
[[gnu::always_inline]] inline F32x16 load_as_bf16(ConstNumbers x, int64_t column) {
  const F32x16 v = load_numbers({x.data, kType}, column, 16);
  return kType == Element::kBf16 ? v : number_as_bf16(v);
}

template <Element kType>
void round_fixed(const FixedRow& row) {
  uint8_t* groups = row.out + 2 * row.k;
  in_groups<kType>(
      row, [&](int64_t first, float unit) __attribute__((always_inline)) {
        const F32x16 factor = Simd::set(1.0F / unit);
        I32x16 bias = Simd::set_int(0);
        for (int64_t i = first; i < first + row.group_size; i += 16) {
          const I32x16 codes = Simd::to_int(Simd::mul(load_as_bf16<kType>(row.x, i), factor));
          bias = Simd::sub_int(bias, Simd::shift_left<3>(codes));
          Simd::store_s16(row.out + 2 * i, codes);
        }
        const FixedGroup result{unit, Simd::reduce_add_int(bias)};
        __builtin_memcpy(groups, &result, sizeof result);
        groups += sizeof result;
      });
}

inline void round_fixed(const FixedRow& row) {
  return row.x.type == Element::kF32 ? round_fixed<Element::kF32>(row)
                                     : round_fixed<Element::kBf16>(row);
}

}  // namespace
}  // namespace nibble::cpu
