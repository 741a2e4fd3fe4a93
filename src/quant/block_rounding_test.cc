#include "quant/block_rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Rounded {
  std::vector<int8_t> codes;
  std::vector<float> scales;
};

Rounded rounded(const BlockPrecision& blocks, BlockScales form, const std::vector<float>& x) {
  Rounded out{std::vector<int8_t>(x.size(), 99),
              std::vector<float>(static_cast<size_t>(scale_count(blocks, form)), -1.0F)};
  round_blocks(blocks, form, x.data(), {out.codes.data(), out.scales.data()});
  return out;
}

std::vector<float> random_row(int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(k));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = normal(random) * (i % 37 == 0 ? 50.0F : 1.0F);
  }
  return x;
}

float largest_of(const std::vector<float>& x, size_t begin, size_t end) {
  float largest = 0.0F;
  for (size_t i = begin; i < end; ++i) {
    largest = std::fmax(largest, std::fabs(x[i]));
  }
  return largest;
}

/// The code of a number among those that share `largest`, in double precision but for the factor.
int code_of(float x, int bits, float clip, float largest) {
  const float top = bits == 4 ? 7.0F : 127.0F;
  const float factor = top / (bits == 4 ? clip * largest : largest);
  const double code = std::nearbyint(static_cast<double>(static_cast<float>(x * factor)));
  return static_cast<int>(std::fmin(std::fmax(code, -top), top));
}

TEST(BlockRounding, EachBlockHasAScaleOfItsBits) {
  for (const int block : {32, 64, 128}) {
    const BlockPrecision blocks{.block = block, .bits = {4, 8, 4, 8, 4}, .clip = 0.85F};
    const std::vector<float> x = random_row(blocks.k(), static_cast<uint32_t>(block));
    const Rounded out = rounded(blocks, BlockScales::kEach, x);
    for (size_t b = 0; b < blocks.bits.size(); ++b) {
      const size_t begin = b * static_cast<size_t>(block);
      const size_t end = begin + static_cast<size_t>(block);
      const float largest = largest_of(x, begin, end);
      EXPECT_EQ(out.scales[b], blocks.bits[b] == 4 ? 0.85F * largest / 7.0F : largest / 127.0F);
      for (size_t i = begin; i < end; ++i) {
        EXPECT_EQ(out.codes[i], code_of(x[i], blocks.bits[b], 0.85F, largest)) << i;
        const float span = out.scales[b] * (blocks.bits[b] == 4 ? 7.0F : 127.0F);
        const float near = std::clamp(x[i], -span, span);  // what is clipped has the largest code
        EXPECT_NEAR(out.codes[i] * out.scales[b], near, 0.5001F * out.scales[b]);
      }
    }
  }
}

/// The scale of a row with both kinds of numbers, and how many of it those of 4 bits count, found
/// from the finest on.
struct ClassScale {
  float scale;
  int steps;
};

ClassScale class_scale(float clip, float largest4, float largest8) {
  const float four = clip * largest4 / 7.0F;
  const float eight = largest8 / 127.0F;
  for (const int steps : {16, 8, 4, 2, 1}) {
    if (four / static_cast<float>(steps) >= eight) {
      return {four / static_cast<float>(steps), steps};
    }
  }
  return {eight, 1};
}

int nearest_code(double x, double scale, double top) {
  return static_cast<int>(std::clamp(std::nearbyint(x / scale), -top, top));
}

TEST(BlockRounding, ClassesHaveOneScaleOfWhich4BitsCountAPowerOfTwo) {
  const BlockPrecision blocks{.block = 32, .bits = {8, 4, 4, 8}, .clip = 0.9F};
  std::vector<int> seen;
  for (const float larger : {0.1F, 1.0F, 2.1F, 4.3F, 9.0F, 17.0F, 40.0F, 1e6F}) {
    std::vector<float> x = random_row(blocks.k(), 3);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] *= i < 32 || i >= 96 ? larger : 1.0F;
    }
    const Rounded out = rounded(blocks, BlockScales::kClass, x);
    const float largest4 = largest_of(x, 32, 96);
    const float largest8 = std::fmax(largest_of(x, 0, 32), largest_of(x, 96, 128));
    const ClassScale want = class_scale(0.9F, largest4, largest8);
    ASSERT_EQ(out.scales.size(), 1U);
    EXPECT_EQ(out.scales[0], want.scale) << larger;
    seen.push_back(want.scale == largest8 / 127.0F ? 0 : want.steps);
    for (size_t i = 0; i < x.size(); ++i) {
      const bool four = blocks.bits[i / 32] == 4;
      const int steps = four ? want.steps : 1;
      const int code = nearest_code(x[i], double{want.scale} * steps, four ? 7 : 127) * steps;
      EXPECT_EQ(out.codes[i], code) << larger << " at " << i;
    }
  }
  EXPECT_THAT(seen, testing::IsSupersetOf({16, 8, 4, 2, 1, 0}));
}

TEST(BlockRounding, ClassesWithoutNumbersOf8BitsHaveTheScaleOf4) {
  const BlockPrecision four{.block = 32, .bits = {4, 4}, .clip = 0.8F};
  const BlockPrecision both{.block = 32, .bits = {4, 8}, .clip = 0.8F};
  std::vector<float> x = random_row(64, 4);
  std::fill(x.begin() + 32, x.end(), 0.0F);
  const float scale = 0.8F * largest_of(x, 0, 32) / 7.0F;
  const Rounded of4 = rounded(four, BlockScales::kClass, x);
  const Rounded of_both = rounded(both, BlockScales::kClass, x);
  EXPECT_EQ(of4.scales, std::vector<float>{scale});
  EXPECT_EQ(of_both.scales, of4.scales);
  EXPECT_EQ(of_both.codes, of4.codes);
  EXPECT_EQ(of4.codes[0], x[0] > 0 ? 7 : -7);
}

TEST(BlockRounding, ClassesWithoutNumbersOf4BitsHaveTheScaleOf8) {
  const BlockPrecision eight{.block = 32, .bits = {8, 8}};
  const BlockPrecision both{.block = 32, .bits = {4, 8}};
  std::vector<float> x = random_row(64, 4);
  std::fill_n(x.begin(), 32, 0.0F);
  const Rounded of8 = rounded(eight, BlockScales::kClass, x);
  const Rounded of_both = rounded(both, BlockScales::kClass, x);
  EXPECT_EQ(of8.scales, std::vector<float>{largest_of(x, 32, 64) / 127.0F});
  EXPECT_EQ(of_both.scales, of8.scales);
  EXPECT_EQ(of_both.codes, of8.codes);
  EXPECT_EQ(of8.codes[37], x[37] > 0 ? 127 : -127);
}

TEST(BlockRounding, ClassesNextToZeroKeepTheirSizes) {
  const BlockPrecision blocks{.block = 32, .bits = {4, 8}, .clip = 1.0F};
  for (const float four : {1e-45F, 1e-40F, 1e-38F, 3e-38F, 1e-36F, 1.0F, 3.4e38F}) {
    for (const float eight : {1e-45F, 1e-40F, 1e-38F, 1e-37F, 1e-35F, 1.0F, 3.4e38F}) {
      std::vector<float> x(64, 0.0F);
      x[3] = -four;
      x[40] = eight;
      const Rounded out = rounded(blocks, BlockScales::kClass, x);
      EXPECT_GE(out.scales[0], 0.0F);
      const double least = 3e-36;  // smaller numbers may have codes of 0
      const auto value = [&](size_t i) { return double{out.scales[0]} * out.codes[i]; };
      const double unit = std::max(double{four} / 7, double{eight} / 127) * 0.5001;
      EXPECT_NEAR(value(3), -four, std::max(unit, least)) << four << ' ' << eight;
      EXPECT_NEAR(value(40), eight, std::max(unit, least)) << four << ' ' << eight;
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_TRUE(x[i] != 0.0F || out.codes[i] == 0) << i;
      }
    }
  }
}

TEST(BlockRounding, ZerosAndNumbersNextToThemAreCodes0) {
  const BlockPrecision blocks{.block = 32, .bits = {4, 8}};
  for (const float tiny : {0.0F, -0.0F, 1e-45F, 1e-38F / 127.0F}) {
    const std::vector<float> x(64, tiny);
    for (const BlockScales form : {BlockScales::kEach, BlockScales::kClass}) {
      const Rounded out = rounded(blocks, form, x);
      EXPECT_THAT(out.codes, Each(0)) << tiny;
      for (const float scale : out.scales) {
        EXPECT_TRUE(scale >= 0.0F && scale < 1e-37F) << tiny;
      }
    }
  }
}

TEST(BlockRounding, WhatIsNotFiniteSpoilsItsScaleAlone) {
  const BlockPrecision blocks{.block = 32, .bits = {4, 8, 4}};
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    std::vector<float> x = random_row(blocks.k(), 5);
    const Rounded before = rounded(blocks, BlockScales::kEach, x);
    x[40] = bad;
    const Rounded each = rounded(blocks, BlockScales::kEach, x);
    EXPECT_EQ(each.scales[0], before.scales[0]);
    EXPECT_TRUE(std::isnan(each.scales[1]));
    EXPECT_EQ(each.scales[2], before.scales[2]);
    for (size_t i = 32; i < 64; ++i) {
      EXPECT_EQ(each.codes[i], 0);
    }
    for (const size_t at : {10, 40}) {
      std::vector<float> row = random_row(blocks.k(), 5);
      row[at] = bad;
      const Rounded classes = rounded(blocks, BlockScales::kClass, row);
      EXPECT_TRUE(std::isnan(classes.scales[0])) << at;
      EXPECT_THAT(classes.codes, Each(0)) << at;
    }
  }
}

TEST(BlockRounding, TheLargestNumbersAreTheLargestCodes) {
  const BlockPrecision blocks{.block = 32, .bits = {4, 8}, .clip = 0.7F};
  for (const float largest : {3.4e38F, 1e-30F, 7.0F}) {
    std::vector<float> x(64, 0.0F);
    x[0] = x[32] = largest;
    x[1] = x[33] = -largest;
    const Rounded out = rounded(blocks, BlockScales::kEach, x);
    EXPECT_EQ(out.codes[0], 7);
    EXPECT_EQ(out.codes[1], -7);
    EXPECT_EQ(out.codes[32], 127);
    EXPECT_EQ(out.codes[33], -127);
  }
}

struct RoundedWide {
  std::vector<int16_t> codes;
  std::vector<float> scales;
};

RoundedWide rounded_wide(const BlockPrecision& blocks, const std::vector<float>& x) {
  RoundedWide out{
      std::vector<int16_t>(x.size(), 99),
      std::vector<float>(static_cast<size_t>(scale_count(blocks, BlockScales::kWide)), -1.0F)};
  round_wide_blocks(blocks, x.data(), {out.codes.data(), out.scales.data()});
  return out;
}

double nearest_bf16(float x) {
  int exponent = 0;
  const double part = std::frexp(static_cast<double>(x), &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(part, 8)), exponent - 8);
}

TEST(BlockRounding, BlocksOf8BitsShareAScaleAndThoseInBf16HaveAPowerOfTwo) {
  for (const int block : {32, 64, 128}) {
    const BlockPrecision blocks{.block = block, .bits = {16, 8, 16, 8}};
    const std::vector<float> x = random_row(blocks.k(), 6);
    const RoundedWide out = rounded_wide(blocks, x);
    ASSERT_EQ(out.scales.size(), 3U);
    const auto width = static_cast<size_t>(block);
    const float largest8 =
        std::fmax(largest_of(x, width, 2 * width), largest_of(x, 3 * width, 4 * width));
    EXPECT_EQ(out.scales[0], largest8 / 127.0F);
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t b = i / width;
      if (blocks.bits[b] == 8) {
        EXPECT_EQ(out.codes[i], code_of(x[i], 8, 1.0F, largest8)) << i;
        continue;
      }
      double top = 0;
      for (size_t j = b * width; j < (b + 1) * width; ++j) {
        top = std::fmax(top, std::fabs(nearest_bf16(x[j])));
      }
      const double unit = std::exp2(std::floor(std::log2(top)) - 13);
      EXPECT_EQ(out.scales[1 + b / 2], unit);
      EXPECT_EQ(out.codes[i], std::nearbyint(nearest_bf16(x[i]) / unit)) << i;
      EXPECT_LE(std::abs(out.codes[i]), 1 << 14);
    }
  }
}

TEST(BlockRounding, UnitsHaveALeastAndNoneIsPast2To104) {
  EXPECT_EQ(fixed_unit(0.0F), 0x1p-113F);
  EXPECT_EQ(fixed_unit(0x1p-101F), 0x1p-113F);
  EXPECT_EQ(fixed_unit(0x1.8p-90F), 0x1p-103F);
  EXPECT_EQ(fixed_unit(0x1.ffp3F), 0x1p-9F);  // rounded up to 16
  EXPECT_EQ(fixed_unit(0x1.fcp103F), 0x1p90F);
  for (const float bad : {0x1.ffp103F, 0x1p104F, kInfinity, kNan}) {
    EXPECT_TRUE(std::isnan(fixed_unit(bad))) << bad;
  }
}

TEST(BlockRounding, InBf16WhatIsNotFiniteSpoilsItsScaleAlone) {
  const BlockPrecision blocks{.block = 32, .bits = {16, 8, 16, 8}};
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    const std::vector<float> good = random_row(blocks.k(), 5);
    const RoundedWide before = rounded_wide(blocks, good);
    for (const size_t at : {70, 100}) {
      std::vector<float> x = good;
      x[at] = bad;
      const RoundedWide out = rounded_wide(blocks, x);
      const size_t spoilt = at == 70 ? 2 : 0;
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(std::isnan(out.scales[i]), i == spoilt);
        EXPECT_TRUE(i == spoilt || out.scales[i] == before.scales[i]);
      }
      EXPECT_EQ(out.codes[at], 0);
    }
  }
}

TEST(BlockPrecision, KnowsTheShareOf4Bits) {
  EXPECT_EQ(share_of_bits({.block = 64, .bits = {4, 8, 4, 4}}, 4), 0.75);
  EXPECT_EQ(share_of_bits({.block = 64, .bits = {16, 8, 8, 8}}, 16), 0.25);
  EXPECT_EQ(share_of_bits({}, 4), 0.0);
}

TEST(BlockPrecision, RefusalsNameTheField) {
  const WeightFormat grouped{WeightCode::kInt4, ScalePer::kGroup, 64, DType::kBF16};
  const WeightFormat channel{WeightCode::kInt4, ScalePer::kChannel};
  const BlockPrecision good{.block = 64, .bits = {4, 8}};
  EXPECT_TRUE(check_blocks(good, ActFormat::kIntBlocks, grouped, 128).ok());
  EXPECT_TRUE(check_blocks(good, ActFormat::kIntBlocks, channel, 128).ok());
  const auto message = [&](const auto& change, const WeightFormat& weight, int64_t k) {
    BlockPrecision blocks = good;
    change(blocks);
    return std::string(check_blocks(blocks, ActFormat::kIntBlocks, weight, k).message());
  };
  const auto nothing = [](BlockPrecision&) {};
  EXPECT_THAT(message([](auto& b) { b.block = 48; }, channel, 96), HasSubstr("block: 48 is none"));
  EXPECT_THAT(message([](auto& b) { b.block = 32; }, grouped, 64), HasSubstr("groups of 64"));
  EXPECT_THAT(message(nothing, channel, 100), HasSubstr("100 input channels are no multiple"));
  EXPECT_THAT(message(nothing, channel, 192), HasSubstr("has 2 blocks, but 192"));
  EXPECT_THAT(message([](auto& b) { b.bits[1] = 6; }, channel, 128), HasSubstr("block 1 has 6"));
  for (const float clip : {0.0F, 1.01F, kNan}) {
    EXPECT_THAT(message([&](auto& b) { b.clip = clip; }, channel, 128), HasSubstr("field clip"));
  }
  const auto in_bf16 = [](std::vector<uint8_t> bits, const WeightFormat& weight) {
    const BlockPrecision blocks{.block = 64, .bits = std::move(bits)};
    return std::string(check_blocks(blocks, ActFormat::kBf16Blocks, weight, 128).message());
  };
  EXPECT_EQ(in_bf16({8, 16}, channel), "");
  EXPECT_THAT(in_bf16({8, 4}, channel), HasSubstr("block 1 has 4, which is neither 8 nor 16"));
  EXPECT_THAT(in_bf16({8, 16}, grouped), HasSubstr("one scale for each output channel"));
  EXPECT_THAT(message([](auto& b) { b.bits[0] = 16; }, channel, 128), HasSubstr("4 nor 8"));
}

}  // namespace
}  // namespace nibble
