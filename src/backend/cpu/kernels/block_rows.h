#pragma once

// Rows of activations in blocks of 4 and 8 bits, to the bit of round_blocks() in
// quant/block_rounding.h. Needs one simd_*.h included before.

#include "backend/cpu/kernels/fixed_rows.h"

namespace nibble::cpu {
namespace {

/// What the numbers of up to 16 blocks are multiplied with, and what their codes count.
struct BlockFactors {
  float top[kGroupsAtOnce];
  float factor[kGroupsAtOnce];
  float scale[kGroupsAtOnce];
};

/// Of blocks with these largest magnitudes and bits.
inline BlockFactors block_factors(F32x16 largest, const uint8_t* bits, int64_t count, float clip) {
  BlockFactors factors;
  float part[kGroupsAtOnce];
  for (int64_t i = 0; i < kGroupsAtOnce; ++i) {
    const bool four = i < count && bits[i] == 4;
    factors.top[i] = four ? 7.0F : 127.0F;
    part[i] = four ? clip : 1.0F;
  }
  const F32x16 infinity = Simd::set(__builtin_inff());
  const F32x16 nan = Simd::from_bits(Simd::set_int(kNanBits));
  const F32x16 finite = Simd::select_less(largest, infinity, largest, nan);
  const F32x16 span = Simd::mul(finite, Simd::load(part));
  const F32x16 top = Simd::load(factors.top);
  const F32x16 factor = Simd::div(top, span);
  Simd::store(factors.factor, Simd::select_less(factor, infinity, factor, Simd::set(0.0F)));
  Simd::store(factors.scale, Simd::div(span, top));
  return factors;
}

template <Element kType>
[[gnu::always_inline]] inline I32x16 largest_bits(const BlocksRow& row, int64_t block) {
  const ConstNumbers x{row.x.data, kType};
  I32x16 largest = Simd::set_int(0);
  for (int64_t i = block * row.block; i < (block + 1) * row.block; i += 16) {
    const I32x16 bits = Simd::bits(load_numbers(x, i, 16));
    largest = Simd::max_int(largest, Simd::and_int(bits, Simd::set_int(kMagnitude)));
  }
  return largest;
}

/// The largest magnitudes of 16 blocks from `first` on; of fewer at the row's end.
template <Element kType>
inline F32x16 largest_of_blocks(const BlocksRow& row, int64_t first) {
  I32x16 largest[kGroupsAtOnce];
  for (int64_t i = 0; i < kGroupsAtOnce; ++i) {
    const bool there = (first + i) * row.block < row.k;
    largest[i] = there ? largest_bits<kType>(row, first + i) : Simd::set_int(0);
  }
  return Simd::from_bits(max_of_each(largest));
}

/// What numbers become: x * factor, to the nearest within -top .. top, times step.
struct CodeRule {
  float factor;
  float top;
  float step = 1.0F;  // another one only where kSteps says so
};

/// Where the code of column i lies.
inline uint8_t* code_place(const BlocksRow& row, int64_t i) {
  const int64_t piece = i / 64;
  return row.out + piece / kSlabPieces * row.slab_stride + piece % kSlabPieces * row.piece_stride +
         i % 64;
}

/// Codes of a block; the sum of them.
template <Element kType, bool kSteps = false>
[[gnu::always_inline]] inline I32x16 store_block(const BlocksRow& row,
                                                 int64_t block,
                                                 const CodeRule& rule) {
  const ConstNumbers x{row.x.data, kType};
  const F32x16 by = Simd::set(rule.factor);
  const F32x16 most = Simd::set(rule.top);
  const F32x16 least = Simd::set(-rule.top);
  I32x16 sum = Simd::set_int(0);
  const auto code = [&](int64_t i) __attribute__((always_inline)) {
    const F32x16 scaled = Simd::mul(load_numbers(x, i, 16), by);
    I32x16 q = Simd::to_int(Simd::max(least, Simd::min(most, scaled)));
    if constexpr (kSteps) {
      q = Simd::to_int(Simd::mul(Simd::to_float(q), Simd::set(rule.step)));
    }
    sum = Simd::add_int(sum, q);
    return q;
  };
  for (int64_t i = block * row.block; i < (block + 1) * row.block;) {
    uint8_t* out = code_place(row, i);
    if (row.block == 32) {
      Simd::store_u8(out, code(i));
      Simd::store_u8(out + 16, code(i + 16));
      i += 32;
      continue;
    }
    I32x16 q[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      q[j] = code(i + 16 * j);
    }
    Simd::store_bytes(out, q, 0);
    i += 64;
  }
  return sum;
}

template <Element kType>
void quantize_blocks(const BlocksRow& row) {
  const int64_t blocks = row.k / row.block;
  for (int64_t first = 0; first < blocks; first += kGroupsAtOnce) {
    const int64_t left = blocks - first;
    const int64_t count = left < kGroupsAtOnce ? left : kGroupsAtOnce;
    const BlockFactors how =
        block_factors(largest_of_blocks<kType>(row, first), row.bits + first, count, row.clip);
    for (int64_t i = 0; i < count; ++i) {
      const I32x16 sum = store_block<kType>(row, first + i, {how.factor[i], how.top[i]});
      if (row.scales != nullptr) {
        row.scales[(first + i) * 16] = how.scale[i];
      } else {
        row.groups[first + i] = {how.scale[i], -8 * Simd::reduce_add_int(sum)};
      }
    }
  }
}

inline void quantize_blocks(const BlocksRow& row) {
  return row.x.type == Element::kF32 ? quantize_blocks<Element::kF32>(row)
                                     : quantize_blocks<Element::kBf16>(row);
}

/// How rows with one scale become codes, of blocks of 4 and of 8 bits: class_codes().
struct ClassRules {
  CodeRule of[2];
  float scale;
};

/// By the largest magnitudes of both.
inline ClassRules class_rules(const float (&largest)[2], float clip) {
  constexpr float kInfinity = __builtin_inff();
  constexpr float kTops[2] = {7.0F, 127.0F};
  constexpr float kFinest = 16.0F;
  const float spans[2] = {clip * largest[0], largest[1]};
  const auto factor_of = [&](int i) {
    const float factor = kTops[i] / spans[i];
    return factor < kInfinity ? factor : 0.0F;
  };
  const float four = spans[0] / kTops[0];
  const float eight = spans[1] / kTops[1];
  if (!(largest[0] < kInfinity && largest[1] < kInfinity)) {
    return {{{0.0F, kTops[0]}, {0.0F, kTops[1]}}, __builtin_nanf("")};
  }
  if (eight > four) {
    return {{{factor_of(1), kTops[0]}, {factor_of(1), kTops[1]}}, eight};
  }
  float step = largest[1] > 0.0F ? kFinest : 1.0F;
  while (step > 1.0F && four * (1.0F / step) < eight) {
    step *= 0.5F;
  }
  const float factor8 = factor_of(0) * step;
  return {{{factor_of(0), kTops[0], step}, {factor8 < kInfinity ? factor8 : 0.0F, kTops[1]}},
          four * (1.0F / step)};
}

/// Zeros behind the codes, as far as the last piece goes.
inline void pad_piece(const BlocksRow& row) {
  for (int64_t i = row.k; i % 64 != 0; ++i) {
    *code_place(row, i) = 0;
  }
}

template <Element kType>
Int8RowResult quantize_classes(const BlocksRow& row) {
  const int64_t blocks = row.k / row.block;
  const auto class_of = [&](int64_t b) { return row.bits[b] == 4 ? 0 : 1; };
  I32x16 of_class[2] = {Simd::set_int(0), Simd::set_int(0)};
  for (int64_t b = 0; b < blocks; ++b) {
    I32x16& largest = of_class[class_of(b)];
    largest = Simd::max_int(largest, largest_bits<kType>(row, b));
  }
  const ClassRules rules =
      class_rules({__builtin_bit_cast(float, Simd::reduce_max_int(of_class[0])),
                   __builtin_bit_cast(float, Simd::reduce_max_int(of_class[1]))},
                  row.clip);
  I32x16 sum = Simd::set_int(0);
  for (int64_t b = 0; b < blocks; ++b) {
    const CodeRule& rule = rules.of[class_of(b)];
    sum = Simd::add_int(sum, store_block<kType, true>(row, b, rule));
  }
  pad_piece(row);
  return {rules.scale, Simd::reduce_add_int(sum)};
}

inline Int8RowResult quantize_classes(const BlocksRow& row) {
  return row.x.type == Element::kF32 ? quantize_classes<Element::kF32>(row)
                                     : quantize_classes<Element::kBf16>(row);
}

}  // namespace
}  // namespace nibble::cpu
