#include "quantizer/algorithms/rounding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quant/codec.h"
#include "quant/levels.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/rtn.h"
#include "quantizer/algorithms/testing/rounding_problem.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

TEST(Rounding, GptqIsWhatIsPublished) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kK = 384;  // three blocks of columns
    const Problem problem(scheme, 21, kK, 7);
    const std::vector<float> x = correlated(500, kK, 11);
    const Gram gram = gram_of(x, kK, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
    ASSERT_TRUE(site.factor.has_value());
    EXPECT_EQ(site.factor->damping, 0.01);
    const RoundedMatrix rounded = by_columns(problem, Rounding::kGptq, site, pool);
    const std::vector<double> expected = published_values(problem.matrix, {x, x}, rounded);
    size_t equal = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      equal += std::fabs(expected[i] - rounded.values[i]) < 1e-4 ? 1 : 0;
    }
    // A tie that single precision decides otherwise moves the codes after it.
    EXPECT_GT(equal, expected.size() * 19 / 20) << scheme.name;
    const double wanted = measured_error(problem.matrix, {x, x}, expected);
    EXPECT_NEAR(measured_error(problem.matrix, {x, x}, rounded.values) / wanted, 1, 0.01)
        << scheme.name;
  }
}

TEST(Rounding, EachMethodLosesLessOfTheOutputs) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kK = 256;
    const Problem problem(scheme, 33, kK, 3);
    const std::vector<float> x = correlated(700, kK, 5);
    const Gram gram = gram_of(x, kK, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
    const double whole =
        measured_error(problem.matrix, {x, x}, std::vector<float>(problem.w.size(), 0.0F));
    double errors[3];
    for (const Rounding rounding : {Rounding::kRtn, Rounding::kImatrix, Rounding::kGptq}) {
      const RoundedMatrix rounded = round_matrix(problem.matrix, rounding, site, pool);
      double& error = errors[static_cast<size_t>(rounding)];
      error = measured_error(problem.matrix, {x, x}, rounded.values) / whole;
      EXPECT_NEAR(rounded.error / error, 1, 1e-3) << scheme.name;
      EXPECT_NEAR(rounded.rtn_error / errors[0], 1, 1e-3) << scheme.name;
    }
    EXPECT_LE(errors[1], errors[0]) << scheme.name;
    EXPECT_LT(errors[2], 0.8 * errors[0]) << scheme.name;
  }
}

// What no scale of a row may leave: products would refuse the weights.
TEST(Rounding, OfTwoLevelsKeepsThem) {
  ThreadPool pool(2);
  for (const char* name : {"w4a8_g64", "w4a8_g128"}) {
    const QuantScheme scheme = find_scheme(name).value();
    const Problem problem(scheme, 33, 256, 3);
    const Gram gram = gram_of(correlated(700, 256, 5), 256, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
    for (const Rounding rounding : {Rounding::kRtn, Rounding::kImatrix, Rounding::kGptq}) {
      const RoundedMatrix rounded = round_matrix(problem.matrix, rounding, site, pool);
      EXPECT_EQ(rounded.rounding, rounding);
      QuantTensor weight = QuantTensor::allocate(scheme.weight, 33, 256).value();
      std::ranges::copy(rounded.scales, weight.scales.as<float>().begin());
      std::ranges::transform(rounded.zeros, weight.zeros.as<int8_t>().begin(),
                             [](float zero) { return static_cast<int8_t>(zero); });
      EXPECT_TRUE(check_levels(view_of(weight)).ok()) << name << " " << rounding_name(rounding);
    }
  }
}

TEST(Rounding, OfUncorrelatedColumnsIsToTheNearest) {
  ThreadPool pool(1);
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  const Problem problem(scheme, 5, 64, 3);
  std::vector<float> x(64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    x[i * 64 + i] = 1;
  }
  const Gram gram = gram_of(x, 64, pool);
  const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
  const RoundedMatrix rtn = round_matrix(problem.matrix, Rounding::kRtn, site, pool);
  EXPECT_EQ(round_matrix(problem.matrix, Rounding::kImatrix, site, pool).values, rtn.values);
  EXPECT_EQ(round_matrix(problem.matrix, Rounding::kGptq, site, pool).values, rtn.values);
}

TEST(Rounding, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  const QuantScheme scheme = find_scheme("w4a16_g32_asym").value();
  const Problem problem(scheme, 130, 224, 3);
  const std::vector<float> x = correlated(300, 224, 5);
  std::vector<RoundedMatrix> results;
  for (ThreadPool* pool : {&one, &three}) {
    const Gram gram = gram_of(x, 224, *pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, *pool);
    results.push_back(round_matrix(problem.matrix, Rounding::kGptq, site, *pool));
  }
  EXPECT_EQ(results[0].values, results[1].values);
  EXPECT_EQ(results[0].error, results[1].error);
}

// Fewer rows than columns, columns that are never used, equal columns, and columns of one number.
TEST(Rounding, OfSingularSums) {
  ThreadPool pool(2);
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  constexpr int64_t kK = 96;
  const Problem problem(scheme, 9, kK, 3);
  std::vector<float> x = correlated(20, kK, 5);
  for (size_t row = 0; row < x.size(); row += kK) {
    x[row + 3] = 0;
    x[row + 40] = x[row + 41];
    x[row + 50] = 2;
    x[row + 51] = 1e-20F;
  }
  const Gram gram = gram_of(x, kK, pool);
  const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
  ASSERT_TRUE(site.factor.has_value());
  const RoundedMatrix rounded = round_matrix(problem.matrix, Rounding::kGptq, site, pool);
  EXPECT_EQ(rounded.rounding, Rounding::kGptq);
  EXPECT_LT(rounded.error, 0.5 * rounded.rtn_error);
  for (int64_t row = 0; row < 9; ++row) {  // a dead column is rounded as by itself
    const auto at = static_cast<size_t>(row * kK + 3);
    const float scale = rounded.scales[static_cast<size_t>(row * 3)];
    const int code = encode_int(problem.w[at], scale, code_range(scheme.weight.code));
    EXPECT_EQ(rounded.values[at], static_cast<float>(code) * scale);
  }
}

TEST(Rounding, OfSumsThatAreNoNumbersIsWithoutThem) {
  ThreadPool pool(1);
  const QuantScheme scheme = find_scheme("w4a8").value();
  const Problem problem(scheme, 4, 64, 3);
  std::vector<float> x = correlated(100, 64, 5);
  x[77] = std::numeric_limits<float>::quiet_NaN();
  const Gram gram = gram_of(x, 64, pool);
  const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
  EXPECT_EQ(site.gram, nullptr);
  const RoundedMatrix rounded = round_matrix(problem.matrix, Rounding::kGptq, site, pool);
  EXPECT_EQ(rounded.rounding, Rounding::kRtn);
  RoundedMatrix expected;
  round_to_nearest(problem.matrix, nullptr, expected, pool);
  EXPECT_EQ(rounded.values, expected.values);
}

TEST(Rounding, RefusesWhatItCannotRound) {
  for (const QuantScheme& scheme : all_schemes()) {
    const bool steps = scheme.weight.code != WeightCode::kFp8E4M3 && scheme.weight.quantized();
    const Status status = check_rounding(Rounding::kGptq, scheme);
    EXPECT_EQ(status.ok(), steps) << scheme.name;
  }
  EXPECT_THAT(parse_rounding("awk").status().message(),
              testing::HasSubstr("rtn, imatrix, gptq, gptaq, autoround, lwc"));
}

// Bytes of values that were chosen are those of the encoder that chooses the same.
TEST(Rounding, GivenRowsAreEncodedAsChosenOnes) {
  ThreadPool pool(1);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kN = 11;
    constexpr int64_t kK = 256;
    const Problem problem(scheme, kN, kK, 9);
    RoundedMatrix nearest;
    round_to_nearest(problem.matrix, nullptr, nearest, pool);
    const Extent extent{.absmax = absmax_of(problem.w.data(), 0, kN, kK).value()};
    std::vector<std::vector<std::byte>> bytes[2];
    RowsError errors[2];
    for (const size_t given : {0U, 1U}) {
      for (size_t slot = 0; slot < problem.encoder->slots().size(); ++slot) {
        bytes[given].emplace_back(static_cast<size_t>(problem.encoder->place(slot, 0, kN).bytes),
                                  std::byte{0xab});
      }
      const int64_t block = problem.encoder->row_block();
      for (int64_t row = 0; row < kN; row += block) {
        const int64_t rows = std::min(block, kN - row);
        std::vector<std::byte*> out;
        for (size_t slot = 0; slot < bytes[given].size(); ++slot) {
          out.push_back(bytes[given][slot].data() + problem.encoder->place(slot, row, rows).offset);
        }
        RowsError error;
        const int64_t groups = scheme.weight.groups(kK);
        const float* x = problem.w.data() + row * kK;
        const Status status =
            given == 0 ? problem.encoder->encode(row, rows, x, extent, out, error)
                       : problem.encoder->encode_given(
                             {.row = row,
                              .rows = rows,
                              .x = x,
                              .values = nearest.values.data() + row * kK,
                              .scales = nearest.scales.data() + row * groups,
                              .zeros = nearest.zeros.empty() ? nullptr
                                                             : nearest.zeros.data() + row * groups},
                             extent, out, error);
        ASSERT_TRUE(status.ok());
        errors[given].add(error);
      }
    }
    EXPECT_EQ(bytes[0], bytes[1]) << scheme.name;
    EXPECT_NEAR(errors[0].snr_db(), errors[1].snr_db(), 1e-4) << scheme.name;
    EXPECT_EQ(errors[0].clipped, errors[1].clipped) << scheme.name;
    EXPECT_EQ(errors[0].zeros, errors[1].zeros) << scheme.name;
    EXPECT_EQ(errors[0].count, errors[1].count) << scheme.name;
  }
}

TEST(MatrixKernels, ProductsEqualExactOnesOnEveryInstructionSet) {
  constexpr int64_t kDepth = 37;
  constexpr int64_t kM = 27;
  constexpr int64_t kN = 112;
  const std::vector<float> a = gaussian(kDepth * kM, 1);
  const std::vector<float> b = gaussian(kDepth * kN, 2);
  const std::vector<float> before = gaussian(kM * kN, 3);
  std::vector<float> first;
  for (const char* isa : {"scalar", "avx2", "avx512"}) {
    const auto kernels = rows::find_row_kernels(isa);
    if (!kernels.ok()) {
      continue;
    }
    std::vector<float> c = before;
    (*kernels)->add_products({.a = a.data(),
                              .a_stride = kM,
                              .b = b.data(),
                              .b_stride = kN,
                              .c = c.data(),
                              .c_stride = kN,
                              .m = kM,
                              .n = kN,
                              .depth = kDepth,
                              .sign = -1});
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN; ++j) {
        double sum = before[static_cast<size_t>(i * kN + j)];
        for (int64_t t = 0; t < kDepth; ++t) {
          sum -= static_cast<double>(a[static_cast<size_t>(t * kM + i)]) *
                 b[static_cast<size_t>(t * kN + j)];
        }
        EXPECT_NEAR(c[static_cast<size_t>(i * kN + j)], sum, 1e-4) << isa;
      }
    }
    first = first.empty() ? c : first;
    EXPECT_EQ(c, first) << isa;
  }
}

TEST(Gram, EqualsExactSums) {
  ThreadPool pool(2);
  for (const int64_t k : {1, 15, 16, 100, 200}) {
    const std::vector<float> x = correlated(300, k, 4);
    const Gram gram = gram_of(x, k, pool);
    EXPECT_EQ(gram.rows(), 300);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double sum = 0;
        for (int64_t row = 0; row < 300; ++row) {
          sum += static_cast<double>(x[static_cast<size_t>(row * k + i)]) *
                 x[static_cast<size_t>(row * k + j)];
        }
        const double size = std::sqrt(static_cast<double>(gram.diagonal(i)) * gram.diagonal(j));
        EXPECT_NEAR(gram.data()[i * gram.stride() + j], sum, 1e-5 * size);
      }
    }
  }
}

TEST(Factor, OfAProductIsItsTriangle) {
  ThreadPool pool(2);
  for (const int64_t k : {1, 5, 63, 64, 65, 200}) {
    const Gram gram = gram_of(correlated(4 * k, k, 8), k, pool);
    const auto factor = make_column_factor(gram, pool);
    ASSERT_TRUE(factor.has_value());
    const double damping = factor->damping * gram.mean_diagonal();
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double sum = 0;
        for (int64_t t = std::max(i, j); t < k; ++t) {
          sum +=
              static_cast<double>(factor->triangle[static_cast<size_t>(i * factor->stride + t)]) *
              factor->triangle[static_cast<size_t>(j * factor->stride + t)];
        }
        const int64_t a = factor->order[static_cast<size_t>(i)];
        const int64_t b = factor->order[static_cast<size_t>(j)];
        const double expected = gram.data()[a * gram.stride() + b] + (i == j ? damping : 0);
        const double size = std::sqrt(static_cast<double>(gram.diagonal(a)) * gram.diagonal(b));
        EXPECT_NEAR(sum, expected, 2e-5 * (size + damping)) << k;
      }
    }
  }
}

}  // namespace
}  // namespace nibble
