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

std::vector<uint8_t> encoded(const WeightFormat& format,
                             const std::vector<float>& x,
                             const std::vector<float>& scales) {
  const auto k = static_cast<int64_t>(x.size());
  std::vector<uint8_t> bytes(static_cast<size_t>(QuantTensor::code_row_bytes(format.code, k)),
                             0xee);
  encode_row(format, x.data(), k, scales.data(), reinterpret_cast<std::byte*>(bytes.data()));
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
    encode_row(scheme.weight, x.data(), k, scales, tensor.codes.data() + row * tensor.row_bytes());
    decode_row(tensor, row, out.data());
    fake_quant_row(scheme.weight, x.data(), k, scales, faked.data());
    EXPECT_EQ(std::memcmp(out.data(), faked.data(), out.size() * sizeof(float)), 0);
    for (int64_t i = 0; i < k; ++i) {
      const auto at = static_cast<size_t>(i);
      const float scale = groups == 0 ? 0.0F : scales[i * groups / k];
      const bool integer =
          scheme.weight.code == WeightCode::kInt4 || scheme.weight.code == WeightCode::kInt8;
      const float tolerance = integer ? scale * 0.5001F : std::fabs(x[at]) / 15 + scale * 0.001F;
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
