// Norms with a mean and activations without a gate; those of most decoders are in
// attention_test.cc.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/gemm_input.h"

namespace nibble {
namespace {

std::vector<float> random_floats(int64_t count, uint32_t seed, float mean = 0.0F) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, 1.0F);
  std::vector<float> values(static_cast<size_t>(count));
  std::ranges::generate(values, [&] { return normal(random); });
  return values;
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
      const std::vector<float> x = random_floats(rows * n, 5, 3.0F);
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
    const std::vector<float> x = random_floats(n, 17, 1.0F);
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
