#include "quantizer/algorithms/refine.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/code_traits.h"
#include "quantizer/algorithms/testing/rounding_problem.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

/// H with the factor's damping.
Matrix damped(const SiteStatistics& site) {
  const Gram& gram = *site.gram;
  const auto k = static_cast<size_t>(gram.k());
  Matrix h(k, std::vector<double>(k));
  for (size_t i = 0; i < k; ++i) {
    for (size_t j = 0; j < k; ++j) {
      h[i][j] = gram.data()[static_cast<int64_t>(i) * gram.stride() + static_cast<int64_t>(j)];
    }
    h[i][i] += site.factor->damping * gram.mean_diagonal();
  }
  return h;
}

/// e H e^T of each row.
std::vector<double> losses(const MatrixToRound& matrix,
                           const Matrix& h,
                           const std::vector<float>& values) {
  std::vector<double> sums(static_cast<size_t>(matrix.n));
  const size_t k = h.size();
  for (size_t row = 0; row < sums.size(); ++row) {
    std::vector<double> e(k);
    for (size_t i = 0; i < k; ++i) {
      e[i] = static_cast<double>(matrix.w[row * k + i]) - values[row * k + i];
    }
    for (size_t i = 0; i < k; ++i) {
      for (size_t j = 0; j < k; ++j) {
        sums[row] += e[i] * h[i][j] * e[j];
      }
    }
  }
  return sums;
}

/// One row in double precision, by the definition.
struct PlainRow {
  const WeightFormat& format;
  const Matrix& h;
  std::vector<double> w;
  std::vector<double> values;
  std::vector<double> scales;
  std::vector<double> zeros;
  bool fits_scales = true;

  [[nodiscard]] size_t width() const { return w.size() / scales.size(); }
  /// H e of one column.
  [[nodiscard]] double gradient(size_t column) const {
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      sum += h[column][i] * (w[i] - values[i]);
    }
    return sum;
  }
  void fit(size_t group) {
    double slope = 0;
    double curvature = 0;
    const size_t begin = group * width();
    for (size_t i = begin; i < begin + width(); ++i) {
      slope += values[i] / scales[group] * gradient(i);
      for (size_t j = begin; j < begin + width(); ++j) {
        curvature += values[i] * h[i][j] * values[j] / scales[group] / scales[group];
      }
    }
    const auto exact = static_cast<float>(scales[group] + slope / curvature);
    const double stored =
        format.scale_dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(exact)) : exact;
    const double moved = stored - scales[group];
    if (moved * moved * curvature - 2 * moved * slope < 0) {
      for (size_t i = begin; i < begin + width(); ++i) {
        values[i] *= stored / scales[group];
      }
      scales[group] = stored;
    }
  }
  void sweep(size_t i) {
    const double step = gradient(i) / h[i][i];
    const size_t group = i / width();
    const double best = nearest(format, values[i] + step, scales[group], zeros[group]);
    if (std::fabs(values[i] + step - best) < (1 - 0x1p-18) * std::fabs(step)) {
      values[i] = best;
    }
  }
  void refine() {
    const size_t columns = width() > 128 ? 128 : 128 / width() * width();  // of a block
    for (int turn = 0; turn < 4; ++turn) {
      for (size_t group = 0; fits_scales && width() > 128 && group < scales.size(); ++group) {
        fit(group);
      }
      for (size_t begin = 0; begin < w.size(); begin += columns) {
        const size_t end = std::min(begin + columns, w.size());
        for (size_t i = begin; fits_scales && width() <= 128 && i < end; i += width()) {
          fit(i / width());
        }
        for (size_t i = begin; i < end; ++i) {
          sweep(i);
        }
      }
    }
  }
};

TEST(Refine, IsCoordinateDescentAndLeastSquares) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kK = 256;
    const Problem problem(scheme, 11, kK, 7);
    const Gram gram = gram_of(correlated(500, kK, 11), kK, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
    const Matrix h = damped(site);
    RoundedMatrix rounded = by_columns(problem, Rounding::kGptq, site, pool);
    std::vector<float> expected;
    const auto groups = static_cast<size_t>(scheme.weight.groups(kK));
    for (size_t row = 0; row < 11; ++row) {
      const auto part = [&](const std::vector<float>& all, size_t count) {
        return all.empty()
                   ? std::vector<double>(count)
                   : std::vector<double>(all.begin() + static_cast<int64_t>(row * count),
                                         all.begin() + static_cast<int64_t>((row + 1) * count));
      };
      PlainRow plain{scheme.weight,
                     h,
                     part(problem.w, kK),
                     part(rounded.values, kK),
                     part(rounded.scales, groups),
                     part(rounded.zeros, groups),
                     is_integer(scheme.weight.code) && !problem.encoder->ties_scales()};
      plain.refine();
      expected.insert(expected.end(), plain.values.begin(), plain.values.end());
    }
    refine(problem.matrix, site, rounded, pool);
    const std::vector<double> wanted = losses(problem.matrix, h, expected);
    const std::vector<double> reached = losses(problem.matrix, h, rounded.values);
    double ratio = 0;
    size_t equal = 0;
    for (size_t row = 0; row < wanted.size(); ++row) {
      ratio += reached[row] / wanted[row] / 11;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      equal +=
          std::fabs(expected[i] - rounded.values[i]) < 1e-3 * std::fabs(expected[i]) + 1e-6 ? 1 : 0;
    }
    EXPECT_NEAR(ratio, 1, 0.01) << scheme.name;
    // A tie that single precision decides otherwise moves what comes after it.
    EXPECT_GT(equal, expected.size() * 9 / 10) << scheme.name;
  }
}

TEST(Refine, NeverLosesMoreAndKeepsCodes) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kK = 384;  // three blocks of columns
    const Problem problem(scheme, 70, kK, 3);
    const Gram gram = gram_of(correlated(700, kK, 5), kK, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
    const Matrix h = damped(site);
    RoundedMatrix rounded = by_columns(problem, Rounding::kGptq, site, pool);
    const std::vector<double> before = losses(problem.matrix, h, rounded.values);
    const std::vector<float> scales = rounded.scales;
    refine(problem.matrix, site, rounded, pool);
    if (problem.encoder->ties_scales()) {
      EXPECT_EQ(rounded.scales, scales) << scheme.name;
    }
    const std::vector<double> after = losses(problem.matrix, h, rounded.values);
    double gained = 0;
    for (size_t row = 0; row < before.size(); ++row) {
      EXPECT_LE(after[row], before[row] * (1 + 1e-6)) << scheme.name;
      gained += 1 - after[row] / before[row];
    }
    const bool coarse = scheme.weight.code != WeightCode::kInt8;
    EXPECT_GT(gained, coarse ? 0.01 * 70 : 0.0) << scheme.name;
    const int64_t groups = scheme.weight.groups(kK);
    for (size_t i = 0; i < rounded.values.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / kK;
      const auto at =
          static_cast<size_t>(row * groups + static_cast<int64_t>(i) % kK / (kK / groups));
      const double zero = rounded.zeros.empty() ? 0 : rounded.zeros[at];
      EXPECT_EQ(
          static_cast<float>(nearest(scheme.weight, rounded.values[i], rounded.scales[at], zero)),
          rounded.values[i]);
      if (scheme.weight.scale_dtype == DType::kBF16) {
        EXPECT_EQ(bf16_to_f32(f32_to_bf16(rounded.scales[at])), rounded.scales[at]);
      }
    }
  }
}

TEST(Refine, LeavesWhatCannotBeBettered) {
  ThreadPool pool(1);
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  const Problem problem(scheme, 5, 64, 3);
  std::vector<float> x(64 * 64);
  for (size_t i = 0; i < 64; ++i) {
    x[i * 64 + i] = i == 7 ? 0 : 1;  // a dead column, too
  }
  const Gram gram = gram_of(x, 64, pool);
  const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
  RoundedMatrix rounded = by_columns(problem, Rounding::kGptq, site, pool);
  const std::vector<float> values = rounded.values;
  refine(problem.matrix, site, rounded, pool);
  EXPECT_EQ(rounded.values, values);  // least squares chose the scales, too
}

TEST(Refine, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  const Problem problem(find_scheme("w4a16_g32_asym").value(), 200, 224, 3);
  const std::vector<float> x = correlated(300, 224, 5);
  std::vector<RoundedMatrix> results;
  for (ThreadPool* pool : {&one, &three}) {
    const Gram gram = gram_of(x, 224, *pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, *pool);
    results.push_back(by_columns(problem, Rounding::kGptq, site, *pool));
    refine(problem.matrix, site, results.back(), *pool);
  }
  EXPECT_EQ(results[0].values, results[1].values);
  EXPECT_EQ(results[0].scales, results[1].scales);
}

TEST(MatrixKernels, SweepsAreTheSameOnEveryInstructionSet) {
  constexpr int64_t kColumns = 48;
  constexpr int64_t kRows = 32;
  ThreadPool pool(1);
  const Gram gram = gram_of(correlated(200, kColumns, 4), kColumns, pool);
  const std::vector<float> scales(kRows, 0.25F);
  const std::vector<float> zeros(kRows, 2.0F);
  const std::vector<const float*> scale_of(kColumns, scales.data());
  const std::vector<const float*> zero_of(kColumns, zeros.data());
  using Table = rows::RowKernels;
  for (const auto sweep :
       {&Table::sweep_int4, &Table::sweep_int4_zeros, &Table::sweep_int8, &Table::sweep_fp4}) {
    std::vector<float> first;
    for (const char* isa : {"scalar", "avx2", "avx512"}) {
      const auto kernels = rows::find_row_kernels(isa);
      if (!kernels.ok()) {
        continue;
      }
      std::vector<float> gradients = gaussian(kColumns * kRows, 5);
      for (float& gradient : gradients) {
        gradient *= static_cast<float>(gram.mean_diagonal());
      }
      std::vector<float> values(kColumns * kRows, 0.25F);
      std::vector<float> changes(values.size(), NAN);
      ((*kernels)->*sweep)({.gradients = gradients.data(),
                            .values = values.data(),
                            .changes = changes.data(),
                            .scales = scale_of.data(),
                            .zeros = sweep == &Table::sweep_int4_zeros ? zero_of.data() : nullptr,
                            .gram = gram.data(),
                            .gram_stride = gram.stride(),
                            .damping = 0.5F,
                            .columns = kColumns,
                            .rows = kRows});
      size_t changed = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(changes[i], 0.25F - values[i]);
        changed += changes[i] != 0 ? 1 : 0;
      }
      EXPECT_GT(changed, values.size() / 2);
      values.insert(values.end(), gradients.begin(), gradients.end());
      first = first.empty() ? values : first;
      EXPECT_EQ(values, first) << isa;
    }
  }
}

}  // namespace
}  // namespace nibble
