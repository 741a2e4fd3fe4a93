#pragma once

#include <cstdint>

#include "quant/block_precision.h"

namespace nibble {

/// What the numbers of one scale become, by their largest magnitude.
struct BlockCodes {
  float top = 127.0F;   // largest code
  float factor = 0.0F;  // code = x * factor, to the nearest, ties to even, within -top .. top
  float scale = 0.0F;   // NaN where a number was not finite; its codes then mean nothing
};

/// `bits` of 4 or 8. Numbers of 0, and those so small that their factor is infinite, have codes
/// of 0. F32 throughout: span = clip * largest (8 bits: largest), scale = span / top, factor =
/// top / span.
///   largest  NaN when a number is not finite
[[nodiscard]] BlockCodes block_codes(int bits, float clip, float largest);

/// Blocks of 4 bits count at most 2^kMostClassShift of the scale that those of 8 count, so that
/// their codes, 7 * 2^4 at most, are bytes.
inline constexpr int kMostClassShift = 4;

/// What the numbers of a row become that has one scale for blocks of 4 and of 8 bits
/// (BlockScales::kClass).
struct ClassCodes {
  float factor4 = 0.0F;  // code = x * factor4, rounded within -7 .. 7, times 2^shift
  float factor8 = 0.0F;  // code = x * factor8, rounded within -127 .. 127
  int shift = 0;         // 0 .. kMostClassShift
  float scale = 0.0F;    // of both; NaN where a number was not finite; its codes then mean nothing
};

/// By the largest magnitudes of all blocks of 4 and of all of 8 bits, 0 without such, each NaN when
/// a number is not finite. F32 throughout, s4 and s8 what block_codes() gives each alone:
///   largest8 is 0  scale = s4
///   s8 > s4        scale = s8, and both have the factor of 8 bits
///   otherwise      scale = s4 * 2^-shift with the largest shift for which it is at least s8, and
///                  factor8 = factor4 * 2^shift, 0 where that is infinite
[[nodiscard]] ClassCodes class_codes(float clip, float largest4, float largest8);
/// Those of a row [blocks.k()].
[[nodiscard]] ClassCodes class_codes(const BlockPrecision& blocks, const float* x);

/// The only definition of how rows become codes; devices give the same bits.
///   x       [blocks.k()], in the order of the weights' columns
///   codes   [blocks.k()] of -7..7 or -127..127, of kClass -112..112 in blocks of 4 bits; 0 where
///           the scale is NaN
///   scales  [scale_count(blocks, scales)]
struct RoundedBlocks {
  int8_t* codes = nullptr;
  float* scales = nullptr;
};
void round_blocks(const BlockPrecision& blocks,
                  BlockScales form,
                  const float* x,
                  const RoundedBlocks& out);

/// What one code of a block in BF16 counts, by the block's largest magnitude: BF16 numbers become
/// multiples of 2^-13 of the power of two in it, or of 2^-113 where that is more, which are codes
/// of at most 2^14. NaN from 2^104 on, and where a number was not finite.
[[nodiscard]] float fixed_unit(float largest);

/// The same of rows of kBf16Blocks: all blocks of 8 bits become codes as above by their largest
/// magnitude, those of 16 bits are rounded to BF16 and then to multiples of fixed_unit(), to the
/// nearest, ties to even.
///   codes   [blocks.k()] of -127..127, in blocks of 16 bits -2^14..2^14; 0 where the scale is NaN
///   scales  [scale_count(blocks, BlockScales::kWide)]
struct RoundedWideBlocks {
  int16_t* codes = nullptr;
  float* scales = nullptr;
};
void round_wide_blocks(const BlockPrecision& blocks, const float* x, const RoundedWideBlocks& out);

}  // namespace nibble
