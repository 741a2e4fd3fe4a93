#include "quant/block_rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/f16.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr float kTopOf4Bits = 7.0F;
constexpr float kTopOf8Bits = 127.0F;

/// NaN when one is not finite.
float largest_magnitude(const float* x, int64_t count) {
  float largest = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x[i])) {
      return std::numeric_limits<float>::quiet_NaN();
    }
    largest = std::max(largest, std::fabs(x[i]));
  }
  return largest;
}

/// The larger one; NaN stays.
float larger(float a, float b) { return std::isnan(a) || a > b ? a : b; }

template <typename Code>
void round_block(const BlockCodes& how, const float* x, int64_t count, Code* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float code = std::isnan(how.scale) ? 0.0F : x[i] * how.factor;
    codes[i] = static_cast<Code>(round_half_even(std::clamp(code, -how.top, how.top)));
  }
}

/// Of a block in BF16; its unit.
float round_fixed(const float* x, int64_t count, int16_t* codes) {
  const float unit = fixed_unit(largest_magnitude(x, count));
  for (int64_t i = 0; i < count; ++i) {
    const float code = std::isnan(unit) ? 0.0F : bf16_to_f32(f32_to_bf16(x[i])) / unit;
    codes[i] = static_cast<int16_t>(round_half_even(code));
  }
  return unit;
}

void round_each(const BlockPrecision& blocks, const float* x, const RoundedBlocks& out) {
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    const int64_t at = static_cast<int64_t>(b) * blocks.block;
    const BlockCodes how =
        block_codes(blocks.bits[b], blocks.clip, largest_magnitude(x + at, blocks.block));
    out.scales[b] = how.scale;
    round_block(how, x + at, blocks.block, out.codes + at);
  }
}

void round_classes(const BlockPrecision& blocks, const float* x, const RoundedBlocks& out) {
  const ClassCodes how = class_codes(blocks, x);
  const BlockCodes four{.top = kTopOf4Bits, .factor = how.factor4, .scale = how.scale};
  const BlockCodes eight{.top = kTopOf8Bits, .factor = how.factor8, .scale = how.scale};
  out.scales[0] = how.scale;
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    int8_t* codes = out.codes + static_cast<int64_t>(b) * blocks.block;
    const bool narrow = blocks.bits[b] == 4;
    round_block(narrow ? four : eight, x + (codes - out.codes), blocks.block, codes);
    for (int i = 0; narrow && i < blocks.block; ++i) {
      codes[i] = static_cast<int8_t>(codes[i] * (1 << how.shift));
    }
  }
}

}  // namespace

BlockCodes block_codes(int bits, float clip, float largest) {
  BlockCodes codes;
  codes.top = bits == 4 ? kTopOf4Bits : kTopOf8Bits;
  const float span = bits == 4 ? clip * largest : largest;
  const float factor = codes.top / span;
  codes.factor = factor < std::numeric_limits<float>::infinity() ? factor : 0.0F;
  codes.scale = span / codes.top;
  return codes;
}

ClassCodes class_codes(float clip, float largest4, float largest8) {
  const BlockCodes four = block_codes(4, clip, largest4);
  const BlockCodes eight = block_codes(8, clip, largest8);
  if (std::isnan(four.scale) || std::isnan(eight.scale)) {
    return {.scale = std::numeric_limits<float>::quiet_NaN()};
  }
  if (eight.scale > four.scale) {
    return {.factor4 = eight.factor, .factor8 = eight.factor, .scale = eight.scale};
  }
  int shift = largest8 > 0.0F ? kMostClassShift : 0;
  while (shift > 0 && four.scale * std::ldexp(1.0F, -shift) < eight.scale) {
    --shift;
  }
  const float factor8 = four.factor * std::ldexp(1.0F, shift);
  return {.factor4 = four.factor,
          .factor8 = factor8 < std::numeric_limits<float>::infinity() ? factor8 : 0.0F,
          .shift = shift,
          .scale = four.scale * std::ldexp(1.0F, -shift)};
}

ClassCodes class_codes(const BlockPrecision& blocks, const float* x) {
  float largest4 = 0.0F;
  float largest8 = 0.0F;
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    const int64_t at = static_cast<int64_t>(b) * blocks.block;
    float& largest = blocks.bits[b] == 4 ? largest4 : largest8;
    largest = larger(largest_magnitude(x + at, blocks.block), largest);
  }
  return class_codes(blocks.clip, largest4, largest8);
}

void round_blocks(const BlockPrecision& blocks,
                  BlockScales form,
                  const float* x,
                  const RoundedBlocks& out) {
  form == BlockScales::kClass ? round_classes(blocks, x, out) : round_each(blocks, x, out);
}

float fixed_unit(float largest) {
  constexpr float kLeast = 0x1p-100F;
  constexpr float kInfinite = 0x1p104F;
  const float top = bf16_to_f32(f32_to_bf16(largest));
  if (!(top < kInfinite)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return std::ldexp(1.0F, std::ilogb(std::max(top, kLeast)) - 13);
}

void round_wide_blocks(const BlockPrecision& blocks, const float* x, const RoundedWideBlocks& out) {
  const int64_t block = blocks.block;
  float largest = 0.0F;
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    if (blocks.bits[b] == 8) {
      largest = larger(largest_magnitude(x + static_cast<int64_t>(b) * block, block), largest);
    }
  }
  const BlockCodes how = block_codes(8, 1.0F, largest);
  out.scales[0] = how.scale;
  float* unit = out.scales + 1;
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    const int64_t at = static_cast<int64_t>(b) * block;
    if (blocks.bits[b] == 8) {
      round_block(how, x + at, block, out.codes + at);
    } else {
      *unit++ = round_fixed(x + at, block, out.codes + at);
    }
  }
}

}  // namespace nibble
