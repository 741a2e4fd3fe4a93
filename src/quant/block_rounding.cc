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

void round_blocks(const BlockPrecision& blocks,
                  BlockScales form,
                  const float* x,
                  const RoundedBlocks& out) {
  const int64_t block = blocks.block;
  float classes[2] = {0.0F, 0.0F};  // largest magnitudes
  const auto class_of = [&](size_t b) {
    return blocks.bits[b] == 4 ? kClassOf4Bits : kClassOf8Bits;
  };
  for (size_t b = 0; form == BlockScales::kClass && b < blocks.bits.size(); ++b) {
    float& largest = classes[class_of(b)];
    largest = larger(largest_magnitude(x + static_cast<int64_t>(b) * block, block), largest);
  }
  if (form == BlockScales::kClass) {
    out.scales[kClassOf4Bits] = block_codes(4, blocks.clip, classes[kClassOf4Bits]).scale;
    out.scales[kClassOf8Bits] = block_codes(8, blocks.clip, classes[kClassOf8Bits]).scale;
  }
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    const int64_t at = static_cast<int64_t>(b) * block;
    const bool each = form == BlockScales::kEach;
    const float largest = each ? largest_magnitude(x + at, block) : classes[class_of(b)];
    const BlockCodes how = block_codes(blocks.bits[b], blocks.clip, largest);
    if (each) {
      out.scales[b] = how.scale;
    }
    round_block(how, x + at, block, out.codes + at);
  }
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
