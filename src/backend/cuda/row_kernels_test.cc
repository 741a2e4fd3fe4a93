#include "backend/cuda/row_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "backend/cpu/kernel_families.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

using Kind = GemmInput::Kind;

constexpr float kInf = std::numeric_limits<float>::infinity();
// One, several and no pieces in registers; the last is read twice.
constexpr int64_t kWidths[] = {8, 264, 1000, 4096, 4104, 8192, 14336, 32768, 40960};

std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float value : values) {
    out.push_back(f32_to_bf16(value));
  }
  return out;
}

/// What a kernel wrote, as numbers.
struct Output {
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
};

/// Device memory for the result, and guards behind it.
class OutputArrays {
 public:
  OutputArrays(ActFormat format, int64_t rows, int64_t n)
      : format_(format),
        values_(static_cast<size_t>(rows * n * (format == ActFormat::kBf16 ? 2 : 1)) + 64),
        scales_(static_cast<size_t>(rows) + 16) {}

  [[nodiscard]] QuantizedRows rows() const { return {format_, values_.data(), scales_.data()}; }

  [[nodiscard]] Output take() const {
    Output out{values_.host(), scales_.host()};
    for (size_t i = out.bytes.size() - 64; i < out.bytes.size(); ++i) {
      EXPECT_EQ(out.bytes[i], 0xff) << "written behind the values";
    }
    for (size_t i = out.scales.size() - 16; i < out.scales.size(); ++i) {
      EXPECT_TRUE(std::isnan(out.scales[i])) << "written behind the scales";
    }
    return out;
  }

 private:
  ActFormat format_;
  DeviceArray<uint8_t> values_;
  DeviceArray<float> scales_;
};

double value_at(const Output& out, ActFormat format, int64_t row, int64_t n, int64_t i) {
  const auto at = static_cast<size_t>(row * n + i);
  const auto scale = static_cast<double>(out.scales[static_cast<size_t>(row)]);
  switch (format) {
    case ActFormat::kInt8Token:
      return static_cast<int8_t>(out.bytes[at]) * scale;
    case ActFormat::kFp8Token:
      return decode_e4m3(out.bytes[at]) * scale;
    default:
      return bf16_to_f32(
          static_cast<uint16_t>(out.bytes[2 * at] | (uint16_t{out.bytes[2 * at + 1]} << 8)));
  }
}

/// Every value lies as near to `wanted` [rows, n] as its format's step allows, and a bit more for
/// sums and functions in single precision.
void expect_near(const Output& out,
                 ActFormat format,
                 int64_t rows,
                 int64_t n,
                 const std::vector<double>& wanted) {
  for (int64_t row = 0; row < rows; ++row) {
    double absmax = 0;
    for (int64_t i = 0; i < n; ++i) {
      absmax = std::max(absmax, std::fabs(wanted[static_cast<size_t>(row * n + i)]));
    }
    for (int64_t i = 0; i < n; ++i) {
      const double want = wanted[static_cast<size_t>(row * n + i)];
      double bound = std::fabs(want) * 0x1.01p-8 + absmax * 1e-6;
      if (format == ActFormat::kInt8Token) {
        bound = absmax / 127 * 0.501;
      } else if (format == ActFormat::kFp8Token) {
        bound = std::fabs(want) * 0x1.01p-4 + absmax / 448 * 0x1.01p-10 + absmax * 1e-6;
      }
      ASSERT_NEAR(value_at(out, format, row, n, i), want, bound)
          << "row " << row << " element " << i << " of " << n;
    }
  }
}

/// The codes and the scale of a row, by the CPU's functions.
void expect_cpu_codes(
    const Output& out, ActFormat format, int64_t row, int64_t n, const float* values) {
  const auto* codes = out.bytes.data() + row * n;
  const float scale = out.scales[static_cast<size_t>(row)];
  if (format == ActFormat::kInt8Token) {
    std::vector<uint8_t> wanted(static_cast<size_t>((n + 511) / 512 * 512));
    const cpu::Int8RowResult result =
        cpu::scalar::kRows.quantize_int8({.x = values, .k = n, .offset = 0, .out = wanted.data()});
    EXPECT_EQ(result.scale, scale);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(wanted[static_cast<size_t>(i)], codes[i]) << "row " << row << " element " << i;
    }
    return;
  }
  std::vector<float> wanted(static_cast<size_t>(n));
  EXPECT_EQ(cpu::scalar::kRows.quantize_fp8(values, n, 0.0F, wanted.data()), scale);
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_EQ(encode_e4m3(wanted[static_cast<size_t>(i)]), codes[i])
        << "row " << row << " element " << i;
  }
}

/// A row of gates and what they multiply, for products of integers.
cpu::InputRow silu_row(const uint16_t* gate_up, int64_t n) {
  return {
      .x = {gate_up, cpu::Element::kBf16}, .k = n, .input = {Kind::kSiluMul}, .silu = kSiluOfInt8};
}

constexpr ActFormat kFormats[] = {ActFormat::kBf16, ActFormat::kInt8Token, ActFormat::kFp8Token};

TEST(RowKernels, NormsRowsInEveryForm) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 1;
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {1, 3, 17}) {
      const auto x = random_values(static_cast<size_t>(rows * n), ++seed, 3.0F);
      const auto weight = random_values(static_cast<size_t>(n), ++seed, 1.0F);
      const DeviceArray<float> device_x(x);
      const DeviceArray<float> device_weight(weight);
      std::vector<double> wanted(x.size());
      for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) {
          sum += double{x[static_cast<size_t>(row * n + i)]} * x[static_cast<size_t>(row * n + i)];
        }
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<size_t>(row * n + i);
          wanted[at] = x[at] / std::sqrt(sum / static_cast<double>(n) + 1e-5) *
                       weight[static_cast<size_t>(i)];
        }
      }
      for (const ActFormat format : kFormats) {
        const OutputArrays out(format, rows, n);
        const NormArgs args{.x = device_x.data(),
                            .norm = {Kind::kRmsNorm, device_weight.data(), 1e-5F},
                            .rows = rows,
                            .n = n,
                            .out = out.rows()};
        ASSERT_EQ(norm_quantize(args, {}), cudaSuccess);
        expect_near(out.take(), format, rows, n, wanted);
      }
    }
  }
}

TEST(RowKernels, LayerNormsRowsInEveryForm) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 50;
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {1, 3, 17}) {
      auto x = random_values(static_cast<size_t>(rows * n), ++seed, 3.0F);
      std::ranges::for_each(x, [](float& value) { value += 5.0F; });  // far from the mean of 0
      const auto weight = random_values(static_cast<size_t>(n), ++seed, 1.0F);
      const auto bias = random_values(static_cast<size_t>(n), ++seed, 1.0F);
      const DeviceArray<float> device_x(x);
      const DeviceArray<float> device_weight(weight);
      const DeviceArray<float> device_bias(bias);
      std::vector<double> wanted(x.size());
      for (int64_t row = 0; row < rows; ++row) {
        const auto values = std::span(x).subspan(static_cast<size_t>(row * n), n);
        double mean = 0;
        double variance = 0;
        for (const float value : values) {
          mean += value / static_cast<double>(n);
        }
        for (const float value : values) {
          variance += std::pow(value - mean, 2) / static_cast<double>(n);
        }
        for (size_t i = 0; i < values.size(); ++i) {
          wanted[static_cast<size_t>(row * n) + i] =
              (values[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
        }
      }
      for (const ActFormat format : kFormats) {
        const OutputArrays out(format, rows, n);
        const NormArgs args{
            .x = device_x.data(),
            .norm = {Kind::kLayerNorm, device_weight.data(), 1e-5F, device_bias.data()},
            .rows = rows,
            .n = n,
            .out = out.rows()};
        ASSERT_EQ(norm_quantize(args, {}), cudaSuccess);
        expect_near(out.take(), format, rows, n, wanted);
      }
    }
  }
}

TEST(RowKernels, LayerNormsAndReluAreTheCpusToTheBit) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t n : {256, 264, 1000, 4096, 8192, 14336, 40960}) {
    const int64_t rows = 5;
    const auto x = random_values(static_cast<size_t>(rows * n), 41, 2.0F);
    const auto weight = random_values(static_cast<size_t>(n), 42, 1.0F);
    const auto bias = random_values(static_cast<size_t>(n), 43, 1.0F);
    const auto bits = to_bf16(random_values(static_cast<size_t>(rows * n), 44, 2.0F));
    const DeviceArray<float> device_x(x);
    const DeviceArray<float> device_weight(weight);
    const DeviceArray<float> device_bias(bias);
    const DeviceArray<uint16_t> device_bits(bits);
    for (const ActFormat format : {ActFormat::kInt8Token, ActFormat::kFp8Token}) {
      const OutputArrays normed(format, rows, n);
      const OutputArrays positive(format, rows, n);
      const NormArgs norm{
          .x = device_x.data(),
          .norm = {Kind::kLayerNorm, device_weight.data(), 1e-5F, device_bias.data()},
          .rows = rows,
          .n = n,
          .out = normed.rows()};
      ASSERT_EQ(norm_quantize(norm, {}), cudaSuccess);
      ASSERT_EQ(activation_quantize({.x = device_bits.data(),
                                     .kind = Kind::kRelu,
                                     .rows = rows,
                                     .n = n,
                                     .out = positive.rows()},
                                    {}),
                cudaSuccess);
      const Output norm_result = normed.take();
      const Output relu_result = positive.take();
      std::vector<float> row_values(static_cast<size_t>(n));
      for (int64_t row = 0; row < rows; ++row) {
        cpu::scalar::kRows.make_input(
            {.x = {x.data() + row * n, cpu::Element::kF32},
             .k = n,
             .input = {Kind::kLayerNorm, weight.data(), 1e-5F, bias.data()}},
            row_values.data());
        expect_cpu_codes(norm_result, format, row, n, row_values.data());
        cpu::scalar::kRows.make_input(
            {.x = {bits.data() + row * n, cpu::Element::kBf16}, .k = n, .input = {Kind::kRelu}},
            row_values.data());
        expect_cpu_codes(relu_result, format, row, n, row_values.data());
      }
    }
  }
}

TEST(RowKernels, ActivationsWithoutGateInEveryForm) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 150;
  for (const Kind kind : {Kind::kRelu, Kind::kGeluTanh}) {
    for (const int64_t n : kWidths) {
      for (const int64_t rows : {1, 3, 17}) {
        const int64_t stride = rows == 3 ? n + 8 : n;
        auto bits = to_bf16(random_values(static_cast<size_t>(rows * stride), ++seed, 3.0F));
        const DeviceArray<uint16_t> x(bits);
        std::vector<double> wanted;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = 0; i < n; ++i) {
            const float value = bf16_to_f32(bits[static_cast<size_t>(row * stride + i)]);
            wanted.push_back(exact_activation(kind, value, 1.0));
          }
        }
        for (const ActFormat format : kFormats) {
          const OutputArrays out(format, rows, n);
          const ActivationArgs args{.x = x.data(),
                                    .kind = kind,
                                    .stride = rows == 3 ? stride : 0,
                                    .rows = rows,
                                    .n = n,
                                    .out = out.rows()};
          ASSERT_EQ(activation_quantize(args, {}), cudaSuccess);
          expect_near(out.take(), format, rows, n, wanted);
        }
      }
    }
    std::vector<uint16_t> bits(8, f32_to_bf16(-1.0F));
    bits[3] = f32_to_bf16(std::nanf(""));
    bits[5] = f32_to_bf16(1e30F);
    const DeviceArray<uint16_t> x(bits);
    const OutputArrays out(ActFormat::kBf16, 1, 8);
    ASSERT_EQ(activation_quantize(
                  {.x = x.data(), .kind = kind, .rows = 1, .n = 8, .out = out.rows()}, {}),
              cudaSuccess);
    const Output result = out.take();
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_EQ(std::isnan(value_at(result, ActFormat::kBf16, 0, 8, i)), i == 3) << i;
    }
    EXPECT_EQ(value_at(result, ActFormat::kBf16, 0, 8, 5), bf16_to_f32(bits[5]));
  }
}

TEST(RowKernels, NormsAndGatesAgreeWithTheCpu) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t n : {256, 264, 1000, 4096, 8192, 14336, 40960}) {
    const int64_t rows = 5;
    const auto x = random_values(static_cast<size_t>(rows * n), 41, 2.0F);
    const auto weight = random_values(static_cast<size_t>(n), 42, 1.0F);
    const auto bits = to_bf16(random_values(static_cast<size_t>(rows * 2 * n), 43, 2.0F));
    const DeviceArray<float> device_x(x);
    const DeviceArray<float> device_weight(weight);
    const DeviceArray<uint16_t> gate_up(bits);
    const OutputArrays normed(ActFormat::kInt8Token, rows, n);
    const OutputArrays gated(ActFormat::kInt8Token, rows, n);
    const NormArgs norm{.x = device_x.data(),
                        .norm = {Kind::kRmsNorm, device_weight.data(), 1e-5F},
                        .rows = rows,
                        .n = n,
                        .out = normed.rows()};
    ASSERT_EQ(norm_quantize(norm, {}), cudaSuccess);
    ASSERT_EQ(
        activation_quantize({.x = gate_up.data(), .rows = rows, .n = n, .out = gated.rows()}, {}),
        cudaSuccess);
    const Output norm_result = normed.take();
    const Output gate_result = gated.take();
    std::vector<float> row_values(static_cast<size_t>(n));
    for (int64_t row = 0; row < rows; ++row) {
      cpu::scalar::kRows.rms_norm(x.data() + row * n, n, weight.data(), 1e-5F, row_values.data());
      expect_cpu_codes(norm_result, ActFormat::kInt8Token, row, n, row_values.data());
      cpu::scalar::kRows.make_input(silu_row(bits.data() + row * 2 * n, n), row_values.data());
      expect_cpu_codes(gate_result, ActFormat::kInt8Token, row, n, row_values.data());
    }
  }
}

// Each row's largest number is its first gate's: the scale has its bits, and so has that of a row
// of any gate alone.
TEST(RowKernels, AllGatesHaveTheCpusBits) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kWidth = 8;
  std::vector<uint16_t> bits;
  for (uint32_t gate = 0; gate < 0x10000; ++gate) {
    const float value = bf16_to_f32(static_cast<uint16_t>(gate));
    if (value > -87.0F && std::fabs(value) > 1e-35F && std::fabs(value) < 1e35F) {
      bits.push_back(static_cast<uint16_t>(gate));
      bits.insert(bits.end(), kWidth - 1, 0);   // other gates
      bits.insert(bits.end(), kWidth, 0x3f80);  // up: 1
    }
  }
  const int64_t rows = std::ssize(bits) / (2 * kWidth);
  ASSERT_GT(rows, 45000);
  const DeviceArray<uint16_t> gate_up(bits);
  const OutputArrays out(ActFormat::kInt8Token, rows, kWidth);
  ASSERT_EQ(
      activation_quantize({.x = gate_up.data(), .rows = rows, .n = kWidth, .out = out.rows()}, {}),
      cudaSuccess);
  const Output result = out.take();
  float wanted[kWidth];
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* given = bits.data() + row * 2 * kWidth;
    cpu::scalar::kRows.make_input(silu_row(given, kWidth), wanted);
    ASSERT_EQ(result.scales[static_cast<size_t>(row)], std::fabs(wanted[0]) / 127.0F)
        << "gate " << bf16_to_f32(*given);
  }
}

TEST(RowKernels, NormsOfPickedRowsEqualThoseOfAll) {
  NIBBLE_NEEDS_GPU();
  const int64_t n = 4096;
  const DeviceArray<float> x(random_values(static_cast<size_t>(9 * n), 5, 2.0F));
  const DeviceArray<float> weight(random_values(static_cast<size_t>(n), 6, 1.0F));
  const std::vector<int32_t> picked = {8, 0, 3, 3, 5};
  const DeviceArray<int32_t> index(picked);
  const OutputArrays all(ActFormat::kInt8Token, 9, n);
  const OutputArrays some(ActFormat::kInt8Token, 5, n);
  NormArgs args{.x = x.data(),
                .norm = {Kind::kRmsNorm, weight.data(), 1e-6F},
                .rows = 9,
                .n = n,
                .out = all.rows()};
  ASSERT_EQ(norm_quantize(args, {}), cudaSuccess);
  args.rows = 5;
  args.row_index = index.data();
  args.out = some.rows();
  ASSERT_EQ(norm_quantize(args, {}), cudaSuccess);
  const Output every = all.take();
  const Output chosen = some.take();
  for (size_t row = 0; row < picked.size(); ++row) {
    const auto source = static_cast<size_t>(picked[row]);
    EXPECT_EQ(chosen.scales[row], every.scales[source]);
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      ASSERT_EQ(chosen.bytes[row * static_cast<size_t>(n) + i],
                every.bytes[source * static_cast<size_t>(n) + i]);
    }
  }
}

TEST(RowKernels, MultipliesGatesInEveryForm) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 100;
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {1, 3, 17}) {
      const int64_t stride = rows == 3 ? 2 * n + 8 : 2 * n;
      const auto bits = to_bf16(random_values(static_cast<size_t>(rows * stride), ++seed, 3.0F));
      const DeviceArray<uint16_t> gate_up(bits);
      for (const ActFormat format : kFormats) {
        const SiluForm form = format == ActFormat::kInt8Token ? kSiluOfInt8 : SiluForm{};
        std::vector<double> wanted(static_cast<size_t>(rows * n));
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = 0; i < n; ++i) {
            const double gate = bf16_to_f32(bits[static_cast<size_t>(row * stride + i)]);
            const double up = bf16_to_f32(bits[static_cast<size_t>(row * stride + n + i)]);
            const auto raised = static_cast<float>(gate / (1 + std::exp(-gate)) * form.factor);
            const uint32_t cut = std::bit_cast<uint32_t>(raised) & form.bits;
            wanted[static_cast<size_t>(row * n + i)] = std::bit_cast<float>(cut) * up;
          }
        }
        const OutputArrays out(format, rows, n);
        const ActivationArgs args{.x = gate_up.data(),
                                  .stride = rows == 3 ? stride : 0,
                                  .rows = rows,
                                  .n = n,
                                  .out = out.rows()};
        ASSERT_EQ(activation_quantize(args, {}), cudaSuccess);
        expect_near(out.take(), format, rows, n, wanted);
      }
    }
  }
}

TEST(RowKernels, ClampedSwigluInEveryForm) {
  NIBBLE_NEEDS_GPU();
  constexpr float kLimit = 2.0F;
  uint32_t seed = 950;
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {1, 3, 17}) {
      const auto bits = to_bf16(random_values(static_cast<size_t>(rows * 2 * n), ++seed, 3.0F));
      const DeviceArray<uint16_t> x(bits);
      for (const ActFormat format : kFormats) {
        const SiluForm form = format == ActFormat::kInt8Token ? kSwigluOfInt8 : SiluForm{};
        std::vector<double> wanted;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = 0; i < n; ++i) {
            const auto at = static_cast<size_t>(row * 2 * n + i);
            const double gate = std::min(bf16_to_f32(bits[at]), kLimit);
            const double up = bf16_to_f32(bits[at + static_cast<size_t>(n)]);
            const auto raised =
                static_cast<float>(gate / (1 + std::exp(-kSwigluAlpha * gate)) * form.factor);
            const uint32_t cut = std::bit_cast<uint32_t>(raised) & form.bits;
            wanted.push_back(std::bit_cast<float>(cut) *
                             (std::clamp<double>(up, -kLimit, kLimit) + 1.0));
          }
        }
        const OutputArrays out(format, rows, n);
        ASSERT_EQ(activation_quantize({.x = x.data(),
                                       .kind = Kind::kClampedSwiglu,
                                       .rows = rows,
                                       .n = n,
                                       .out = out.rows(),
                                       .limit = kLimit},
                                      {}),
                  cudaSuccess);
        expect_near(out.take(), format, rows, n, wanted);
      }
    }
  }
}

TEST(RowKernels, RoundsRowsAsTheCpuDoes) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 200;
  for (const int64_t n : kWidths) {
    for (const int64_t rows : {1, 3, 17}) {
      for (const float spread : {1e-3F, 1.0F, 1e20F}) {
        auto bits = to_bf16(random_values(static_cast<size_t>(rows * n), ++seed, spread));
        for (int64_t i = 0; rows > 1 && i < n; ++i) {
          bits[static_cast<size_t>(n + i)] = i % 2 == 0 ? 0x0000 : 0x8000;  // zeros of both signs
        }
        std::vector<float> values;
        for (const uint16_t b : bits) {
          values.push_back(bf16_to_f32(b));
        }
        const DeviceArray<uint16_t> x(bits);
        for (const ActFormat format : {ActFormat::kInt8Token, ActFormat::kFp8Token}) {
          const OutputArrays out(format, rows, n);
          const QuantizeRowsArgs args{.x = x.data(), .rows = rows, .n = n, .out = out.rows()};
          ASSERT_EQ(quantize_rows(args, {}), cudaSuccess);
          const Output result = out.take();
          for (int64_t row = 0; row < rows; ++row) {
            expect_cpu_codes(result, format, row, n, values.data() + row * n);
          }
        }
      }
    }
  }
}

TEST(RowKernels, CopiesRowsSideBySide) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 300;
  for (const int64_t n : {8, 72, 1536, 7168}) {
    for (const int64_t rows : {1, 3, 17, 300}) {
      const int64_t stride = n + 40, first = 8;
      const std::vector<uint16_t> bits =
          to_bf16(random_values(static_cast<size_t>(rows * stride), ++seed, 1.0F));
      const DeviceArray<uint16_t> x(bits);
      const DeviceArray<uint16_t> out(std::vector<uint16_t>(static_cast<size_t>(rows * n) + 8, 7));
      ASSERT_EQ(quantize_rows({.x = x.data() + first,
                               .stride = stride,
                               .rows = rows,
                               .n = n,
                               .out = {ActFormat::kBf16, out.data()}},
                              {}),
                cudaSuccess);
      const std::vector<uint16_t> copied = out.host();
      for (int64_t i = 0; i < rows * n; ++i) {
        ASSERT_EQ(copied[static_cast<size_t>(i)],
                  bits[static_cast<size_t>(i / n * stride + first + i % n)])
            << n << " " << rows << " " << i;
      }
      for (size_t i = static_cast<size_t>(rows * n); i < copied.size(); ++i) {
        ASSERT_EQ(copied[i], 7);
      }
    }
  }
}

TEST(RowKernels, RowsThatAreNotFiniteHaveNanScales) {
  NIBBLE_NEEDS_GPU();
  const int64_t n = 256;
  auto values = random_values(static_cast<size_t>(4 * n), 7, 1.0F);
  values[5] = kInf;
  values[static_cast<size_t>(n) + 200] = -kInf;
  values[static_cast<size_t>(2 * n) + 31] = std::nanf("");
  const DeviceArray<uint16_t> x(to_bf16(values));
  for (const ActFormat format : {ActFormat::kInt8Token, ActFormat::kFp8Token}) {
    const OutputArrays out(format, 4, n);
    ASSERT_EQ(quantize_rows({.x = x.data(), .rows = 4, .n = n, .out = out.rows()}, {}),
              cudaSuccess);
    const Output result = out.take();
    for (size_t row = 0; row < 4; ++row) {
      EXPECT_EQ(std::isnan(result.scales[row]), row < 3) << row;
    }
  }
}

TEST(RowKernels, RoundsToBf16InPlace) {
  NIBBLE_NEEDS_GPU();
  for (const size_t count : {1, 3, 4, 1023, 5000}) {
    auto values = random_values(count, 9, 100.0F);
    values[0] = -kInf;
    const DeviceArray<float> x(values);
    ASSERT_EQ(round_bf16(x.data(), static_cast<int64_t>(count), {}), cudaSuccess);
    const auto result = x.host();
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(result[i], bf16_to_f32(f32_to_bf16(values[i])));
    }
  }
}

TEST(RowKernels, GathersEmbeddings) {
  NIBBLE_NEEDS_GPU();
  const std::vector<int32_t> tokens = {4, 0, 6, -1, 7, 3};  // the table has 7
  const DeviceArray<int32_t> device_tokens(tokens);
  for (const size_t n : {8, 1000, 4104}) {
    const auto values = random_values(7 * n, 11, 1.0F);
    std::vector<uint16_t> halves;
    for (const float value : values) {
      halves.push_back(f32_to_f16(value));
    }
    const DeviceArray<float> f32(values);
    const DeviceArray<uint16_t> f16(halves);
    const DeviceArray<uint16_t> bf16(to_bf16(values));
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const DeviceArray<float> out(tokens.size() * n);
      const void* table = dtype == DType::kF32   ? static_cast<const void*>(f32.data())
                          : dtype == DType::kF16 ? f16.data()
                                                 : bf16.data();
      const EmbeddingArgs args{.table = table,
                               .dtype = dtype,
                               .vocab = 7,
                               .tokens = device_tokens.data(),
                               .rows = static_cast<int64_t>(tokens.size()),
                               .n = static_cast<int64_t>(n),
                               .out = out.data()};
      ASSERT_EQ(gather_embeddings(args, {}), cudaSuccess);
      const auto result = out.host();
      for (size_t row = 0; row < tokens.size(); ++row) {
        for (size_t i = 0; i < n; ++i) {
          const float got = result[row * n + i];
          if (tokens[row] < 0 || tokens[row] >= 7) {
            ASSERT_TRUE(std::isnan(got));
            continue;
          }
          const size_t at = static_cast<size_t>(tokens[row]) * n + i;
          const float want = dtype == DType::kF32   ? values[at]
                             : dtype == DType::kF16 ? f16_to_f32(halves[at])
                                                    : bf16_to_f32(f32_to_bf16(values[at]));
          ASSERT_EQ(got, want);
        }
      }
    }
  }
}

TEST(RowKernels, AddsRowsOfATableOfPositions) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kFirst = 2;
  const std::vector<int32_t> positions = {4, 0, 3, 5, 0};  // the table has 7 rows
  const DeviceArray<int32_t> device_positions(positions);
  for (const size_t n : {8, 1000, 4104}) {
    const auto values = random_values(7 * n, 12, 1.0F);
    const auto given = random_values(positions.size() * n, 13, 1.0F);
    const DeviceArray<uint16_t> table(to_bf16(values));
    const DeviceArray<float> out(given);
    const EmbeddingArgs args{.table = table.data(),
                             .dtype = DType::kBF16,
                             .vocab = 7,
                             .tokens = device_positions.data(),
                             .first = kFirst,
                             .rows = std::ssize(positions),
                             .n = static_cast<int64_t>(n),
                             .out = out.data(),
                             .result = GatherResult::kAdd};
    ASSERT_EQ(gather_embeddings(args, {}), cudaSuccess);
    const auto result = out.host();
    for (size_t row = 0; row < positions.size(); ++row) {
      for (size_t i = 0; i < n; ++i) {
        const float got = result[row * n + i];
        if (positions[row] + kFirst >= 7) {
          ASSERT_TRUE(std::isnan(got));
          continue;
        }
        const size_t at = static_cast<size_t>(positions[row] + kFirst) * n + i;
        ASSERT_EQ(got, given[row * n + i] + bf16_to_f32(f32_to_bf16(values[at])));
      }
    }
  }
}

TEST(RowKernels, RefusesWhatTheyCannotDo) {
  const GemmInput norm{Kind::kRmsNorm};
  EXPECT_EQ(norm_quantize({.norm = norm, .rows = 1, .n = 12}, {}), cudaErrorInvalidValue);
  EXPECT_EQ(norm_quantize({.rows = 1, .n = 8}, {}), cudaErrorInvalidValue);  // plain
  EXPECT_EQ(activation_quantize({.stride = 4, .rows = 1, .n = 8}, {}), cudaErrorInvalidValue);
  EXPECT_EQ(activation_quantize({.kind = Kind::kRmsNorm, .rows = 1, .n = 8}, {}),
            cudaErrorInvalidValue);
  EXPECT_EQ(quantize_rows({.stride = 12, .rows = 1, .n = 8}, {}), cudaErrorInvalidValue);
  EXPECT_EQ(gather_embeddings({.dtype = DType::kI8, .rows = 1, .n = 8}, {}), cudaErrorInvalidValue);
  EXPECT_EQ(round_bf16(nullptr, -1, {}), cudaErrorInvalidValue);
  EXPECT_EQ(norm_quantize({.norm = norm, .rows = 0, .n = 8}, {}), cudaSuccess);
}

}  // namespace
}  // namespace nibble::cuda
