#include "quantizer/encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/codec.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr Dialect kDialects[] = {Dialect::kCompressedTensors, Dialect::kQuark, Dialect::kFp8};

std::vector<float> gaussian(size_t count, float size = 1) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

std::vector<std::string_view> isas() {
  std::vector<std::string_view> names;
  for (const std::string_view name : {"scalar", "avx2", "avx512"}) {
    if (rows::find_row_kernels(name).ok()) {
      names.push_back(name);
    }
  }
  return names;
}

struct Encoded {
  std::vector<std::vector<uint8_t>> slots;
  RowsError error;

  [[nodiscard]] float f32(size_t slot, size_t index) const {
    float value = 0;
    std::memcpy(&value, slots[slot].data() + index * 4, 4);
    return value;
  }
  [[nodiscard]] float bf16(size_t slot, size_t index) const {
    uint16_t value = 0;
    std::memcpy(&value, slots[slot].data() + index * 2, 2);
    return bf16_to_f32(value);
  }
};

Result<Encoded> encode(const MatrixEncoder& encoder, const std::vector<float>& x, int64_t n) {
  const auto k = static_cast<int64_t>(x.size()) / n;
  Extent extent;
  if (encoder.needs_extent()) {
    NIBBLE_ASSIGN_OR_RETURN(extent.absmax, absmax_of(x.data(), 0, n, k));
  }
  Encoded result;
  for (size_t slot = 0; slot < encoder.slots().size(); ++slot) {
    // Guard bytes show whether more is written than place() says.
    result.slots.emplace_back(static_cast<size_t>(encoder.place(slot, 0, n).bytes) + 16, 0xab);
  }
  for (int64_t row = 0; row < n; row += encoder.row_block()) {
    const int64_t rows = std::min(encoder.row_block(), n - row);
    std::vector<std::byte*> out;
    for (size_t slot = 0; slot < result.slots.size(); ++slot) {
      out.push_back(reinterpret_cast<std::byte*>(result.slots[slot].data()) +
                    encoder.place(slot, row, rows).offset);
    }
    RowsError error;
    NIBBLE_RETURN_IF_ERROR(encoder.encode(row, rows, x.data() + row * k, extent, out, error));
    result.error.add(error);
  }
  for (std::vector<uint8_t>& slot : result.slots) {
    EXPECT_EQ(std::count(slot.end() - 16, slot.end(), 0xab), 16) << "written past the end";
    slot.resize(slot.size() - 16);
  }
  return result;
}

Result<Encoded> encode(const EncoderOptions& options, const std::vector<float>& x, int64_t n) {
  NIBBLE_ASSIGN_OR_RETURN(const auto encoder,
                          make_encoder(options, n, static_cast<int64_t>(x.size()) / n));
  return encode(*encoder, x, n);
}

/// All that make_encoder() accepts for groups of 128.
std::vector<EncoderOptions> all_options() {
  std::vector<EncoderOptions> all;
  for (const QuantScheme& scheme : all_schemes()) {
    for (const Dialect dialect : kDialects) {
      for (const ScaleRule rule : all_scale_rules()) {
        const EncoderOptions options = {.scheme = scheme, .rule = rule, .dialect = dialect};
        const bool plain = !scheme.weight.quantized() && dialect != Dialect::kCompressedTensors;
        if (!plain && make_encoder(options, 1, 128).ok()) {
          all.push_back(options);
        }
      }
    }
  }
  return all;
}

std::string name_of(const EncoderOptions& options) {
  return fmt::format("{} {} {}", options.scheme.name, dialect_name(options.dialect),
                     scale_rule_name(options.rule));
}

/// The codes of row `row` in the order of QuantTensor.
std::vector<uint8_t> code_row(const EncoderOptions& options,
                              const Encoded& encoded,
                              int64_t row,
                              int64_t k) {
  const WeightFormat& format = options.scheme.weight;
  const auto bytes = QuantTensor::code_row_bytes(format.code, k);
  const bool in_words = format.code == WeightCode::kInt8 && options.scheme.act == ActFormat::kFloat;
  const int64_t stride = in_words ? (k + 3) / 4 * 4 : bytes;
  const auto begin = encoded.slots[0].begin() + row * stride;
  std::vector<uint8_t> codes(begin, begin + bytes);
  if (in_words) {
    EXPECT_EQ(std::count(begin + bytes, begin + stride, 0), stride - bytes) << "padding";
    std::ranges::transform(codes, codes.begin(), [](uint8_t code) { return code - 128; });
  }
  return codes;
}

/// What the stored bytes mean, by codec.h and the layouts of the format notes.
std::vector<float> decoded(const EncoderOptions& options,
                           const Encoded& encoded,
                           int64_t n,
                           int64_t k) {
  const WeightFormat& format = options.scheme.weight;
  auto tensor = QuantTensor::allocate(format, n, k).value();
  for (int64_t i = 0; i < n; ++i) {
    std::ranges::copy(code_row(options, encoded, i, k),
                      tensor.codes.as<uint8_t>().begin() + i * tensor.row_bytes());
  }
  const int64_t groups = format.groups(k);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t g = 0; g < groups; ++g) {
      const auto at = static_cast<size_t>(i * groups + g);
      float& scale = tensor.scales.as<float>()[at];
      if (options.dialect == Dialect::kQuark) {
        scale = encoded.f32(2, at) * encoded.f32(1, 0);
      } else if (format.scale_per == ScalePer::kTensor) {
        scale = encoded.f32(1, 0);
      } else if (format.scale_per == ScalePer::kBlock) {
        scale = encoded.f32(1, static_cast<size_t>(i / format.group_size * groups + g));
      } else if (format.scale_dtype == DType::kF8E8M0) {
        scale = decode_e8m0(encoded.slots[1][at]);
      } else {
        scale = format.scale_dtype == DType::kBF16 ? encoded.bf16(1, at) : encoded.f32(1, at);
      }
      if (format.zero_points == ZeroPoints::kPerScale) {
        uint32_t word = 0;
        std::memcpy(&word, encoded.slots[2].data() + (i / 8 * groups + g) * 4, 4);
        tensor.zeros.as<int8_t>()[at] = static_cast<int8_t>((word >> (i % 8 * 4) & 15U)) - 8;
      }
    }
    if (options.dialect == Dialect::kQuark) {  // back to sequential offset binary
      constexpr int kElement[8] = {0, 2, 4, 6, 1, 3, 5, 7};
      uint8_t* row = tensor.codes.as<uint8_t>().data() + i * tensor.row_bytes();
      for (int64_t w = 0; w < tensor.row_bytes(); w += 4) {
        uint32_t word = 0;
        std::memcpy(&word, row + w, 4);
        uint32_t sequential = 0;
        for (int slot = 0; slot < 8; ++slot) {
          sequential |= ((word >> (4 * slot) & 15U) ^ 8U) << (4 * kElement[slot]);
        }
        std::memcpy(row + w, &sequential, 4);
      }
    }
  }
  std::vector<float> values(static_cast<size_t>(n * k));
  for (int64_t i = 0; i < n; ++i) {
    decode_row(tensor, i, values.data() + i * k);
  }
  return values;
}

TEST(Encoder, SlotsAreFilledExactly) {
  for (const EncoderOptions& options : all_options()) {
    for (const int64_t n : {1, 19, 300}) {
      const auto encoder = make_encoder(options, n, 256).value();
      for (size_t slot = 0; slot < encoder->slots().size(); ++slot) {
        int64_t size = dtype_bits(encoder->slots()[slot].dtype) / 8;
        for (const int64_t extent : encoder->slots()[slot].shape) {
          size *= extent;
        }
        int64_t filled = 0;
        for (int64_t row = 0; row < n; row += encoder->row_block()) {
          const auto place = encoder->place(slot, row, std::min(encoder->row_block(), n - row));
          EXPECT_EQ(place.bytes == 0 ? filled : place.offset, filled);
          filled += place.bytes;
        }
        EXPECT_EQ(filled, size) << name_of(options) << " " << encoder->slots()[slot].suffix;
      }
    }
  }
}

TEST(Encoder, NamesTheWeightThatIsNotFinite) {
  for (const EncoderOptions& options : all_options()) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      const auto encoder = make_encoder(options, 11, 128).value();
      std::vector<float> x = gaussian(size_t{11} * 128);
      EXPECT_TRUE(encode(*encoder, x, 11).ok());
      x[9 * 128 + 77] = bad;
      const auto result = encode(*encoder, x, 11);
      EXPECT_EQ(result.status().code(), StatusCode::kCorrupt);
      EXPECT_NE(result.status().message().find("[9, 77]"), std::string::npos)
          << result.status().message();
    }
  }
}

/// Weights of all sizes, zeros, denormals, groups of one value, and lone outliers.
std::vector<std::vector<float>> adversarial(size_t count) {
  std::vector<std::vector<float>> all;
  all.push_back(gaussian(count));
  for (const float value : {0.0F, -0.0F, 1.0F, -0.37F, 1e-44F, -1e-38F, 3e-37F, 1e30F, 3e38F,
                            -3.4e38F, std::numeric_limits<float>::max()}) {
    all.emplace_back(count, value);
  }
  for (const float size : {1e-42F, 1e-37F, 1e-30F, 1e-13F, 1e12F, 1e20F, 6e37F}) {
    all.push_back(gaussian(count, size));
    for (float& value : all.back()) {
      value = std::clamp(value, -3.4e38F, 3.4e38F);
    }
  }
  std::vector<float> mixed = gaussian(count);
  for (size_t i = 0; i < count; ++i) {
    mixed[i] *= std::ldexp(1.0F, static_cast<int>(i % 251) - 125);
  }
  all.push_back(mixed);
  std::vector<float> outlier = gaussian(count, 0.001F);
  outlier[count / 2] = -100;
  all.push_back(outlier);
  std::vector<float> halves(count);  // quotients on and beside the ties
  for (size_t i = 0; i < count; ++i) {
    halves[i] = (static_cast<float>(i % 61) - 30) / 4;
  }
  all.push_back(halves);
  return all;
}

TEST(Encoder, AllInstructionSetsGiveTheSameBits) {
  ASSERT_FALSE(isas().empty());
  for (EncoderOptions options : all_options()) {
    const bool grouped = options.scheme.weight.scale_per == ScalePer::kGroup;
    for (const int64_t k :
         grouped ? std::vector<int64_t>{128, 384} : std::vector<int64_t>{1, 7, 129, 1155}) {
      for (const int64_t n : {1, 11}) {
        for (const std::vector<float>& x : adversarial(static_cast<size_t>(n * k))) {
          options.isa = "scalar";
          const auto first = encode(options, x, n);
          for (const std::string_view isa : isas()) {
            options.isa = isa;
            const auto other = encode(options, x, n);
            ASSERT_EQ(first.ok(), other.ok());
            if (first.ok()) {
              ASSERT_EQ(first->slots, other->slots) << name_of(options) << isa << " k=" << k;
              ASSERT_EQ(std::memcmp(&first->error, &other->error, sizeof(RowsError)), 0)
                  << name_of(options) << isa << " k=" << k << " " << first->error.noise << " "
                  << other->error.noise;
            }
          }
        }
      }
    }
  }
}

TEST(Encoder, CodesAreThoseOfTheCodecAndErrorsThoseOfWhatIsStored) {
  for (const EncoderOptions& options : all_options()) {
    const WeightFormat& format = options.scheme.weight;
    const int64_t n = 11;
    const int64_t k = format.scale_per == ScalePer::kGroup ? 384 : 389;
    for (const std::vector<float>& x : adversarial(static_cast<size_t>(n * k))) {
      const auto encoded = encode(options, x, n);
      if (!encoded.ok()) {
        EXPECT_EQ(format.code, WeightCode::kBf16);  // numbers that it cannot hold
        continue;
      }
      const std::vector<float> values = decoded(options, *encoded, n, k);
      RowsError expected;
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_TRUE(std::isfinite(values[i])) << name_of(options) << " " << x[i];
        const double w = x[i];
        const double d = values[i];
        expected.signal += w * w;
        expected.noise += (w - d) * (w - d);
        expected.product += w * d;
        expected.energy += d * d;
        expected.max_error = std::max(expected.max_error, std::fabs(x[i] - values[i]));
        expected.zeros += w != 0 && d == 0 ? 1 : 0;
      }
      const RowsError& error = encoded->error;
      const double tolerance = 1e-5;
      SCOPED_TRACE(testing::Message() << name_of(options) << " x[1]=" << x[1]);
      EXPECT_EQ(error.count, n * k);
      EXPECT_NEAR(error.signal, expected.signal, tolerance * expected.signal);
      EXPECT_NEAR(error.noise, expected.noise, tolerance * expected.noise);
      EXPECT_NEAR(error.product, expected.product, tolerance * expected.signal);
      EXPECT_NEAR(error.energy, expected.energy, tolerance * expected.energy);
      EXPECT_EQ(error.max_error, expected.max_error);
      EXPECT_EQ(error.zeros, expected.zeros);
      EXPECT_LE(error.scale_low, error.scale_high);
      EXPECT_NEAR(error.cosine(), expected.cosine(), 1e-6);
    }
  }
}

// With the stored scales, the codes must be those that encode_row() gives.
TEST(Encoder, EveryCodeIsTheNearestOneForTheStoredScale) {
  for (const EncoderOptions& options : all_options()) {
    const WeightFormat& format = options.scheme.weight;
    if (options.dialect == Dialect::kQuark || !format.quantized() ||
        format.scale_per == ScalePer::kBlock || format.scale_per == ScalePer::kTensor) {
      continue;  // what they store is compared by the test above
    }
    const int64_t k = 384;
    for (const std::vector<float>& x : adversarial(static_cast<size_t>(8 * k))) {
      const Encoded encoded = encode(options, x, 8).value();
      const int64_t groups = format.groups(k);
      const int64_t bytes = QuantTensor::code_row_bytes(format.code, k);
      for (int64_t row = 0; row < 8; ++row) {
        std::vector<float> scales;
        std::vector<int8_t> zeros;
        for (int64_t g = 0; g < groups; ++g) {
          const auto at = static_cast<size_t>(row * groups + g);
          scales.push_back(format.scale_dtype == DType::kBF16  ? encoded.bf16(1, at)
                           : format.scale_dtype == DType::kF32 ? encoded.f32(1, at)
                                                               : decode_e8m0(encoded.slots[1][at]));
          if (format.zero_points != ZeroPoints::kNone) {
            uint32_t word = 0;
            std::memcpy(&word, encoded.slots[2].data() + g * 4, 4);
            zeros.push_back(static_cast<int8_t>(static_cast<int>(word >> (row * 4) & 15U) - 8));
          }
        }
        std::vector<std::byte> codes(static_cast<size_t>(bytes));
        encode_row(format, x.data() + row * k, k, {scales.data(), zeros.data()}, codes.data());
        const std::vector<uint8_t> stored = code_row(options, encoded, row, k);
        ASSERT_EQ(std::memcmp(codes.data(), stored.data(), static_cast<size_t>(bytes)), 0)
            << name_of(options) << " x=" << x[1];
      }
    }
  }
}

TEST(Encoder, ZeroGroupsHaveTheSmallestScaleAndNoError) {
  for (const EncoderOptions& options : all_options()) {
    const Encoded encoded = encode(options, std::vector<float>(256, 0.0F), 2).value();
    EXPECT_EQ(encoded.error.noise, 0) << name_of(options);
    EXPECT_EQ(encoded.error.zeros, 0);
    if (options.scheme.weight.quantized()) {
      EXPECT_GT(encoded.error.scale_low, 0) << name_of(options);
    }
  }
  const auto scale_of = [](std::string_view scheme) {
    return encode({.scheme = find_scheme(scheme).value()}, std::vector<float>(128, 0.0F), 1)
        .value();
  };
  EXPECT_EQ(scale_of("w4a16_g32").bf16(1, 0), 0x1p-7F);
  EXPECT_EQ(scale_of("w8a8_fp8").f32(1, 0), 0x1p-23F);
  EXPECT_EQ(scale_of("mxfp4").slots[1][0], 0);
}

std::vector<float> ramp() {
  std::vector<float> values(32);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = (static_cast<float>(i) - 16) / 8;
  }
  return values;
}

std::string hex(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

// Bytes of the format notes, which independent programs produced.
TEST(Encoder, RampsOfTheFormatNotes) {
  const Encoded half =
      encode({.scheme = find_scheme("w4a16_g32").value(), .rule = ScaleRule::kAbsMaxHalf}, ramp(),
             1)
          .value();
  EXPECT_EQ(hex(half.slots[0]), "11213243546576878899aabbccddeeff");
  EXPECT_EQ(hex(half.slots[1]), "893e");
  const Encoded seven =
      encode({.scheme = find_scheme("w4a16_g32").value(), .rule = ScaleRule::kAbsMax}, ramp(), 1)
          .value();
  EXPECT_EQ(hex(seven.slots[0]), "11223344546576878899aabbccdcedfe");
  EXPECT_EQ(hex(seven.slots[1]), "923e");
  EXPECT_EQ(hex(seven.slots[2]), "01000000000000002000000000000000");
  const Encoded quark = encode({.scheme = find_scheme("w4a8").value(),
                                .rule = ScaleRule::kQuark,
                                .dialect = Dialect::kQuark},
                               ramp(), 1)
                            .value();
  EXPECT_EQ(hex(quark.slots[0]), "a8bba9cbdcfeed0f1032103254655476");
  EXPECT_EQ(hex(quark.slots[1]), "2549923b");
  EXPECT_EQ(hex(quark.slots[2]), "efee6e42");
  const Encoded even =
      encode({.scheme = find_scheme("mxfp4").value(), .rule = ScaleRule::kAbsMax}, ramp(), 1)
          .value();
  EXPECT_EQ(hex(even.slots[0]), "eededdccccabaa890021224344545566");
  EXPECT_EQ(hex(even.slots[1]), "7e");
  const Encoded fp8 =
      encode({.scheme = find_scheme("w8a8_fp8").value()}, {1, -2, 0.3F, 448}, 1).value();
  EXPECT_EQ(hex(fp8.slots[0]), "38c02a7e");
  EXPECT_EQ(hex(fp8.slots[1]), "0000803f");
}

TEST(Encoder, EvenExponentsOfTheFormatNotes) {
  for (const auto& [absmax, byte] : {std::pair{7.0F, 128}, {6.0F, 127}, {4.0F, 127}, {3.4F, 126}}) {
    std::vector<float> x(32, 0.0F);
    x[5] = -absmax;
    const Encoded encoded =
        encode({.scheme = find_scheme("mxfp4").value(), .rule = ScaleRule::kAbsMax}, x, 1).value();
    EXPECT_EQ(encoded.slots[1][0], byte) << absmax;
  }
}

TEST(Encoder, TheSecondStageOfW4A8IsExact) {
  const std::vector<float> x = gaussian(size_t{16} * 512, 0.03F);
  const EncoderOptions options = {.scheme = find_scheme("w4a8").value(),
                                  .dialect = Dialect::kQuark};
  const Encoded ours = encode(options, x, 16).value();
  EncoderOptions plain = options;
  plain.dialect = Dialect::kCompressedTensors;
  const Encoded direct = encode(plain, x, 16).value();
  int exponent = 0;
  EXPECT_EQ(std::frexp(ours.f32(1, 0), &exponent), 0.5F);
  for (size_t row = 0; row < 16; ++row) {
    EXPECT_EQ(static_cast<double>(ours.f32(1, 0)) * static_cast<double>(ours.f32(2, row)),
              static_cast<double>(direct.f32(1, row)));
  }
  EXPECT_EQ(ours.error.noise, direct.error.noise);
  EncoderOptions theirs = options;
  theirs.rule = ScaleRule::kQuark;
  EXPECT_GT(ours.error.snr_db(), encode(theirs, x, 16).value().error.snr_db() + 1);
}

TEST(Encoder, DefaultRulesAreTheBestOfTheirScheme) {
  const std::vector<float> x = gaussian(size_t{8} * 2048);
  for (const EncoderOptions& options : all_options()) {
    EncoderOptions best = options;
    best.rule = ScaleRule::kBest;
    // Searching gains less than a tenth of a decibel of the 42 that int8 has.
    const double margin = options.scheme.weight.code == WeightCode::kInt8 ? 0.1 : 0.02;
    EXPECT_GE(encode(best, x, 8)->error.snr_db() + margin, encode(options, x, 8)->error.snr_db())
        << name_of(options);
  }
}

// Expected decibels on Gaussian rows: the table of quantization noise in the algorithm notes.
TEST(Encoder, ReachesThePublishedSignalToNoise) {
  const std::vector<float> x = gaussian(size_t{64} * 4096);
  const auto snr = [&](std::string_view scheme, ScaleRule rule) {
    return encode({.scheme = find_scheme(scheme).value(), .rule = rule}, x, 64)->error.snr_db();
  };
  EXPECT_NEAR(snr("w4a16_g32", ScaleRule::kAbsMax), 20.25, 0.1);
  EXPECT_NEAR(snr("w4a16_g32", ScaleRule::kAbsMaxHalf), 20.45, 0.1);
  EXPECT_NEAR(snr("w4a16_g32", ScaleRule::kSigned), 21.31, 0.1);
  EXPECT_NEAR(snr("w4a16_g32", ScaleRule::kLsqSigned), 21.83, 0.1);
  EXPECT_NEAR(snr("w4a16_g128", ScaleRule::kAbsMaxHalf), 19.09, 0.1);
  EXPECT_NEAR(snr("w4a16_g128", ScaleRule::kLsqSigned), 20.23, 0.1);
  EXPECT_NEAR(snr("w4a8", ScaleRule::kBest), 19.3, 0.15);
  EXPECT_NEAR(snr("w4a8", ScaleRule::kAbsMaxHalf), 16.65, 0.3);
  EXPECT_NEAR(snr("mxfp4", ScaleRule::kAbsMax), -20 * std::log10(0.1115), 0.1);
}

TEST(Encoder, RefusesOddGroupsForeignDialectsAndRules) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  EXPECT_EQ(make_encoder({.scheme = scheme}, 8, 100).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(make_encoder({.scheme = scheme, .dialect = Dialect::kFp8}, 8, 128).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(make_encoder({.scheme = scheme, .rule = ScaleRule::kQuark}, 8, 128).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(make_encoder({.scheme = scheme, .isa = "mmx"}, 8, 128).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
