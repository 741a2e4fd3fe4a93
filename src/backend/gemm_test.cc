#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/gemm_input.h"
#include "backend/testing/random_gemm.h"
#include "base/f16.h"
#include "core/buffer.h"

namespace nibble {
namespace {

constexpr Problem kProblems[] = {{1, 8},     {15, 40}, {17, 128}, {48, 344},  {33, 13},
                                 {100, 256}, {16, 32}, {5, 1024}, {300, 1152}};

bool fits(const WeightFormat& format, int64_t k) {
  return format.scale_per != ScalePer::kGroup || k % format.group_size == 0;
}

/// The schemes of the table that the backend runs, and formats that foreign checkpoints bring.
std::vector<QuantScheme> tested_schemes() {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  std::vector<QuantScheme> schemes;
  for (const QuantScheme& scheme : all_schemes()) {
    if (!in_blocks(scheme.act) &&  // which block_acts_test.cc has
        backend->check_gemm(scheme.weight, scheme.act, 1024).ok()) {
      schemes.push_back(scheme);
    }
  }
  using enum WeightCode;
  using enum ScalePer;
  schemes.push_back({"f32", {kF32, kNone, 0, DType::kF32}});
  schemes.push_back({"f16", {kF16, kNone, 0, DType::kF32}});
  schemes.push_back({"bf16 activations", {kBf16, kNone, 0, DType::kF32}, ActFormat::kBf16});
  schemes.push_back({"w4a16, bf16", {kInt4, kGroup, 32, DType::kBF16}, ActFormat::kBf16});
  schemes.push_back({"groups of 64, bf16", {kInt4, kGroup, 64, DType::kF32}, ActFormat::kBf16});
  schemes.push_back({"groups of 128, bf16", {kInt4, kGroup, 128, DType::kBF16}, ActFormat::kBf16});
  schemes.push_back({"int8 weights only", {kInt8, kChannel, 0, DType::kF32}});
  schemes.push_back({"int8 weights, bf16", {kInt8, kChannel, 0, DType::kBF16}, ActFormat::kBf16});
  schemes.push_back({"fp8 weights only", {kFp8E4M3, kChannel, 0, DType::kF32}});
  schemes.push_back({"int4, groups of 8, f32 scales", {kInt4, kGroup, 8, DType::kF32}});
  schemes.push_back({"int4, groups of 64", {kInt4, kGroup, 64, DType::kBF16}});
  constexpr auto kZeros = ZeroPoints::kPerScale;
  for (const int group : {32, 64, 128}) {
    schemes.push_back(
        {"zero points, bf16", {kInt4, kGroup, group, DType::kF32, kZeros}, ActFormat::kBf16});
  }
  schemes.push_back({"a zero point per channel", {kInt4, kChannel, 0, DType::kF32, kZeros}});
  schemes.push_back({"groups of 16 with zero points", {kInt4, kGroup, 16, DType::kF32, kZeros}});
  schemes.push_back({"int8 with zero points", {kInt8, kGroup, 32, DType::kF32, kZeros}});
  schemes.push_back({"int8, groups", {kInt8, kGroup, 32, DType::kF32}});
  schemes.push_back({"fp8, groups of E8M0", {kFp8E4M3, kGroup, 32, DType::kF8E8M0}});
  schemes.push_back({"nvfp4", {kFp4E2M1, kGroup, 16, DType::kF32}});
  constexpr auto kMinimum = ZeroPoints::kMinimum;
  for (const ActFormat act : {ActFormat::kFloat, ActFormat::kBf16}) {
    schemes.push_back({"Q4_0", {kInt4, kGroup, 32, DType::kF16}, act});
    schemes.push_back({"Q4_1", {kInt4, kGroup, 32, DType::kF16, kMinimum}, act});
    schemes.push_back({"Q8_0", {kInt8, kGroup, 32, DType::kF16}, act});
  }
  schemes.push_back(
      {"minimums in groups of 128", {kInt4, kGroup, 128, DType::kF32, kMinimum}, ActFormat::kBf16});
  schemes.push_back({"minimums in groups of 8", {kInt4, kGroup, 8, DType::kBF16, kMinimum}});
  schemes.push_back({"a minimum per channel", {kInt4, kChannel, 0, DType::kF32, kMinimum}});
  schemes.push_back({"fp8, F16 scales", {kFp8E4M3, kChannel, 0, DType::kF16}});
  schemes.push_back({"mxfp4, bf16", {kFp4E2M1, kGroup, 32, DType::kF8E8M0}, ActFormat::kBf16});
  return schemes;
}

/// Whether CPUs round the activations of this product to fixed point.
bool takes_fixed(const QuantScheme& scheme, int64_t k) {
  const int group = scheme.weight.group_size;
  return scheme.act == ActFormat::kBf16 && scheme.weight.code == WeightCode::kInt4 && group < k &&
         (group == 32 || group == 64 || group == 128);
}

float largest_of(const float* x, int64_t count) {
  float largest = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::isfinite(x[i]) ? std::max(largest, std::fabs(x[i])) : 0x1p127F;
  }
  return largest;
}

/// BF16 numbers rounded to multiples of 2^-13 of the power of two in the largest of their group.
std::vector<float> in_fixed_point(std::vector<float> x, int64_t group) {
  for (auto at = x.begin(); at != x.end(); at += group) {
    std::transform(at, at + group, at, [](float v) { return bf16_to_f32(f32_to_bf16(v)); });
    const float largest = largest_of(&*at, group);
    const int exponent = largest > 0x1p-100F ? std::ilogb(largest) : -100;
    std::transform(at, at + group, at, [&](double v) {
      const double unit = std::ldexp(1.0, exponent - 13);
      return static_cast<float>(largest < 0x1p104F ? std::nearbyint(v / unit) * unit : NAN);
    });
  }
  return x;
}

class Gemm : public testing::Test {
 protected:
  void SetUp() override { open_backends(backends_, false); }

  static void open_backends(std::vector<std::unique_ptr<Backend>>& backends, bool exact) {
    for (const std::string_view isa : cpu::supported_isas()) {
      auto backend = make_cpu_backend({.threads = 3,
                                       .isa = std::string(isa),
                                       .limit = ThreadLimit::kNone,
                                       .exact_activations = exact});
      ASSERT_TRUE(backend.ok());
      backends.push_back(std::move(backend).value());
    }
  }

  /// Product of one backend into poisoned memory with unused columns that must stay poisoned.
  std::vector<float> product(PreparedGemm& gemm,
                             Problem shape,
                             const std::vector<float>& x,
                             int64_t m) {
    const int64_t stride = shape.n + 3;
    std::vector<float> padded(static_cast<size_t>(m * stride),
                              std::numeric_limits<float>::quiet_NaN());
    gemm.run({.x = x.data(), .x_stride = shape.k, .m = m, .y = padded.data(), .y_stride = stride});
    std::vector<float> y;
    for (int64_t r = 0; r < m; ++r) {
      const auto row = padded.begin() + r * stride;
      y.insert(y.end(), row, row + shape.n);
      for (int64_t i = shape.n; i < stride; ++i) {
        EXPECT_TRUE(std::isnan(row[i])) << "column past n was written";
      }
    }
    return y;
  }

  std::vector<std::unique_ptr<Backend>> backends_;
};

std::vector<float> reference(const QuantScheme& scheme,
                             const QuantTensor& weight,
                             const std::vector<float>& x,
                             int64_t m) {
  const std::vector<float> seen =
      takes_fixed(scheme, weight.k) ? in_fixed_point(x, scheme.weight.group_size) : x;
  std::vector<float> y(static_cast<size_t>(m * weight.n));
  reference_gemm(
      weight, scheme.act,
      {.x = seen.data(), .x_stride = weight.k, .m = m, .y = y.data(), .y_stride = weight.n});
  return y;
}

const std::vector<QuantScheme>& schemes_in_fixed_point() {
  using enum ScalePer;
  constexpr ActFormat kAct = ActFormat::kBf16;
  static const std::vector<QuantScheme> schemes = {
      {"groups of 32", {WeightCode::kInt4, kGroup, 32, DType::kBF16}, kAct},
      {"groups of 64", {WeightCode::kInt4, kGroup, 64, DType::kF32}, kAct},
      {"groups of 128", {WeightCode::kInt4, kGroup, 128, DType::kBF16}, kAct},
      {"with zero points",
       {WeightCode::kInt4, kGroup, 64, DType::kF32, ZeroPoints::kPerScale},
       kAct},
      {"Q4_0", {WeightCode::kInt4, kGroup, 32, DType::kF16}, kAct},
      {"Q4_1", {WeightCode::kInt4, kGroup, 32, DType::kF16, ZeroPoints::kMinimum}, kAct},
      {"with minimums", {WeightCode::kInt4, kGroup, 128, DType::kF32, ZeroPoints::kMinimum}, kAct}};
  return schemes;
}

TEST_F(Gemm, EqualsTheReferenceAndAllInstructionSetsAgree) {
  for (const QuantScheme& scheme : tested_schemes()) {
    for (const Problem shape : kProblems) {
      if (!fits(scheme.weight, shape.k)) {
        continue;
      }
      SCOPED_TRACE(testing::Message() << scheme.name << " n=" << shape.n << " k=" << shape.k);
      auto weight = random_weight(scheme.weight, shape, 7);
      ASSERT_TRUE(weight.ok());
      constexpr int64_t kMost = 33;
      const std::vector<float> x = random_floats(kMost * shape.k, 3);
      const std::vector<float> expected = reference(scheme, *weight, x, kMost);
      double largest = 0.0;
      for (const float value : expected) {
        largest = std::max(largest, std::fabs(static_cast<double>(value)));
      }
      const double tolerance = 4e-7 * std::sqrt(static_cast<double>(shape.k)) * largest + 1e-30;
      std::vector<float> first;
      for (auto& backend : backends_) {
        SCOPED_TRACE(backend->name());
        auto copy = random_weight(scheme.weight, shape, 7);
        auto gemm = backend->prepare_gemm(*copy, scheme.act, kMost);
        ASSERT_TRUE(gemm.ok()) << gemm.status().message();
        for (const int64_t m : {33, 17, 16, 7, 6, 3, 2, 1}) {
          const std::vector<float> y = product(**gemm, shape, x, m);
          for (size_t i = 0; i < y.size(); ++i) {
            ASSERT_NEAR(y[i], expected[i], tolerance) << "element " << i << " m=" << m;
          }
          if (first.empty()) {
            first = y;
          }
          ASSERT_EQ(std::memcmp(y.data(), first.data(), y.size() * 4), 0) << "m=" << m;
        }
      }
    }
  }
}

// The largest products of either sign in every column: what is summed in 16 bits must not overflow.
TEST_F(Gemm, ExtremeIntegersAreSummedExactly) {
  constexpr int64_t kRows = 7;
  for (const QuantScheme& scheme : tested_schemes()) {
    if (scheme.act != ActFormat::kInt8Token) {
      continue;
    }
    const Problem shape{33, scheme.weight.grouped() ? 1280 : 1224};
    std::vector<float> x(static_cast<size_t>(kRows * shape.k));
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t row = i / static_cast<size_t>(shape.k);
      const bool negative = row % 3 == 1 || (row % 3 == 2 && i % 2 == 0);
      x[i] = negative ? -1.0F : 1.0F;
    }
    for (const uint8_t codes : {0x00, 0x88, 0x77, 0x87, 0xff, 0x80, 0x7f}) {
      SCOPED_TRACE(testing::Message() << scheme.name << " codes " << int{codes});
      QuantTensor weight = random_weight(scheme.weight, shape, 1).value();
      std::memset(weight.codes.data(), codes, weight.codes.size());
      std::ranges::fill(weight.scales.as<float>(), 1.0F);
      std::ranges::transform(weight.zeros.as<int8_t>(), weight.scales.as<float>().begin(),
                             [](int8_t zero) { return static_cast<float>(most_step(zero)); });
      const std::vector<float> expected = reference(scheme, weight, x, kRows);
      for (auto& backend : backends_) {
        auto gemm = backend->prepare_gemm(weight, scheme.act, kRows).value();
        for (const int64_t m : {kRows, int64_t{2}, int64_t{1}}) {
          const std::vector<float> y = product(*gemm, shape, x, m);
          EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0)
              << backend->name() << " m=" << m;
        }
      }
    }
  }
}

/// Rows whose groups have outliers, are zero, tiny, huge, at either end of the codes, or not
/// finite.
std::vector<float> rows_of_all_magnitudes(int64_t rows, int64_t k) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kFactors[] = {1.0F, 0.0F, 1e-36F, 1e-30F, 1e26F, 1e-41F, 3e-20F};
  constexpr float kSpoiled[] = {kInfinity, -kInfinity, NAN, 2.5e31F, -3e38F};
  std::vector<float> x = random_floats(rows * k, 21);
  for (int64_t row = 0; row < rows; ++row) {
    float* values = &x[static_cast<size_t>(row * k)];
    for (int64_t i = 0; i < k; ++i) {
      values[i] *= kFactors[(row + i / 32) % 7];
      values[i] = row % 5 == 1 ? std::copysign(1.9921875F, i % 3 == 0 ? values[i] : 1) : values[i];
      values[i] *= row % 3 == 1 && i % 32 == row % 32 ? 1e4F : 1.0F;
    }
    if (row % 4 == 3) {
      values[(row * 37) % k] = kSpoiled[row / 4 % 5];
    }
  }
  return x;
}

TEST_F(Gemm, FixedPointIsExactForAllMagnitudes) {
  constexpr int64_t kRows = 35;
  const Problem shape{33, 640};
  const std::vector<float> x = rows_of_all_magnitudes(kRows, shape.k);
  for (const QuantScheme& scheme : schemes_in_fixed_point()) {
    SCOPED_TRACE(scheme.name);
    QuantTensor weight = random_weight(scheme.weight, shape, 22).value();
    std::memset(weight.codes.data(), 0, 2 * static_cast<size_t>(weight.row_bytes()));  // -8
    const std::vector<float> expected = reference(scheme, weight, x, kRows);
    std::vector<float> first;
    for (auto& backend : backends_) {
      SCOPED_TRACE(backend->name());
      auto gemm = backend->prepare_gemm(weight, scheme.act, kRows).value();
      for (const int64_t m : {35, 17, 8, 5, 4, 3, 2, 1}) {
        const std::vector<float> y = product(*gemm, shape, x, m);
        first = first.empty() ? y : first;
        for (size_t i = 0; i < y.size(); ++i) {
          const size_t row = i / static_cast<size_t>(shape.n);
          ASSERT_EQ(std::isnan(y[i]), row % 4 == 3) << "element " << i << " m=" << m;
          if (row % 4 != 3) {
            const float* of_row = &expected[row * static_cast<size_t>(shape.n)];
            ASSERT_NEAR(y[i], expected[i], 4e-6 * largest_of(of_row, shape.n)) << i << " m=" << m;
            ASSERT_EQ(y[i], first[i]) << "element " << i << " m=" << m;
          }
        }
      }
    }
  }
}

TEST_F(Gemm, FixedPointHoldsTheLargestSums) {
  const Problem shape{17, 256};
  for (const QuantScheme& scheme : schemes_in_fixed_point()) {
    QuantTensor weight = random_weight(scheme.weight, shape, 25).value();
    std::memset(weight.codes.data(), 0xff, static_cast<size_t>(shape.n * weight.row_bytes()));
    for (const float value : {1.9921875F, -1.9921875F}) {
      const std::vector<float> x(static_cast<size_t>(3 * shape.k), value);
      const std::vector<float> expected = reference(scheme, weight, x, 3);
      for (auto& backend : backends_) {
        auto gemm = backend->prepare_gemm(weight, scheme.act, 3).value();
        for (const int64_t m : {1, 3}) {
          const std::vector<float> y = product(*gemm, shape, x, m);
          for (size_t i = 0; i < y.size(); ++i) {
            ASSERT_NEAR(y[i], expected[i], 4e-6 * std::fabs(expected[i]))
                << scheme.name << " on " << backend->name() << ", element " << i;
          }
        }
      }
    }
  }
}

// Half a unit for each activation, which is 2^-14 of the group's largest.
TEST_F(Gemm, FixedPointIsAsCloseToBf16AsItSays) {
  const Problem shape{64, 1024};
  constexpr int64_t kRows = 5;
  std::vector<float> x = random_floats(kRows * shape.k, 23);
  for (size_t i = 0; i < x.size(); i += 50) {
    x[i] *= 300.0F;
  }
  for (const QuantScheme& scheme : schemes_in_fixed_point()) {
    const int64_t group = scheme.weight.group_size;
    const QuantTensor weight = random_weight(scheme.weight, shape, 24).value();
    std::vector<float> largest(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const auto size = static_cast<size_t>(group);
      largest[i] = bf16_to_f32(f32_to_bf16(largest_of(&x[i / size * size], group)));
    }
    QuantTensor magnitudes = random_weight(scheme.weight, shape, 24).value();
    for (std::byte& pair : magnitudes.codes.as<std::byte>()) {  // q + 8 to |q| + 8
      const int low = std::abs(static_cast<int>(pair & std::byte{15}) - 8);
      const int high = std::abs(static_cast<int>(pair >> 4) - 8);
      pair = static_cast<std::byte>(std::min(low + 8, 15) | std::min(high + 8, 15) << 4);
    }
    const std::vector<float> sums = reference({"", {}, ActFormat::kFloat}, magnitudes, largest, 5);
    std::vector<float> bf16(sums.size());
    reference_gemm(
        weight, ActFormat::kBf16,
        {.x = x.data(), .x_stride = shape.k, .m = kRows, .y = bf16.data(), .y_stride = shape.n});
    auto gemm = backends_.back()->prepare_gemm(weight, scheme.act, kRows).value();
    const std::vector<float> y = product(*gemm, shape, x, kRows);
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], bf16[i], 0x1p-14 * 8 / 7 * sums[i]) << scheme.name << " element " << i;
    }
  }
}

TEST_F(Gemm, ExactActivationsGiveTheBitsOfBf16NumbersInF32) {
  constexpr int64_t kRows = 18;
  const Problem shape{33, 640};
  std::vector<float> x = random_floats(kRows * shape.k, 26);
  for (size_t i = 0; i < x.size(); i += 50) {
    x[i] *= 1e4F;
  }
  const std::vector<float> rounded = to_f32(to_bf16(x));
  std::vector<std::unique_ptr<Backend>> exact;
  open_backends(exact, true);
  for (const QuantScheme& scheme : schemes_in_fixed_point()) {
    const QuantTensor weight = random_weight(scheme.weight, shape, 25).value();
    auto floats = backends_[0]->prepare_gemm(weight, ActFormat::kFloat, kRows).value();
    const std::vector<float> expected = product(*floats, shape, rounded, kRows);
    for (auto& backend : exact) {
      auto gemm = backend->prepare_gemm(weight, scheme.act, kRows).value();
      for (const int64_t m : {kRows, int64_t{2}, int64_t{1}}) {
        const std::vector<float> y = product(*gemm, shape, x, m);
        ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0)
            << backend->name() << " " << scheme.name << " m=" << m;
      }
    }
  }
}

TEST_F(Gemm, RunsEverySchemeOfTheTable) {
  for (const QuantScheme& scheme : all_schemes()) {
    const Status status = backends_[0]->check_gemm(scheme.weight, scheme.act, 256);
    EXPECT_TRUE(status.ok()) << scheme.name << ": " << status.message();
  }
}

TEST_F(Gemm, AddsToWhatIsThere) {
  const QuantScheme scheme = *find_scheme("w4a16_g32");
  const Problem shape{19, 64};
  const std::vector<float> x = random_floats(2 * shape.k, 1);
  for (auto& backend : backends_) {
    auto gemm =
        backend->prepare_gemm(random_weight(scheme.weight, shape, 2).value(), scheme.act, 2);
    ASSERT_TRUE(gemm.ok());
    const std::vector<float> y = product(**gemm, shape, x, 2);
    std::vector<float> sum(y.size(), 5.0F);
    (*gemm)->run({.x = x.data(),
                  .x_stride = shape.k,
                  .m = 2,
                  .y = sum.data(),
                  .y_stride = shape.n,
                  .output = GemmOutput::kAdd});
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(sum[i], 5.0F + y[i]);
    }
    const std::vector<float> bias = random_floats(shape.n, 3);
    (*gemm)->run({.x = x.data(),
                  .x_stride = shape.k,
                  .m = 2,
                  .y = sum.data(),
                  .y_stride = shape.n,
                  .bias = bias.data()});
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(sum[i], y[i] + bias[i % bias.size()]);
    }
  }
}

TEST_F(Gemm, ManyRowsGiveTheBitsOfEachAlone) {
  constexpr int64_t kRows = 600;  // more than a tile task takes
  const Problem shape{40, 640};
  const std::vector<float> x = random_floats(kRows * shape.k, 1);
  for (const QuantScheme& scheme : tested_schemes()) {
    Backend& backend = *backends_.back();
    auto gemm =
        backend.prepare_gemm(random_weight(scheme.weight, shape, 2).value(), scheme.act, kRows);
    ASSERT_TRUE(gemm.ok());
    const std::vector<float> all = product(**gemm, shape, x, kRows);
    for (const int64_t row : {0, 15, 16, 511, 512, 599}) {
      const auto begin = x.begin() + row * shape.k;
      const std::vector<float> alone = product(**gemm, shape, {begin, begin + shape.k}, 1);
      EXPECT_EQ(
          std::memcmp(alone.data(), &all[static_cast<size_t>(row * shape.n)], alone.size() * 4), 0)
          << scheme.name << " row " << row;
    }
  }
}

// So large that they pass by the caches on their way to memory; k takes several blocks of tiles.
TEST_F(Gemm, LargeResultsHaveTheBitsOfEachAlone) {
  constexpr int64_t kRows = 500;
  const Problem shape{1088, 1152};
  const std::vector<float> x = random_floats(kRows * shape.k, 1);
  for (const QuantScheme& scheme : tested_schemes()) {
    auto gemm = backends_.back()->prepare_gemm(random_weight(scheme.weight, shape, 2).value(),
                                               scheme.act, kRows);
    ASSERT_TRUE(gemm.ok());
    Buffer all = Buffer::allocate(kRows * shape.n * 4).value();
    Buffer rounded = Buffer::allocate(kRows * shape.n * 2).value();
    GemmArgs args{.x = x.data(),
                  .x_stride = shape.k,
                  .m = kRows,
                  .y = all.as<float>().data(),
                  .y_stride = shape.n};
    (*gemm)->run(args);
    args.y = {rounded.data(), DType::kBF16};
    (*gemm)->run(args);
    for (const int64_t row : {0, 31, 32, 499}) {
      const auto begin = x.begin() + row * shape.k;
      const std::vector<float> alone = product(**gemm, shape, {begin, begin + shape.k}, 1);
      const std::vector<uint16_t> alone_rounded = to_bf16(alone);
      const int64_t at = row * shape.n;
      EXPECT_EQ(
          std::memcmp(alone.data(), &all.as<float>()[static_cast<size_t>(at)], alone.size() * 4), 0)
          << scheme.name << " row " << row;
      EXPECT_EQ(std::memcmp(alone_rounded.data(), &rounded.as<uint16_t>()[static_cast<size_t>(at)],
                            alone.size() * 2),
                0)
          << scheme.name << " row " << row;
    }
  }
}

/// A product in each form that results have, one after the other; each begins with memory that
/// holds ones.
std::vector<float> all_forms(PreparedGemm& gemm,
                             Problem shape,
                             const std::vector<float>& x,
                             int64_t m) {
  const std::vector<float> bias = random_floats(shape.n, 5);
  const int64_t stride = shape.n + 3;
  std::vector<float> results;
  for (const bool rounded : {false, true}) {
    for (const float* added : {static_cast<const float*>(nullptr), bias.data()}) {
      for (const GemmOutput output : {GemmOutput::kStore, GemmOutput::kAdd}) {
        std::vector<float> y(static_cast<size_t>(m * stride), 1.0F);
        std::vector<uint16_t> narrow = to_bf16(y);
        GemmArgs args{.x = x.data(),
                      .x_stride = shape.k,
                      .m = m,
                      .y = y.data(),
                      .y_stride = stride,
                      .output = output,
                      .bias = added};
        if (rounded && output == GemmOutput::kAdd) {
          continue;
        }
        if (rounded) {
          args.y = {narrow.data(), DType::kBF16};
        }
        gemm.run(args);
        const std::vector<float> written = rounded ? to_f32(narrow) : y;
        results.insert(results.end(), written.begin(), written.end());
      }
    }
  }
  return results;
}

// A tile of rows or of weights without a second one or not whole, k of one product of tiles and of
// blocks that end early: what is done between products must be finished all the same.
TEST_F(Gemm, EveryNumberOfTilesGivesTheBitsOfVectors) {
  if (backends_.size() < 2) {
    GTEST_SKIP() << "only one instruction set";
  }
  for (const QuantScheme& scheme : tested_schemes()) {
    for (const Problem shape : {Problem{32, 32}, {48, 128}, {57, 2176}, {288, 640}}) {
      if (!fits(scheme.weight, shape.k)) {
        continue;
      }
      constexpr int64_t kMost = 600;
      const std::vector<float> x = random_floats(kMost * shape.k, 1);
      std::vector<std::unique_ptr<PreparedGemm>> gemms;
      for (auto backend = backends_.end() - 2; backend != backends_.end(); ++backend) {
        auto weight = random_weight(scheme.weight, shape, 2);
        gemms.push_back((*backend)->prepare_gemm(*weight, scheme.act, kMost).value());
      }
      for (const int64_t m : {5, 16, 17, 32, 33, 47, 65, shape.n == 48 ? 600 : 100}) {
        const std::vector<float> expected = all_forms(*gemms[0], shape, x, m);
        const std::vector<float> seen = all_forms(*gemms[1], shape, x, m);
        ASSERT_EQ(std::memcmp(seen.data(), expected.data(), seen.size() * 4), 0)
            << scheme.name << " n=" << shape.n << " k=" << shape.k << " m=" << m;
      }
    }
  }
}

TEST_F(Gemm, NormsAndActivatesItsInputAsThatAloneDoes) {
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{20, 256};
    const std::vector<float> x = random_floats(33 * shape.k, 1);
    const std::vector<float> norm = random_floats(shape.k, 2);
    const std::vector<float> bias = random_floats(shape.k, 3);
    for (auto& backend : backends_) {
      auto gemm =
          backend->prepare_gemm(random_weight(scheme.weight, shape, 2).value(), scheme.act, 33);
      ASSERT_TRUE(gemm.ok());
      using enum GemmInput::Kind;
      for (const GemmInput::Kind kind : {kRmsNorm, kLayerNorm, kRelu, kGeluTanh}) {
        const GemmInput input{kind, norm.data(), 1e-5F, bias.data()};
        const std::vector<float> normed = input_of(*backend, x.data(), 33, shape.k, input);
        for (const int64_t m : {1, 3, 17, 33}) {
          const std::vector<float> expected = product(**gemm, shape, normed, m);
          std::vector<float> y(expected.size(), std::numeric_limits<float>::quiet_NaN());
          (*gemm)->run({.x = x.data(),
                        .x_stride = shape.k,
                        .m = m,
                        .y = y.data(),
                        .y_stride = shape.n,
                        .input = input});
          EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0)
              << scheme.name << " " << static_cast<int>(kind);
        }
      }
    }
  }
}

// Rows in BF16 are the same numbers; results in BF16 are those in F32, rounded once.
TEST_F(Gemm, Bf16InAndOutEqualsF32RoundedOnce) {
  constexpr int64_t kRows = 33;
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{300, scheme.weight.scale_per == ScalePer::kGroup ? 256 : 77};
    const std::vector<uint16_t> x = to_bf16(random_floats(2 * kRows * shape.k, 1));
    const std::vector<float> wide = to_f32(x);
    const std::vector<float> norm = random_floats(shape.k, 2);
    const std::vector<float> bias = random_floats(shape.n, 3);
    for (auto& backend : backends_) {
      auto gemm =
          backend->prepare_gemm(random_weight(scheme.weight, shape, 4).value(), scheme.act, kRows);
      ASSERT_TRUE(gemm.ok());
      using enum GemmInput::Kind;
      for (const GemmInput::Kind kind :
           {kPlain, kRmsNorm, kLayerNorm, kSiluMul, kRelu, kGeluTanh, kClampedSwiglu}) {
        SCOPED_TRACE(testing::Message() << scheme.name << " " << backend->name() << " input "
                                        << static_cast<int>(kind));
        for (const int64_t m : {int64_t{1}, int64_t{4}, kRows}) {
          const int64_t stride = shape.n + 3;
          std::vector<float> expected(static_cast<size_t>(m * stride), 1.0F);
          std::vector<uint16_t> y = to_bf16(expected);
          GemmArgs args{.x = wide.data(),
                        .x_stride = 2 * shape.k,
                        .m = m,
                        .y = expected.data(),
                        .y_stride = stride,
                        .input = {kind, norm.data(), 1e-5F, norm.data(), 0.5F},
                        .bias = bias.data()};
          (*gemm)->run(args);
          args.x = {x.data(), DType::kBF16};
          args.y = {y.data(), DType::kBF16};
          (*gemm)->run(args);
          ASSERT_EQ(y, to_bf16(expected)) << "m=" << m;
        }
      }
    }
  }
}

// With weights of one the product of one column is its activation.
TEST_F(Gemm, RoundsEveryKindOfNumberToBf16) {
  const float special[] = {0.0F,
                           1e-40F,
                           -1e-44F,
                           1.17549435e-38F,
                           1.00390625F,
                           1.01171875F,
                           -1.00390625F,
                           3.4e38F,
                           -3.4028234e38F,
                           std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> x(std::begin(special), std::end(special));
  const std::vector<float> more = random_floats(500, 1);
  x.insert(x.end(), more.begin(), more.end());
  QuantTensor one = QuantTensor::allocate({WeightCode::kF32, ScalePer::kNone}, 20, 1).value();
  std::ranges::fill(one.codes.as<float>(), 1.0F);
  const auto rows = static_cast<int64_t>(x.size());
  for (auto& backend : backends_) {
    auto gemm = backend->prepare_gemm(one, ActFormat::kFloat, rows).value();
    std::vector<uint16_t> y(x.size() * 20);
    gemm->run(
        {.x = x.data(), .x_stride = 1, .m = rows, .y = {y.data(), DType::kBF16}, .y_stride = 20});
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_EQ(y[i], f32_to_bf16(x[i / 20])) << backend->name() << " " << x[i / 20];
    }
  }
}

TEST_F(Gemm, UnpacksAndUpdatesExactly) {
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{37, scheme.weight.grouped() ? 256 : 77};
    for (auto& backend : backends_) {
      SCOPED_TRACE(testing::Message() << scheme.name << " " << backend->name());
      auto gemm =
          backend->prepare_gemm(random_weight(scheme.weight, shape, 4).value(), scheme.act, 1);
      ASSERT_TRUE(gemm.ok()) << gemm.status().message();
      for (const uint32_t seed : {4U, 5U}) {
        auto expected = random_weight(scheme.weight, shape, seed);
        if (seed == 5U) {
          ASSERT_TRUE((*gemm)->update(0, *expected).ok());
        }
        auto unpacked = (*gemm)->unpack();
        ASSERT_TRUE(unpacked.ok());
        ASSERT_EQ(unpacked->codes.size(), expected->codes.size());
        EXPECT_EQ(
            std::memcmp(unpacked->codes.data(), expected->codes.data(), expected->codes.size()), 0);
        ASSERT_EQ(unpacked->scales.size(), expected->scales.size());
        if (expected->scales.size() != 0) {
          EXPECT_EQ(std::memcmp(unpacked->scales.data(), expected->scales.data(),
                                expected->scales.size()),
                    0);
        }
        EXPECT_TRUE(std::ranges::equal(unpacked->zeros.as<int8_t>(), expected->zeros.as<int8_t>()));
        EXPECT_TRUE(
            std::ranges::equal(unpacked->minimums.as<float>(), expected->minimums.as<float>()));
      }
      const auto other = random_weight(scheme.weight, {shape.n + 1, shape.k}, 6);
      EXPECT_EQ((*gemm)->update(0, *other).code(), StatusCode::kInvalidArgument);
    }
  }
}

TEST_F(Gemm, PartsEqualTheSameRowsInOneMatrix) {
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{53, 128};  // parts end within tiles
    QuantTensor whole = random_weight(scheme.weight, shape, 11).value();
    std::vector<QuantView> parts;
    int64_t begin = 0;
    const int64_t groups = scheme.weight.groups(shape.k);
    for (const int64_t rows : {3, 1, 30, 19}) {
      QuantView part = view_of(whole);
      part.n = rows;
      part.codes += begin * whole.row_bytes();
      if (groups != 0) {
        part.scales += begin * groups * 4;
      }
      part.zeros += part.zeros == nullptr ? 0 : begin * groups;
      part.minimums += part.minimums == nullptr ? 0 : begin * groups * 4;
      parts.push_back(part);
      begin += rows;
    }
    const std::vector<float> x = random_floats(2 * shape.k, 12);
    for (auto& backend : backends_) {
      auto stacked = backend->prepare_gemm(parts, scheme.act, 2);
      auto single = backend->prepare_gemm(whole, scheme.act, 2);
      ASSERT_TRUE(stacked.ok() && single.ok());
      EXPECT_EQ(product(**stacked, shape, x, 2), product(**single, shape, x, 2)) << scheme.name;
    }
  }
}

TEST_F(Gemm, RowsThatAreNotFiniteSpoilOnlyThemselves) {
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{20, 128};
    std::vector<float> x = random_floats(3 * shape.k, 8);
    for (auto& backend : backends_) {
      auto gemm =
          backend->prepare_gemm(random_weight(scheme.weight, shape, 9).value(), scheme.act, 3);
      ASSERT_TRUE(gemm.ok());
      const std::vector<float> clean = product(**gemm, shape, x, 3);
      std::vector<float> spoiled = x;
      spoiled[static_cast<size_t>(shape.k) + 5] = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> y = product(**gemm, shape, spoiled, 3);
      const auto n = static_cast<size_t>(shape.n);
      const auto same_row = [&](size_t row) {
        const auto begin = static_cast<std::ptrdiff_t>(row * n);
        const auto end = begin + shape.n;
        return std::equal(y.begin() + begin, y.begin() + end, clean.begin() + begin);
      };
      EXPECT_TRUE(same_row(0));
      EXPECT_TRUE(same_row(2));
      for (size_t i = n; i < 2 * n; ++i) {
        EXPECT_TRUE(std::isnan(y[i])) << scheme.name;
      }
    }
  }
}

TEST_F(Gemm, ZeroRowsGiveZero) {
  for (const QuantScheme& scheme : tested_schemes()) {
    const Problem shape{20, 128};
    auto gemm = backends_.back()->prepare_gemm(random_weight(scheme.weight, shape, 9).value(),
                                               scheme.act, 1);
    const std::vector<float> x(static_cast<size_t>(shape.k), 0.0F);
    for (const float value : product(**gemm, shape, x, 1)) {
      EXPECT_EQ(value, 0.0F) << scheme.name;
    }
  }
}

TEST_F(Gemm, RefusesWhatItCannotMultiply) {
  using enum WeightCode;
  const Problem shape{4, 96};
  const auto code_of = [&](const WeightFormat& format, ActFormat act) {
    return backends_[0]
        ->prepare_gemm(random_weight(format, shape, 1).value(), act, 1)
        .status()
        .code();
  };
  EXPECT_EQ(code_of({kBf16, ScalePer::kNone}, ActFormat::kInt8Token), StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kInt4, ScalePer::kGroup, 32}, ActFormat::kInt8Token),
            StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kInt4, ScalePer::kGroup, 12}, ActFormat::kFloat), StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kInt8, ScalePer::kChannel}, ActFormat::kFp8Token), StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kFp4E2M1, ScalePer::kGroup, 32}, ActFormat::kInt8Token),
            StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kInt4, ScalePer::kChannel, 0, DType::kF32, ZeroPoints::kPerScale},
                    ActFormat::kInt8Token),
            StatusCode::kUnsupported);
  EXPECT_EQ(code_of({kInt4, ScalePer::kChannel, 0, DType::kF32, ZeroPoints::kMinimum},
                    ActFormat::kInt8Token),
            StatusCode::kUnsupported);
  EXPECT_EQ(
      code_of({kInt8, ScalePer::kGroup, 32, DType::kF16, ZeroPoints::kMinimum}, ActFormat::kBf16),
      StatusCode::kUnsupported);
  auto weight = random_weight({kFp8E4M3, ScalePer::kChannel}, shape, 1);
  weight->codes.data()[7] = std::byte{0xff};
  EXPECT_EQ(backends_[0]->prepare_gemm(*weight, ActFormat::kFloat, 1).status().code(),
            StatusCode::kCorrupt);
}

TEST(CpuBackend, NamesItsKernelsAndRefusesUnknownOnes) {
  const auto isas = cpu::supported_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas[0], "scalar");
  const auto automatic = make_cpu_backend({});
  ASSERT_TRUE(automatic.ok());
  EXPECT_EQ((*automatic)->name(), "cpu/" + std::string(isas.back()));
  EXPECT_EQ(make_cpu_backend({.isa = "sse9"}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(make_cpu_backend({.threads = -1}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
