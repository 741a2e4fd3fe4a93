#include "quant/block_rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

void round_block(const BlockCodes& how, const float* x, int64_t count, int8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float code = std::isnan(how.scale) ? 0.0F : x[i] * how.factor;
    codes[i] = static_cast<int8_t>(round_half_even(std::clamp(code, -how.top, how.top)));
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

}  // namespace nibble
