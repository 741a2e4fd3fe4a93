// Norms and activations of rows.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/kernel_table.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/gemm_input.h"
#include "backend/testing/random_gemm.h"
#include "base/f16.h"
#include "quant/hadamard.h"

namespace nibble {
namespace {

/// Numbers around another mean than 0.
std::vector<float> around(float mean, std::vector<float> values) {
  std::ranges::for_each(values, [mean](float& value) { value += mean; });
  return values;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i]))
        << "element " << i << ": " << a[i] << ", " << b[i];
  }
}

/// LayerNorm of a row in double precision.
std::vector<double> layer_norm(std::span<const float> x,
                               std::span<const float> weight,
                               std::span<const float> bias) {
  double mean = 0.0;
  double variance = 0.0;
  for (const float value : x) {
    mean += value / static_cast<double>(x.size());
  }
  for (const float value : x) {
    variance += std::pow(value - mean, 2) / static_cast<double>(x.size());
  }
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back((x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i]);
  }
  return y;
}

TEST(RowKernels, NormAndActivationsEqualTheirFormulasOnEveryInstructionSet) {
  using enum GemmInput::Kind;
  for (const int64_t rows : {1, 3, 17}) {
    for (const int64_t n : {1, 13, 16, 37, 129, 500, 1032}) {
      const auto width = static_cast<size_t>(n);
      const std::vector<float> x = around(3.0F, random_floats(rows * n, 5));
      const std::vector<float> weight = random_floats(n, 6);
      const std::vector<float> bias = random_floats(n, 7);
      std::vector<float> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        const auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        const std::vector<float> norm =
            input_of(*backend, x.data(), rows, n, {kLayerNorm, weight.data(), 1e-5F, bias.data()});
        const std::vector<float> relu = input_of(*backend, x.data(), rows, n, {.kind = kRelu});
        std::vector<float> gelu = input_of(*backend, x.data(), rows, n, {.kind = kGeluTanh});
        for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
          const auto wanted = layer_norm(std::span(x).subspan(row * width, width), weight, bias);
          for (size_t i = 0; i < width; ++i) {
            const double size = 10.0 + std::fabs(wanted[i]);  // what mean and bias cancel
            ASSERT_NEAR(norm[row * width + i], wanted[i], 2e-6 * size) << isa << " " << n;
            ASSERT_EQ(relu[row * width + i], std::fmax(x[row * width + i], 0.0F)) << isa;
            const double exact = exact_activation(kGeluTanh, x[row * width + i], 1.0);
            ASSERT_NEAR(gelu[row * width + i], exact, 4e-7 * std::fabs(exact) + 1e-8) << isa;
          }
        }
        gelu.insert(gelu.end(), norm.begin(), norm.end());
        first = first.empty() ? gelu : first;
        ASSERT_EQ(std::memcmp(gelu.data(), first.data(), gelu.size() * sizeof(float)), 0) << isa;
      }
    }
  }
}

// Bits are those of turn_blocks() on every instruction set, of rows in F32 and BF16, and nothing is
// written behind a row.
TEST(RowKernels, TurnedActivationsAreTurnedInTheSameOrderEverywhere) {
  using enum GemmInput::Kind;
  for (const auto& [n, turn] : std::vector<std::pair<int64_t, int64_t>>{{2, 2},
                                                                        {6, 2},
                                                                        {16, 16},
                                                                        {24, 8},
                                                                        {172, 4},
                                                                        {96, 32},
                                                                        {240, 16},
                                                                        {320, 64},
                                                                        {384, 128},
                                                                        {768, 256},
                                                                        {1536, 512},
                                                                        {1024, 1024},
                                                                        {3072, 1024},
                                                                        {8192, 8192},
                                                                        {14336, 2048},
                                                                        {11008, 256},
                                                                        {1536, 2},
                                                                        {4096, 4096}}) {
    const auto width = static_cast<size_t>(n);
    const std::vector<float> x = random_floats(2 * n, static_cast<uint32_t>(n + turn));
    std::vector<uint16_t> halves;
    std::ranges::transform(x, std::back_inserter(halves), f32_to_bf16);
    for (const GemmInput::Kind kind : {kSiluMul, kRelu, kGeluTanh, kClampedSwiglu}) {
      for (const bool bf16 : {false, true}) {
        const cpu::ConstNumbers given = {bf16 ? static_cast<const void*>(halves.data()) : x.data(),
                                         bf16 ? cpu::Element::kBf16 : cpu::Element::kF32};
        for (const std::string_view isa : cpu::supported_isas()) {
          const cpu::KernelTable& kernels = *cpu::find_kernels(isa).value();
          cpu::InputRow row{
              .x = given, .k = n, .input = {.kind = kind, .limit = 7.0F}, .silu = kSiluOfInt8};
          std::vector<float> wanted(width);
          kernels.make_input(row, wanted.data());
          turn_blocks(wanted.data(), n, turn);
          row.input.turn = turn;
          std::vector<float> turned(width + 1, 7.0F);
          kernels.make_input(row, turned.data());
          EXPECT_EQ(turned.back(), 7.0F) << isa << " " << n;
          turned.pop_back();
          expect_same_bits(turned, wanted);
        }
      }
    }
  }
}

/// A row's sum in the order of a GPU's block: a thread's pieces of eight, then warps of 32 threads
/// by halves, then warps. `add` adds a value to a sum.
template <typename Add>
float sum_of_block(const std::vector<float>& x, const Add& add) {
  const size_t pieces = (x.size() + 7) / 8;
  const size_t each = pieces <= 512 ? 1 : pieces <= 1024 ? 2 : 4;
  const size_t threads = std::min<size_t>(((pieces + each - 1) / each + 31) / 32 * 32, 1024);
  std::vector<float> sums(threads);
  for (size_t i = 0; i < x.size(); ++i) {
    float& sum = sums[i / 8 % threads];
    sum = add(sum, x[i]);
  }
  const auto of_warp = [](std::vector<float> v) {
    for (size_t half = 16; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) {
        v[i] += v[i + half];
      }
    }
    return v[0];
  };
  std::vector<float> warps(32);
  for (size_t w = 0; w < threads / 32; ++w) {
    const float* lanes = sums.data() + 32 * w;
    warps[w] = of_warp(std::vector<float>(lanes, lanes + 32));
  }
  return of_warp(warps);
}

TEST(RowKernels, LayerNormsAddAsGpusDo) {
  for (const int64_t n : {136, 256, 264, 768, 4096, 4104, 8192, 9216, 14336, 40960}) {
    const std::vector<float> x = around(1.0F, random_floats(n, 17));
    const std::vector<float> weight = random_floats(n, 18);
    const std::vector<float> bias = random_floats(n, 19);
    const auto count = static_cast<float>(n);
    const float mean = sum_of_block(x, [](float sum, float v) { return sum + v; }) / count;
    std::vector<float> centred(x.size());
    std::ranges::transform(x, centred.begin(), [&](float value) { return value - mean; });
    const float variance =
        sum_of_block(centred, [](float sum, float v) { return std::fma(v, v, sum); }) / count;
    const float factor = 1.0F / std::sqrt(variance + 1e-5F);
    for (const std::string_view isa : cpu::supported_isas()) {
      std::vector<float> y = x;  // in place
      cpu::find_kernels(isa).value()->make_input(
          {.x = {y.data(), cpu::Element::kF32},
           .k = n,
           .input = {GemmInput::Kind::kLayerNorm, weight.data(), 1e-5F, bias.data()}},
          y.data());
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(y[i], std::fma(centred[i] * factor, weight[i], bias[i])) << isa << " " << n;
      }
    }
  }
}

TEST(RowKernels, ReluKeepsWhatIsNoNumber) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {std::nanf(""), -std::nanf(""), kInf, -kInf, -1e-45F, 1e-45F, -3.0F};
  for (const std::string_view isa : cpu::supported_isas()) {
    std::vector<float> y(x.size(), 7.0F);
    cpu::find_kernels(isa).value()->make_input({.x = {x.data(), cpu::Element::kF32},
                                                .k = static_cast<int64_t>(x.size()),
                                                .input = {GemmInput::Kind::kRelu}},
                                               y.data());
    EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1])) << isa;
    EXPECT_EQ(std::vector<float>(y.begin() + 2, y.end()),
              (std::vector<float>{kInf, 0.0F, 0.0F, 1e-45F, 0.0F}))
        << isa;
  }
}

TEST(RowKernels, EqualTheirFormulasOnEveryInstructionSet) {
  constexpr int64_t kRows = 3;
  for (const int64_t n : {1, 16, 37, 500}) {
    const std::vector<float> x = random_floats(kRows * 2 * n, 5);
    const std::vector<float> weight = random_floats(n, 6);
    std::vector<float> first;
    for (const std::string_view isa : cpu::supported_isas()) {
      auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)});
      using enum GemmInput::Kind;
      const std::vector<float> norm =
          input_of(**backend, x.data(), kRows, n, {kRmsNorm, weight.data(), 1e-5F});
      const std::vector<float> silu = input_of(**backend, x.data(), kRows, n, {.kind = kSiluMul});
      for (int64_t r = 0; r < kRows; ++r) {
        double squares = 0.0;
        for (int64_t i = 0; i < n; ++i) {
          squares += std::pow(static_cast<double>(x[static_cast<size_t>(r * n + i)]), 2);
        }
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<size_t>(r * n + i);
          const double expected = x[at] * factor * weight[static_cast<size_t>(i)];
          ASSERT_NEAR(norm[at], expected, 1e-6 + 2e-6 * std::fabs(expected));
          const double gate = x[static_cast<size_t>(2 * r * n + i)];
          const double product =
              gate / (1.0 + std::exp(-gate)) * x[static_cast<size_t>((2 * r + 1) * n + i)];
          ASSERT_NEAR(silu[at], product, 1e-7 + 1e-6 * std::fabs(product));
        }
      }
      std::vector<float> all = norm;
      all.insert(all.end(), silu.begin(), silu.end());
      if (!first.empty()) {
        expect_same_bits(first, all);
      }
      first = all;
    }
  }
}

/// Sum of squares of a row in the order of a GPU's block: a thread's pieces of eight, then warps of
/// 32 threads by halves, then warps.
float sum_of_squares(const std::vector<float>& x) {
  const size_t pieces = (x.size() + 7) / 8;
  const size_t each = pieces <= 512 ? 1 : pieces <= 1024 ? 2 : 4;
  const size_t threads = std::min<size_t>(((pieces + each - 1) / each + 31) / 32 * 32, 1024);
  std::vector<float> sums(threads);
  for (size_t p = 0; p < pieces; ++p) {
    for (size_t i = 8 * p; i < std::min(8 * p + 8, x.size()); ++i) {
      sums[p % threads] = std::fma(x[i], x[i], sums[p % threads]);
    }
  }
  const auto of_warp = [](const float* lanes) {
    std::vector<float> v(lanes, lanes + 32);
    for (size_t half = 16; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) {
        v[i] += v[i + half];
      }
    }
    return v[0];
  };
  float warps[32] = {};
  for (size_t w = 0; w < threads / 32; ++w) {
    warps[w] = of_warp(sums.data() + 32 * w);
  }
  return of_warp(warps);
}

TEST(RowKernels, NormsAddSquaresAsGpusDo) {
  for (const int64_t n : {136, 256, 264, 4096, 4104, 8192, 14336, 40960}) {
    const std::vector<float> x = random_floats(n, 17);
    const std::vector<float> ones(static_cast<size_t>(n), 1.0F);
    const float factor = 1.0F / std::sqrt(sum_of_squares(x) / static_cast<float>(n) + 1e-5F);
    for (const std::string_view isa : cpu::supported_isas()) {
      std::vector<float> y(x.size());
      cpu::find_kernels(isa).value()->rms_norm(x.data(), n, ones.data(), 1e-5F, y.data());
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(y[i], x[i] * factor) << isa << " " << n;
      }
    }
  }
}

TEST(RowKernels, RoundRowsToPlacesOfTheirLargest) {
  for (const int64_t n : {16, 24, 64, 128, 256}) {
    const std::vector<float> x = random_floats(n, 3);
    float largest = 0.0F;
    for (const float value : x) {
      largest = std::max(largest, std::fabs(value));
    }
    const float unit = std::ldexp(1.0F, std::ilogb(largest) - kKeyPlaces);
    for (const std::string_view isa : cpu::supported_isas()) {
      std::vector<float> y = x;
      cpu::find_kernels(isa).value()->round_row(y.data(), n, kKeyPlaces);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(y[i], std::nearbyint(x[i] / unit) * unit) << isa << " " << n;
      }
      std::vector<float> zeros(x.size());
      cpu::find_kernels(isa).value()->round_row(zeros.data(), n, kKeyPlaces);
      ASSERT_EQ(zeros, std::vector<float>(x.size()));
    }
  }
}

TEST(RowKernels, SiluOfInt8IsTheExactOneCutForAllGatesInBf16) {
  std::vector<uint16_t> gate_up;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float gate = bf16_to_f32(static_cast<uint16_t>(bits));
    if (gate > -87.0F && std::fabs(gate) > 1e-35F && std::fabs(gate) < 1e35F) {
      gate_up.push_back(static_cast<uint16_t>(bits));
    }
  }
  const size_t n = gate_up.size();
  ASSERT_GT(n, 45000U);
  gate_up.resize(2 * n, f32_to_bf16(1.0F));
  for (const std::string_view isa : cpu::supported_isas()) {
    std::vector<float> y(n);
    cpu::find_kernels(isa).value()->make_input({.x = {gate_up.data(), cpu::Element::kBf16},
                                                .k = static_cast<int64_t>(n),
                                                .input = {GemmInput::Kind::kSiluMul},
                                                .silu = kSiluOfInt8},
                                               y.data());
    for (size_t i = 0; i < n; ++i) {
      const double gate = bf16_to_f32(gate_up[i]);
      const double raised = gate / (1.0 + std::exp(-gate)) * kSiluOfInt8.factor;
      const double unit = std::ldexp(1.0, std::ilogb(raised) - 11);
      ASSERT_EQ(y[i], std::trunc(raised / unit) * unit) << isa << ", gate " << gate;
    }
  }
}

TEST(RowKernels, SiluKeepsItsLimits) {
  const float gates[] = {-1000.0F, -90.0F, 0.0F, 90.0F, 1000.0F};
  for (const std::string_view isa : cpu::supported_isas()) {
    auto backend = make_cpu_backend({.threads = 1, .isa = std::string(isa)});
    for (const float gate : gates) {
      const float pair[] = {gate, 1.0F};
      const float y = input_of(**backend, pair, 1, 1, {.kind = GemmInput::Kind::kSiluMul})[0];
      EXPECT_NEAR(y, gate > 0.0F ? gate : 0.0F, 1e-30F);
    }
  }
}

// Of every gate in BF16: in front of INT8 its bits are those of exact arithmetic, cut.
TEST(RowKernels, ClampedSwigluOfInt8IsCutWhereExactArithmeticIs) {
  std::vector<uint16_t> gate_up;
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float gate = bf16_to_f32(static_cast<uint16_t>(bits));
    if (gate > -50.0F && std::fabs(gate) > 1e-35F && std::fabs(gate) < 1e35F) {
      gate_up.push_back(static_cast<uint16_t>(bits));
    }
  }
  const size_t n = gate_up.size();
  ASSERT_GT(n, 45000U);
  gate_up.resize(2 * n, f32_to_bf16(0.0F));
  for (const std::string_view isa : cpu::supported_isas()) {
    std::vector<float> y(n);
    cpu::find_kernels(isa).value()->make_input(
        {.x = {gate_up.data(), cpu::Element::kBf16},
         .k = static_cast<int64_t>(n),
         .input = {.kind = GemmInput::Kind::kClampedSwiglu, .limit = 1e36F},
         .silu = kSwigluOfInt8},
        y.data());
    for (size_t i = 0; i < n; ++i) {
      const float gate = bf16_to_f32(gate_up[i]);
      const double power = gate * kSwigluAlpha;
      const double raised = gate / (1.0 + std::exp(-power)) * kSwigluOfInt8.factor;
      const double unit = std::ldexp(1.0, std::ilogb(raised) - 11);
      ASSERT_EQ(y[i], std::trunc(raised / unit) * unit) << isa << ", gate " << gate;
    }
  }
}

TEST(RowKernels, ClampedSwigluIsThatOfGptOss) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> numbers = {-1000.0F, -kInf, -7.5F, -7.0F, -1.0F, -0.25F, 0.0F,
                                      1e-3F,    1.0F,  6.5F,  7.0F,  7.25F, 1e30F,  kInf};
  std::vector<float> gate_up;
  std::vector<double> wanted;
  for (const float gate : numbers) {
    for (const float up : numbers) {
      if (gate != -kInf) {  // -inf * 0
        gate_up.push_back(gate);
        wanted.push_back(exact_activation(GemmInput::Kind::kClampedSwiglu, gate, up, 7.0));
      }
    }
  }
  for (const float gate : numbers) {
    if (gate != -kInf) {
      gate_up.insert(gate_up.end(), numbers.begin(), numbers.end());
    }
  }
  const auto n = static_cast<int64_t>(wanted.size());
  for (const std::string_view isa : cpu::supported_isas()) {
    auto backend = make_cpu_backend({.threads = 1, .isa = std::string(isa)});
    const std::vector<float> y = input_of(**backend, gate_up.data(), 1, n,
                                          {.kind = GemmInput::Kind::kClampedSwiglu, .limit = 7.0F});
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_NEAR(y[i], wanted[i], 1e-6 * std::fabs(wanted[i]) + 1e-30) << isa << " " << i;
    }
  }
  const float nan[] = {std::numeric_limits<float>::quiet_NaN(), 1.0F};
  for (const std::string_view isa : cpu::supported_isas()) {
    auto backend = make_cpu_backend({.threads = 1, .isa = std::string(isa)});
    EXPECT_TRUE(std::isnan(input_of(**backend, nan, 1, 1,
                                    {.kind = GemmInput::Kind::kClampedSwiglu, .limit = 7.0F})[0]));
  }
}

// PyTorch's values of gelu(x, approximate="tanh"), in double precision.
TEST(RowKernels, GeluEqualsPytorch) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {-3.0F, -1.0F, -0.5F, 0.0F, 0.5F, 1.0F, 3.0F, 1e30F, -1e30F, kInf};
  const std::vector<float> wanted = {
      -0.00363739208F, -0.158808009F, -0.15428599F, 0.0F, 0.34571401F,
      0.841191991F,    2.99636261F,   1e30F,        0.0F, kInf};
  for (const std::string_view isa : cpu::supported_isas()) {
    std::vector<float> y(x.size() + 1, 7.0F);
    std::vector<float> with_nan = x;
    with_nan.push_back(std::nanf(""));
    cpu::find_kernels(isa).value()->make_input({.x = {with_nan.data(), cpu::Element::kF32},
                                                .k = static_cast<int64_t>(y.size()),
                                                .input = {GemmInput::Kind::kGeluTanh}},
                                               y.data());
    for (size_t i = 0; i + 1 < x.size(); ++i) {
      EXPECT_NEAR(y[i], wanted[i], 4e-7 * std::fabs(wanted[i]) + 1e-9) << isa << " " << x[i];
    }
    EXPECT_EQ(y[x.size() - 1], kInf) << isa;
    EXPECT_TRUE(std::isnan(y.back())) << isa;
  }
}

}  // namespace
}  // namespace nibble
