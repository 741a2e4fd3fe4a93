#include "quantizer/rtn.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/codec.h"
#include "quantizer/encoder.h"

namespace nibble {
namespace {

std::vector<float> gaussian(size_t count) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

struct Row {
  std::vector<float> scales;
  std::vector<uint8_t> codes;
  double snr_db = 0;
};

Row quantize(std::string_view scheme, ScaleRule rule, const std::vector<float>& x) {
  const WeightFormat format = find_scheme(scheme).value().weight;
  const auto k = static_cast<int64_t>(x.size());
  Row row;
  row.scales.resize(static_cast<size_t>(format.groups(k)));
  row.codes.resize(static_cast<size_t>(QuantTensor::code_row_bytes(format.code, k)));
  row.snr_db = quantize_row(format, rule, x, row.scales.data(),
                            reinterpret_cast<std::byte*>(row.codes.data()))
                   .snr_db();
  return row;
}

// Expected decibels on Gaussian rows: the table of quantization noise in the algorithm notes.
TEST(Rtn, ReachesThePublishedSignalToNoise) {
  const std::vector<float> x = gaussian(1 << 18);
  EXPECT_NEAR(quantize("w4a16_g32", ScaleRule::kAbsMax, x).snr_db, 20.25, 0.1);
  EXPECT_NEAR(quantize("w4a16_g32", ScaleRule::kAbsMaxHalf, x).snr_db, 20.45, 0.1);
  EXPECT_NEAR(quantize("w4a16_g32", ScaleRule::kSigned, x).snr_db, 21.31, 0.1);
  EXPECT_NEAR(quantize("w4a16_g32", ScaleRule::kLsqSigned, x).snr_db, 21.83, 0.1);
  EXPECT_NEAR(quantize("w4a16_g128", ScaleRule::kAbsMaxHalf, x).snr_db, 19.09, 0.1);
  EXPECT_NEAR(quantize("w4a16_g128", ScaleRule::kLsqSigned, x).snr_db, 20.23, 0.1);
}

TEST(Rtn, ChannelRulesReachThePublishedSignalToNoise) {
  double best = 0;
  double half = 0;
  const std::vector<float> all = gaussian(size_t{64} * 4096);
  for (size_t row = 0; row < 64; ++row) {
    const std::vector<float> x(all.begin() + static_cast<std::ptrdiff_t>(row * 4096),
                               all.begin() + static_cast<std::ptrdiff_t>((row + 1) * 4096));
    best += quantize("w4a8", ScaleRule::kBest, x).snr_db / 64;
    half += quantize("w4a8", ScaleRule::kAbsMaxHalf, x).snr_db / 64;
  }
  EXPECT_NEAR(best, 19.3, 0.15);
  EXPECT_NEAR(half, 16.65, 0.3);
}

TEST(Rtn, BestIsNoWorseThanTheOtherRules) {
  const std::vector<float> x = gaussian(4096);
  for (const QuantScheme& scheme : all_schemes()) {
    if (scheme.weight.code != WeightCode::kInt4 || scheme.weight.zero_points != ZeroPoints::kNone) {
      continue;
    }
    const Row best = quantize(scheme.name, ScaleRule::kBest, x);
    for (const ScaleRule rule :
         {ScaleRule::kAbsMax, ScaleRule::kAbsMaxHalf, ScaleRule::kSigned, ScaleRule::kLsq}) {
      EXPECT_GE(best.snr_db + 0.02, quantize(scheme.name, rule, x).snr_db) << scheme.name;
    }
  }
}

TEST(Rtn, UnsignedRulesGivePositiveScales) {
  const std::vector<float> x = gaussian(4096);
  for (const ScaleRule rule :
       {ScaleRule::kAbsMax, ScaleRule::kAbsMaxHalf, ScaleRule::kLsq, ScaleRule::kMse}) {
    for (const float scale : quantize("w4a16_g32", rule, x).scales) {
      EXPECT_GT(scale, 0);
    }
  }
}

TEST(Rtn, ScalesAreStoredExactly) {
  const Row row = quantize("w4a16_g32", ScaleRule::kBest, gaussian(1024));
  for (const float scale : row.scales) {
    EXPECT_EQ(bf16_to_f32(f32_to_bf16(scale)), scale);
  }
}

TEST(Rtn, RampOfTheFormatNotes) {
  std::vector<float> ramp(32);
  for (size_t i = 0; i < ramp.size(); ++i) {
    ramp[i] = (static_cast<float>(i) - 16) / 8;
  }
  const Row half = quantize("w4a16_g32", ScaleRule::kAbsMaxHalf, ramp);
  EXPECT_EQ(f32_to_bf16(half.scales[0]), 0x3e89);
  EXPECT_EQ(half.codes, (std::vector<uint8_t>{0x11, 0x21, 0x32, 0x43, 0x54, 0x65, 0x76, 0x87, 0x88,
                                              0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}));
  EXPECT_EQ(f32_to_bf16(quantize("w4a16_g32", ScaleRule::kAbsMax, ramp).scales[0]), 0x3e92);
}

TEST(Rtn, ZeroTinyAndHugeGroups) {
  for (const float value : {0.0F, 1e-44F, 1e-30F, 1e30F, std::numeric_limits<float>::max()}) {
    for (const QuantScheme& scheme : all_schemes()) {
      if (!make_encoder({.scheme = scheme}, 1, 128).ok() || !scheme.weight.quantized()) {
        continue;
      }
      for (const ScaleRule rule :
           {ScaleRule::kBest, ScaleRule::kSigned, ScaleRule::kLsqSigned, ScaleRule::kMse}) {
        const Row row = quantize(scheme.name, rule, std::vector<float>(128, value));
        for (const float scale : row.scales) {
          EXPECT_TRUE(std::isfinite(scale)) << scheme.name << value;
          EXPECT_NE(scale, 0) << scheme.name << value;
        }
        if (value == 0.0F) {
          EXPECT_EQ(row.snr_db, 200);
        }
      }
    }
  }
}

TEST(ScaleRules, ParseByName) {
  EXPECT_EQ(parse_scale_rule("absmax7.5").value(), ScaleRule::kAbsMaxHalf);
  EXPECT_EQ(parse_scale_rule("no").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
