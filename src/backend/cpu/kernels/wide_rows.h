#pragma once

// Rows of activations in blocks of 8 and 16 bits, to the bit of round_wide_blocks() in
// quant/block_rounding.h. Needs one simd_*.h included before.

#include "backend/cpu/kernels/block_rows.h"

namespace nibble::cpu {
namespace {

/// A block of 16 bits at `out`; its unit, and the bias of its codes.
template <Element kType>
[[gnu::always_inline]] inline FixedGroup round_wide_block(const BlocksRow& row,
                                                          int64_t block,
                                                          uint8_t* out) {
  const int32_t largest = Simd::reduce_max_int(largest_bits<kType>(row, block));
  float units[16];
  Simd::store(units, units_by_largest(Simd::from_bits(Simd::set_int(largest))));
  const F32x16 factor = Simd::set(1.0F / units[0]);
  I32x16 bias = Simd::set_int(0);
  const auto code = [&](int64_t i) __attribute__((always_inline)) {
    const I32x16 codes = Simd::to_int(Simd::mul(load_as_bf16<kType>(row.x, i), factor));
    bias = Simd::sub_int(bias, Simd::shift_left<3>(codes));
    return Simd::from_bits(codes);
  };
  for (int64_t i = block * row.block; i < (block + 1) * row.block; i += 32) {
    const F32x16 first = code(i);
    const F32x16 second = code(i + 16);
    Simd::store_s16(out, Simd::bits(Simd::evens(first, second)));
    Simd::store_s16(out + 32, Simd::bits(Simd::odds(first, second)));
    out += 64;
  }
  return {units[0], Simd::reduce_add_int(bias)};
}

template <Element kType>
void quantize_wide_blocks(const WideBlocksRow& row) {
  const int64_t blocks = row.k / row.block;
  BlocksRow narrow{.x = row.x, .k = row.k, .block = row.block};
  I32x16 magnitudes = Simd::set_int(0);
  for (int64_t b = 0; b < blocks; ++b) {
    if (row.bits[b] == 8) {
      magnitudes = Simd::max_int(magnitudes, largest_bits<kType>(narrow, b));
    }
  }
  const F32x16 largest = Simd::from_bits(Simd::set_int(Simd::reduce_max_int(magnitudes)));
  constexpr uint8_t kBits[1] = {8};
  const BlockFactors how = block_factors(largest, kBits, 1, 1.0F);
  I32x16 sum = Simd::set_int(0);
  FixedGroup* group = row.groups + 1;
  uint8_t* out = row.out;
  for (int64_t b = 0; b < blocks; ++b) {
    if (row.bits[b] == 8) {
      narrow.out = out - b * row.block;
      sum = Simd::add_int(sum, store_block<kType>(narrow, b, {how.factor[0], how.top[0]}));
      out += row.block;
    } else {
      *group++ = round_wide_block<kType>(narrow, b, out);
      out += 2 * row.block;
    }
  }
  row.groups[0] = {how.scale[0], -8 * Simd::reduce_add_int(sum)};
}

inline void quantize_wide_blocks(const WideBlocksRow& row) {
  return row.x.type == Element::kF32 ? quantize_wide_blocks<Element::kF32>(row)
                                     : quantize_wide_blocks<Element::kBf16>(row);
}

}  // namespace
}  // namespace nibble::cpu
