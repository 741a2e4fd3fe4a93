#include "quantizer/algorithms/learned.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/code_traits.h"
#include "quant/levels.h"
#include "quantizer/algorithms/autoround.h"
#include "quantizer/algorithms/lwc.h"
#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

std::vector<QuantScheme> integer_schemes() {
  std::vector<QuantScheme> found;
  for (const QuantScheme& scheme : schemes()) {
    if (is_integer(scheme.weight.code) && !in_two_levels(scheme.weight, scheme.act)) {
      found.push_back(scheme);
    }
  }
  return found;
}

/// One row in double precision, by the papers' formulas.
struct PlainRow {
  const WeightFormat& format;
  const Gram& gram;
  std::vector<double> w;
  std::vector<double> scales;
  std::vector<double> zeros;
  std::vector<double> values = {};
  std::vector<double> slopes = {};
  std::vector<bool> inside = {};
  double least = INFINITY;

  [[nodiscard]] size_t group(size_t i) const { return i * scales.size() / w.size(); }
  void round(const std::vector<double>& offsets) {
    const CodeRange range = code_range(format.code);
    values.assign(w.size(), 0);
    slopes = values;
    inside.assign(w.size(), false);
    for (size_t i = 0; i < w.size(); ++i) {
      const double zero = zeros[group(i)];
      const double scale = scales[group(i)];
      const double wanted = std::nearbyint(w[i] / scale + offsets[i] + zero);
      const double code = std::min<double>(std::max<double>(wanted, range.low), range.high);
      inside[i] = code == wanted;
      values[i] = (code - zero) * scale;
      slopes[i] = code - zero - (inside[i] ? w[i] / scale : 0);
    }
  }
  /// What each error adds to half of the loss; keeps the least loss.
  std::vector<double> gradients() {
    std::vector<double> sums(w.size());
    double loss = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      for (size_t j = 0; j < w.size(); ++j) {
        sums[i] += gram.data()[static_cast<int64_t>(i) * gram.stride() + static_cast<int64_t>(j)] *
                   (w[j] - values[j]);
      }
      loss += sums[i] * (w[i] - values[i]);
    }
    least = std::min(least, loss);
    return sums;
  }
  [[nodiscard]] std::vector<double> by_scale(const std::vector<double>& sums) const {
    std::vector<double> of_groups(scales.size());
    for (size_t i = 0; i < w.size(); ++i) {
      of_groups[group(i)] += sums[i] * slopes[i];
    }
    return of_groups;
  }
  [[nodiscard]] double stored(double scale) const {
    const auto single = static_cast<float>(scale);
    return format.scale_dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(single)) : single;
  }
};

double sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

double autoround_loss(PlainRow row) {
  std::vector<double> offsets(row.w.size());
  const std::vector<double> first = row.scales;
  std::vector<double> factors(first.size(), 1);
  for (int step = 0; step <= kOffsetSteps; ++step) {
    row.round(offsets);
    const std::vector<double> sums = row.gradients();
    const double rate = (1 - static_cast<double>(step) / kOffsetSteps) / kOffsetSteps;
    for (size_t i = 0; i < offsets.size(); ++i) {
      const double moved =
          offsets[i] + (row.inside[i] ? rate : 0) * sign(sums[i] * first[row.group(i)]);
      offsets[i] = std::clamp(moved, -0.5, 0.5);
    }
    const std::vector<double> slopes = row.by_scale(sums);
    for (size_t g = 0; g < factors.size(); ++g) {
      factors[g] += rate * kFactorRate * sign(slopes[g] * first[g]);
      row.scales[g] = row.stored(factors[g] * first[g]);
    }
  }
  return row.least;
}

double lwc_loss(PlainRow row) {
  const size_t groups = row.scales.size();
  std::vector<double> whole(groups);
  std::vector<double> logits(groups);
  std::vector<double> mean(groups);
  std::vector<double> square(groups);
  for (size_t i = 0; i < row.w.size(); ++i) {
    whole[row.group(i)] =
        std::max(whole[row.group(i)], std::fabs(row.w[i]) / code_range(row.format.code).high);
  }
  for (size_t g = 0; g < groups; ++g) {
    whole[g] = std::copysign(std::max(whole[g], std::fabs(row.scales[g]) / 0.98), row.scales[g]);
    logits[g] = -std::log(whole[g] / row.scales[g] - 1);
  }
  const std::vector<double> offsets(row.w.size());
  for (int step = 0; step <= kClippingSteps; ++step) {
    row.round(offsets);
    const std::vector<double> slopes = row.by_scale(row.gradients());
    const double left = 1 - static_cast<double>(step) / kClippingSteps;
    for (size_t g = 0; g < groups; ++g) {
      const double share = 1 / (1 + std::exp(-logits[g]));
      const double gradient = slopes[g] * whole[g] * share * (1 - share);
      mean[g] = 0.9 * mean[g] + 0.1 * gradient;
      square[g] = 0.999 * square[g] + 0.001 * gradient * gradient;
      const double size = std::sqrt(square[g] / (1 - std::pow(0.999, step + 1)));
      logits[g] += left * kClippingRate * mean[g] / (1 - std::pow(0.9, step + 1)) / size;
      row.scales[g] = row.stored(whole[g] / (1 + std::exp(-logits[g])));
    }
  }
  return row.least;
}

struct Learned {
  Rounding rounding;
  double (*plain)(PlainRow row);
};

class LearnedRounding : public testing::TestWithParam<Learned> {};

TEST_P(LearnedRounding, IsWhatItsFormulasSay) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : integer_schemes()) {
    constexpr int64_t kK = 128;
    constexpr int64_t kN = 9;
    const Problem problem(scheme, kN, kK, 7);
    const std::vector<float> x = correlated(300, kK, 11);
    const Gram gram = gram_of(x, kK, pool);
    const SiteStatistics site = make_site_statistics(gram, GetParam().rounding, pool);
    RoundedMatrix first;
    choose_all_scales(problem.matrix, site.importance.data(), first, pool);
    const auto groups = static_cast<size_t>(scheme.weight.groups(kK));
    double expected = 0;
    for (size_t row = 0; row < kN; ++row) {
      const auto part = [&](const std::vector<float>& all, size_t count) {
        const auto begin = all.begin() + static_cast<int64_t>(all.empty() ? 0 : row * count);
        return all.empty() ? std::vector<double>(count)
                           : std::vector<double>(begin, begin + static_cast<int64_t>(count));
      };
      expected += GetParam().plain({scheme.weight, gram, part(problem.w, kK),
                                    part(first.scales, groups), part(first.zeros, groups)});
    }
    const RoundedMatrix rounded = round_matrix(problem.matrix, GetParam().rounding, site, pool);
    // Signs of gradients near 0 differ in single precision, and with them the way down.
    EXPECT_NEAR(rounded.error * rounded.outputs / expected, 1, 0.05) << scheme.name;
    EXPECT_NEAR(measured_error(problem.matrix, {x, x}, rounded.values) / rounded.outputs,
                rounded.error, 1e-3 * rounded.error);
  }
}

TEST_P(LearnedRounding, LosesLessThanWithoutLearning) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : integer_schemes()) {
    constexpr int64_t kK = 256;
    const Problem problem(scheme, 70, kK, 3);
    const Gram gram = gram_of(correlated(700, kK, 5), kK, pool);
    const SiteStatistics site = make_site_statistics(gram, GetParam().rounding, pool);
    const RoundedMatrix before = round_matrix(problem.matrix, Rounding::kImatrix, site, pool);
    const RoundedMatrix after = round_matrix(problem.matrix, GetParam().rounding, site, pool);
    EXPECT_EQ(after.rounding, GetParam().rounding) << scheme.name;
    EXPECT_LT(after.error, before.error) << scheme.name;
    const int64_t groups = scheme.weight.groups(kK);
    for (size_t i = 0; i < after.values.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / kK;
      const auto at =
          static_cast<size_t>(row * groups + static_cast<int64_t>(i) % kK / (kK / groups));
      const double zero = after.zeros.empty() ? 0 : after.zeros[at];
      EXPECT_EQ(static_cast<float>(nearest(scheme.weight, after.values[i], after.scales[at], zero)),
                after.values[i]);
    }
  }
}

TEST_P(LearnedRounding, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  const Problem problem(find_scheme("w4a16_g32_asym").value(), 200, 224, 3);
  const Gram gram = gram_of(correlated(300, 224, 5), 224, one);
  const SiteStatistics site = make_site_statistics(gram, GetParam().rounding, one);
  const RoundedMatrix first = round_matrix(problem.matrix, GetParam().rounding, site, one);
  const RoundedMatrix second = round_matrix(problem.matrix, GetParam().rounding, site, three);
  EXPECT_EQ(first.values, second.values);
  EXPECT_EQ(first.scales, second.scales);
}

TEST_P(LearnedRounding, TakesRowsOfZeros) {
  ThreadPool pool(1);
  Problem problem(find_scheme("w4a8").value(), 3, 64, 3);
  std::fill(problem.w.begin() + 64, problem.w.begin() + 128, 0.0F);
  const Gram gram = gram_of(correlated(300, 64, 5), 64, pool);
  const SiteStatistics site = make_site_statistics(gram, GetParam().rounding, pool);
  const RoundedMatrix rounded = round_matrix(problem.matrix, GetParam().rounding, site, pool);
  EXPECT_EQ(rounded.rounding, GetParam().rounding);
  for (size_t i = 64; i < 128; ++i) {
    EXPECT_EQ(rounded.values[i], 0);
  }
}

TEST_P(LearnedRounding, IsOfIntegersAlone) {
  const Status status = check_rounding(GetParam().rounding, find_scheme("mxfp4").value());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), testing::HasSubstr("take gptq or imatrix"));
  const Status tied = check_rounding(GetParam().rounding, find_scheme("w4a8_g128").value());
  EXPECT_EQ(tied.code(), StatusCode::kUnsupported);
  EXPECT_THAT(tied.message(), testing::HasSubstr("one number of their row"));
  for (const QuantScheme& scheme : integer_schemes()) {
    EXPECT_TRUE(check_rounding(GetParam().rounding, scheme).ok()) << scheme.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Both,
                         LearnedRounding,
                         testing::Values(Learned{Rounding::kAutoround, autoround_loss},
                                         Learned{Rounding::kLwc, lwc_loss}),
                         [](const auto& info) {
                           return std::string(rounding_name(info.param.rounding));
                         });

}  // namespace
}  // namespace nibble
