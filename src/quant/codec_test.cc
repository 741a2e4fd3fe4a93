#include "quant/codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

static_assert(encode_e4m3(1.0F) == 0x38 && encode_e4m3(-2.0F) == 0xc0);
static_assert(decode_e4m3(0x7e) == 448.0F);

// The value of a code by the format's definition, in double.
double defined_e4m3(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Nearest finite code by exhaustive comparison; ties go to the even code.
int search_e4m3(double value) {
  int best = 0;
  double best_error = std::numeric_limits<double>::infinity();
  for (int code = 0; code <= 0x7e; ++code) {
    const double error = std::fabs(std::fabs(value) - defined_e4m3(code));
    if (error < best_error || (error == best_error && code % 2 == 0)) {
      best = code;
      best_error = error;
    }
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

TEST(E4M3, DecodesEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(encode_e4m3(value), code);
    } else {
      EXPECT_EQ(static_cast<double>(value), defined_e4m3(code)) << code;
      EXPECT_EQ(encode_e4m3(value), code);
    }
  }
}

TEST(E4M3, RoundsEveryMidpointAndItsNeighbours) {
  for (int code = 0; code < 0x7e; ++code) {
    const auto middle = static_cast<float>((defined_e4m3(code) + defined_e4m3(code + 1)) / 2);
    for (const float value :
         {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1000.0F)}) {
      EXPECT_EQ(encode_e4m3(value), search_e4m3(value)) << value;
      EXPECT_EQ(encode_e4m3(-value), search_e4m3(-value)) << value;
    }
  }
}

TEST(E4M3, AgreesWithSearchOnEveryBf16Value) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_f32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_EQ(encode_e4m3(value) & 0x7f, 0x7f);
    } else if (std::fabs(value) >= 448.0F) {
      EXPECT_EQ(encode_e4m3(value), std::signbit(value) ? 0xfe : 0x7e);
    } else {
      ASSERT_EQ(encode_e4m3(value), search_e4m3(value)) << value;
    }
  }
}

TEST(E4M3, ExamplesOfTheFormatNotes) {
  EXPECT_EQ(encode_e4m3(0.3F), 0x2a);
  EXPECT_EQ(encode_e4m3(448.0F), 0x7e);
  EXPECT_EQ(encode_e4m3(0x1p-10F), 0x00);  // a tie
}

TEST(EncodeInt, RoundsHalfToEvenAndClamps) {
  const CodeRange int8 = code_range(WeightCode::kInt8);
  for (int twice = -300; twice <= 300; ++twice) {
    const float value = static_cast<float>(twice) / 2;
    const auto nearest = static_cast<int>(std::nearbyint(std::fmin(std::fmax(value, -128), 127)));
    EXPECT_EQ(encode_int(value, 1.0F, int8), nearest) << value;
  }
  EXPECT_EQ(encode_int(std::numeric_limits<float>::infinity(), 1.0F, int8), 127);
  EXPECT_EQ(encode_int(std::numeric_limits<float>::quiet_NaN(), 1.0F, int8), -128);
  EXPECT_EQ(encode_int(-0.5F, 1.0F, int8), 0);
  EXPECT_EQ(encode_int(7.5F, 1.0F, code_range(WeightCode::kInt4)), 7);
  EXPECT_EQ(encode_int(-7.5F, 1.0F, code_range(WeightCode::kInt4)), -8);
}

TEST(E2M1, NearestValueTiesToEven) {
  const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int i = -8000; i <= 8000; ++i) {
    const double x = i / 1000.0;
    int nearest = 0;
    for (int code = 1; code < 8; ++code) {
      const double gain =
          std::fabs(std::fabs(x) - values[nearest]) - std::fabs(std::fabs(x) - values[code]);
      nearest = gain > 0 || (gain == 0 && code % 2 == 0) ? code : nearest;
    }
    const int sign = std::signbit(x) ? 8 : 0;
    EXPECT_EQ(encode_e2m1(static_cast<float>(x)), sign | nearest) << x;
  }
  EXPECT_EQ(encode_e2m1(std::numeric_limits<float>::infinity()), 7);
  EXPECT_EQ(encode_e2m1(-1e-40F), 8);
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(encode_e2m1(decode_e2m1(static_cast<uint8_t>(code))), code);
    EXPECT_EQ(std::fabs(decode_e2m1(static_cast<uint8_t>(code))), values[code & 7]);
  }
}

TEST(E8M0, EveryPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    const float power = decode_e8m0(static_cast<uint8_t>(code));
    EXPECT_EQ(power, std::ldexp(1.0, code - 127));
    EXPECT_EQ(encode_e8m0(power), code);
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
}

TEST(Int4, ZeroPointsShiftTheCodes) {
  constexpr CodeRange kRange = code_range(WeightCode::kInt4);
  for (int zero = -8; zero <= 7; ++zero) {
    for (int code = -8; code <= 7; ++code) {
      const float value = static_cast<float>(code - zero) * 0.75F;
      EXPECT_EQ(encode_int(value, 0.75F, static_cast<float>(zero), kRange), code);
    }
  }
}

TEST(EncodeRow, Mxfp4RampOfTheFormatNotes) {
  const WeightFormat format{WeightCode::kFp4E2M1, ScalePer::kGroup, 32, DType::kF8E8M0};
  std::vector<float> ramp(32);
  for (int i = 0; i < 32; ++i) {
    ramp[static_cast<size_t>(i)] = static_cast<float>(i - 16) / 8;
  }
  std::vector<uint8_t> bytes(16);
  const float scale = decode_e8m0(0x7e);
  encode_row(format, ramp.data(), 32, {&scale}, reinterpret_cast<std::byte*>(bytes.data()));
  EXPECT_EQ(bytes, (std::vector<uint8_t>{0xee, 0xde, 0xdd, 0xcc, 0xcc, 0xab, 0xaa, 0x89, 0x00, 0x21,
                                         0x22, 0x43, 0x44, 0x54, 0x55, 0x66}));
}

TEST(QuantSchemes, BitsPerWeight) {
  const auto bits = [](std::string_view name) {
    return bits_per_weight(find_scheme(name).value().weight, 4096);
  };
  EXPECT_EQ(bits("w4a16_g32"), 4.5);
  EXPECT_EQ(bits("w4a16_g128_asym"), 4 + 20.0 / 128);
  EXPECT_EQ(bits("w4a8_g128"), 4 + 20.0 / 128);
  EXPECT_EQ(bits("mxfp4"), 4.25);
  EXPECT_EQ(bits("w8a8_fp8_expert"), 8);
  EXPECT_NEAR(bits("w8a8_fp8_block"), 8 + 32.0 / 16384, 1e-9);
  EXPECT_EQ(bits_per_weight(
                {WeightCode::kInt4, ScalePer::kGroup, 32, DType::kF16, ZeroPoints::kMinimum}, 4096),
            5);
}

// 0.1 of F16 and -1.375 make numbers that F32 has to round.
TEST(DecodeRow, MinimumsAreAddedToCodesCountedFromTheLowest) {
  constexpr float kScale = 0.0999755859375F, kMinimum = -1.375F;
  QuantTensor tensor =
      QuantTensor::allocate(
          {WeightCode::kInt4, ScalePer::kGroup, 8, DType::kF16, ZeroPoints::kMinimum}, 1, 16)
          .value();
  const uint32_t words[] = {0x76543210U, 0xfedcba98U};
  std::memcpy(tensor.codes.data(), words, sizeof(words));
  tensor.scales.as<float>()[0] = kScale;
  tensor.scales.as<float>()[1] = 2.0F;
  tensor.minimums.as<float>()[0] = kMinimum;
  tensor.minimums.as<float>()[1] = -7.0F;
  std::vector<float> out(16);
  decode_row(tensor, 0, out.data());
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(out[i], static_cast<float>(static_cast<double>(i) * kScale + kMinimum));
    EXPECT_EQ(out[8 + i], static_cast<float>(2 * (8 + i)) - 7.0F);
  }
}

std::vector<uint8_t> encoded(const WeightFormat& format,
                             const std::vector<float>& x,
                             const std::vector<float>& scales) {
  const auto k = static_cast<int64_t>(x.size());
  std::vector<uint8_t> bytes(static_cast<size_t>(QuantTensor::code_row_bytes(format.code, k)),
                             0xee);
  encode_row(format, x.data(), k, {scales.data()}, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

TEST(EncodeRow, Int4WordsOfTheFormatNotes) {
  const WeightFormat format{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
  EXPECT_EQ(encoded(format, {-8, -7, -1, 0, 1, 2, 5, 7}, {1.0F}),
            (std::vector<uint8_t>{0x10, 0x87, 0xa9, 0xfd}));
  EXPECT_EQ(encoded(format, {-8, 7, 0}, {1.0F}), (std::vector<uint8_t>{0xf0, 0x08, 0x00, 0x00}));
}

TEST(EncodeRow, RampOfTheFormatNotes) {
  const WeightFormat format{WeightCode::kInt4, ScalePer::kGroup, 32, DType::kBF16};
  std::vector<float> ramp(32);
  for (int i = 0; i < 32; ++i) {
    ramp[static_cast<size_t>(i)] = static_cast<float>(i - 16) / 8;
  }
  const std::vector<uint8_t> over_7_5{0x11, 0x21, 0x32, 0x43, 0x54, 0x65, 0x76, 0x87,
                                      0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
  const std::vector<uint8_t> over_7{0x11, 0x22, 0x33, 0x44, 0x54, 0x65, 0x76, 0x87,
                                    0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdc, 0xed, 0xfe};
  EXPECT_EQ(encoded(format, ramp, {bf16_to_f32(0x3e89)}), over_7_5);
  EXPECT_EQ(encoded(format, ramp, {bf16_to_f32(0x3e92)}), over_7);
}

TEST(EncodeRow, Fp8RowOfTheFormatNotes) {
  const WeightFormat format{WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kF32};
  EXPECT_EQ(encoded(format, {1, -2, 0.3F, 448}, {1.0F}),
            (std::vector<uint8_t>{0x38, 0xc0, 0x2a, 0x7e}));
}

class EveryScheme : public testing::TestWithParam<size_t> {};

TEST_P(EveryScheme, DecodeInvertsEncodeWithinHalfAStep) {
  const QuantScheme& scheme = all_schemes()[GetParam()];
  const int64_t k = 256;
  const int64_t n = 5;
  auto tensor = QuantTensor::allocate(scheme.weight, n, k).value();
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(k));
  std::vector<float> out(x.size());
  std::vector<float> faked(x.size());
  for (int64_t row = 0; row < n; ++row) {
    for (float& value : x) {
      value = normal(random);
    }
    const int64_t groups = scheme.weight.groups(k);
    float* scales = tensor.scales.as<float>().data() + row * groups;
    for (int64_t g = 0; g < groups; ++g) {
      scales[g] = 0.5F + 0.125F * static_cast<float>(g + row);
    }
    RowScales row_scales = {scales};
    if (scheme.weight.zero_points == ZeroPoints::kPerScale) {
      int8_t* zeros = tensor.zeros.as<int8_t>().data() + row * groups;
      for (int64_t g = 0; g < groups; ++g) {
        zeros[g] = static_cast<int8_t>(g % 7 - 3);
      }
      row_scales.zeros = zeros;
    }
    encode_row(scheme.weight, x.data(), k, row_scales,
               tensor.codes.data() + row * tensor.row_bytes());
    decode_row(tensor, row, out.data());
    fake_quant_row(scheme.weight, x.data(), k, row_scales, faked.data());
    EXPECT_EQ(std::memcmp(out.data(), faked.data(), out.size() * sizeof(float)), 0);
    for (int64_t i = 0; i < k; ++i) {
      const auto at = static_cast<size_t>(i);
      const float scale = groups == 0 ? 0.0F : scales[i * groups / k];
      const bool integer =
          scheme.weight.code == WeightCode::kInt4 || scheme.weight.code == WeightCode::kInt8;
      const bool fp4 = scheme.weight.code == WeightCode::kFp4E2M1;
      const float floating = std::fabs(x[at]) / (fp4 ? 4.99F : 15) + scale * (fp4 ? 0.26F : 0.001F);
      const float tolerance = integer ? scale * 0.5001F : floating;
      EXPECT_NEAR(out[at], x[at], tolerance) << scheme.name << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codec,
                         EveryScheme,
                         testing::Range<size_t>(0, all_schemes().size()),
                         [](const auto& info) {
                           return std::string(all_schemes()[info.param].name);
                         });

}  // namespace
}  // namespace nibble
