// Rounding on the GPU beside the CPU's, by the same rows.

#include "backend/cuda/calibration/cuda_calibration.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/calibration/cuda_site.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "calibration/device_rounder.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/refine.h"
#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

/// Rows that BF16 holds.
std::vector<float> bf16_rows(int64_t rows, int64_t k, uint32_t seed) {
  std::vector<float> x = correlated(rows, k, seed);
  for (float& value : x) {
    value = bf16_to_f32(f32_to_bf16(value));
  }
  return x;
}

/// Other rows in their place, that BF16 holds.
std::vector<float> drifted(const std::vector<float>& x, uint32_t seed) {
  std::vector<float> wanted = gaussian(std::ssize(x), seed);
  for (size_t i = 0; i < x.size(); ++i) {
    wanted[i] = bf16_to_f32(f32_to_bf16(x[i] + 0.1F * std::fabs(x[i]) * wanted[i] + 0.05F * x[i]));
  }
  return wanted;
}

class CalibrationOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    NIBBLE_NEEDS_GPU();
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    math_ = cuda::make_cuda_calibration(stream_).value();
  }
  void TearDown() override {
    math_.reset();
    if (stream_ != nullptr) {
      cudaStreamDestroy(stream_);
    }
  }

  std::unique_ptr<SiteMath> site_of(const std::vector<float>& x, int64_t k) {
    std::vector<uint16_t> bits(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      bits[i] = f32_to_bf16(x[i]);
    }
    const cuda::testing::DeviceArray<uint16_t> rows(bits);
    auto site = math_->make_site(k, ActFormat::kBf16).value();
    dynamic_cast<cuda::CudaSite&>(*site).add_rows({rows.data(), nullptr}, std::ssize(x) / k);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return site;
  }

  /// Of rows that are counted with what they would be.
  std::unique_ptr<SiteMath> site_with_drift(const std::vector<float>& x,
                                            const std::vector<float>& wanted,
                                            int64_t k) {
    const auto bf16 = [](const std::vector<float>& values) {
      std::vector<uint16_t> bits(values.size());
      std::ranges::transform(values, bits.begin(), [](float value) { return f32_to_bf16(value); });
      return bits;
    };
    const cuda::testing::DeviceArray<uint16_t> rows(bf16(x));
    const cuda::testing::DeviceArray<uint16_t> others(bf16(wanted));
    auto site = math_->make_site(k, ActFormat::kBf16).value();
    EXPECT_TRUE(site->expect_drift().ok());
    auto& on_device = dynamic_cast<cuda::CudaSite&>(*site);
    on_device.add_rows({rows.data(), nullptr}, std::ssize(x) / k);
    on_device.add_drift_rows({rows.data(), nullptr}, others.data(), std::ssize(x) / k);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return site;
  }

  /// Completes the sums, and factors them.
  void factor(SiteMath& site) {
    PartTimes times;
    DeviceRounding parts(*math_, pool_, times);
    EXPECT_TRUE(DeviceRounder::create(site, Rounding::kGptq, parts).value()->has_factor());
  }

  RoundedMatrix on_gpu(const MatrixToRound& matrix, Rounding rounding, SiteMath& site) {
    PartTimes times;
    DeviceRounding parts(*math_, pool_, times);
    const auto rounder = DeviceRounder::create(site, rounding, parts).value();
    RoundedMatrix out;
    int called = 0;
    EXPECT_TRUE(rounder->round(matrix, out, [&] { ++called; }).ok());
    EXPECT_EQ(called, rounder->has_sums() ? 1 : 0);
    return out;
  }

  /// With scales that are there, by a site that has a factor. `error` is trace(E H E^T).
  static RoundedMatrix round(const Problem& problem,
                             const RoundedMatrix& scales,
                             RoundingWay way,
                             SiteMath& site) {
    RoundedMatrix out = scales;
    EXPECT_TRUE(site.load(problem.w).ok());
    site.round(way, {.format = problem.matrix.format,
                     .scales = scales.scales.data(),
                     .zeros = scales.zeros.empty() ? nullptr : scales.zeros.data(),
                     .fits = fits_scales(problem.matrix)});
    out.error = site.take_errors().at(0);
    site.read_values(out.values);
    site.read_scales(out.scales);
    return out;
  }

  /// Of equal codes: scales may differ by the last place, as the sums do that they are chosen by.
  static double equal_share(const RoundedMatrix& a, const RoundedMatrix& b) {
    const float step = 0.1F * std::fabs(*std::ranges::min_element(
                                  a.scales, {}, [](float x) { return std::fabs(x); }));
    size_t equal = 0;
    for (size_t i = 0; i < a.values.size(); ++i) {
      equal += std::fabs(a.values[i] - b.values[i]) < step ? 1 : 0;
    }
    return static_cast<double>(equal) / static_cast<double>(a.values.size());
  }

  ThreadPool pool_{2};
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<CalibrationMath> math_;
};

TEST_F(CalibrationOnGpu, RoundsAsTheCpuDoes) {
  for (const QuantScheme& scheme : schemes()) {
    for (const int64_t n : {1, 70}) {
      constexpr int64_t kK = 384;  // three blocks of columns
      const Problem problem(scheme, n, kK, 7);
      const std::vector<float> x = bf16_rows(900, kK, 11);
      const Gram gram = gram_of(x, kK, pool_);
      const auto site = site_of(x, kK);
      for (const Rounding rounding : {Rounding::kRtn, Rounding::kImatrix, Rounding::kGptq}) {
        const SiteStatistics statistics = make_site_statistics(gram, rounding, pool_);
        const RoundedMatrix wanted = round_matrix(problem.matrix, rounding, statistics, pool_);
        const RoundedMatrix found = on_gpu(problem.matrix, rounding, *site);
        const std::string what =
            fmt::format("{} {} of {} rows", scheme.name, rounding_name(rounding), n);
        EXPECT_EQ(found.rounding, wanted.rounding) << what;
        EXPECT_NEAR(found.outputs / wanted.outputs, 1, 1e-5) << what;
        EXPECT_NEAR(found.rtn_error / wanted.rtn_error, 1, 1e-4) << what;
        if (rounding == Rounding::kRtn) {
          EXPECT_EQ(found.scales, wanted.scales) << what;
          EXPECT_EQ(found.zeros, wanted.zeros) << what;
          EXPECT_EQ(found.values, wanted.values) << what;
          continue;
        }
        // A tie that single precision decides otherwise moves the codes after it.
        const bool by_columns = rounding == Rounding::kGptq;
        EXPECT_GT(equal_share(found, wanted), by_columns ? (n == 1 ? 0.7 : 0.9) : 0.99) << what;
        EXPECT_NEAR(found.error / wanted.error, 1, by_columns ? (n == 1 ? 0.05 : 5e-3) : 2e-3)
            << what;
      }
    }
  }
}

TEST_F(CalibrationOnGpu, RoundsColumnsThatFillNoBlock) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  for (const int64_t k : {32, 160, 352}) {
    const Problem problem(scheme, 130, k, 3);
    const std::vector<float> x = bf16_rows(500, k, 5);
    const Gram gram = gram_of(x, k, pool_);
    const auto site = site_of(x, k);
    const SiteStatistics statistics = make_site_statistics(gram, Rounding::kGptq, pool_);
    const RoundedMatrix wanted = by_columns(problem, Rounding::kGptq, statistics, pool_);
    const double error = output_error(gram, {problem.w.data(), wanted.values.data(), 130}, pool_);
    factor(*site);
    std::vector<RoundedMatrix> found;
    for (int run = 0; run < 2; ++run) {
      found.push_back(round(problem, wanted, RoundingWay::kByColumns, *site));
    }
    EXPECT_EQ(found[0].values, found[1].values);
    EXPECT_EQ(found[0].error, found[1].error);
    EXPECT_EQ(found[0].scales, wanted.scales);
    EXPECT_GT(equal_share(found[0], wanted), 0.97) << k;
    EXPECT_NEAR(found[0].error / error, 1, 2e-3) << k;
  }
}

/// trace(E (H + damping) E^T), which refine() lessens.
double damped_loss(const Problem& problem, const SiteStatistics& site, const RoundedMatrix& of) {
  ThreadPool pool(2);
  double sum =
      output_error(*site.gram, {problem.w.data(), of.values.data(), problem.matrix.n}, pool);
  for (size_t i = 0; i < problem.w.size(); ++i) {
    const double e = static_cast<double>(problem.w[i]) - of.values[i];
    sum += site.factor->damping * site.gram->mean_diagonal() * e * e;
  }
  return sum;
}

/// Whether values are those of codes, and scales are stored as they are.
bool has_codes(const Problem& problem, const RoundedMatrix& rounded) {
  const WeightFormat& format = problem.matrix.format;
  const int64_t k = problem.matrix.k;
  const int64_t groups = format.groups(k);
  for (size_t i = 0; i < rounded.values.size(); ++i) {
    const auto column = static_cast<int64_t>(i) % k;
    const auto at =
        static_cast<size_t>(static_cast<int64_t>(i) / k * groups + column / (k / groups));
    const float scale = rounded.scales[at];
    const double zero = rounded.zeros.empty() ? 0 : rounded.zeros[at];
    const bool stored =
        format.scale_dtype != DType::kBF16 || bf16_to_f32(f32_to_bf16(scale)) == scale;
    if (!stored ||
        static_cast<float>(nearest(format, rounded.values[i], scale, zero)) != rounded.values[i]) {
      return false;
    }
  }
  return true;
}

TEST_F(CalibrationOnGpu, RefinesAsTheCpuDoes) {
  uint32_t seed = 100;
  for (const QuantScheme& scheme : schemes()) {
    const int64_t group = scheme.weight.group_size;
    const int64_t odd = group > 32 ? 640 : group > 0 ? 352 : 360;  // fills no block
    for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
             {1, odd}, {3, 384}, {17, group > 0 ? group : 40}, {70, odd}, {130, 1152}}) {
      const Problem problem(scheme, n, k, ++seed);
      const std::vector<float> x = bf16_rows(2 * k, k, ++seed);
      const Gram gram = gram_of(x, k, pool_);
      const SiteStatistics statistics = make_site_statistics(gram, Rounding::kGptq, pool_);
      const RoundedMatrix start = by_columns(problem, Rounding::kGptq, statistics, pool_);
      RoundedMatrix wanted = start;
      refine(problem.matrix, statistics, wanted, pool_);
      const auto site = site_of(x, k);
      factor(*site);
      const RoundedMatrix columns = round(problem, start, RoundingWay::kByColumns, *site);
      const RoundedMatrix found = round(problem, start, RoundingWay::kRefined, *site);
      const std::string what = fmt::format("{} [{}, {}]", scheme.name, n, k);
      const double loss = damped_loss(problem, statistics, found);
      EXPECT_LE(loss, damped_loss(problem, statistics, columns) * (1 + 1e-6)) << what;
      EXPECT_NEAR(loss / damped_loss(problem, statistics, wanted), 1, n < 50 ? 0.05 : 2e-3) << what;
      EXPECT_GT(equal_share(found, wanted), n < 50 ? 0.5 : 0.9) << what;
      EXPECT_NEAR(
          found.error / output_error(gram, {problem.w.data(), found.values.data(), n}, pool_), 1,
          1e-4)
          << what;
      EXPECT_TRUE(has_codes(problem, found)) << what;
      if (!fits_scales(problem.matrix)) {
        EXPECT_EQ(found.scales, start.scales) << what;
      }
      const RoundedMatrix again = round(problem, start, RoundingWay::kRefined, *site);
      EXPECT_EQ(again.values, found.values) << what;
      EXPECT_EQ(again.scales, found.scales) << what;
      EXPECT_EQ(again.error, found.error) << what;
    }
  }
}

TEST_F(CalibrationOnGpu, RefinesColumnsThatAreDead) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  constexpr int64_t kK = 256;
  const Problem problem(scheme, 40, kK, 3);
  std::vector<float> x = bf16_rows(300, kK, 5);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = i % kK == 7 || (i % kK >= 64 && i % kK < 96) ? 0 : x[i];
  }
  const Gram gram = gram_of(x, kK, pool_);
  const SiteStatistics statistics = make_site_statistics(gram, Rounding::kGptq, pool_);
  const RoundedMatrix start = by_columns(problem, Rounding::kGptq, statistics, pool_);
  const auto site = site_of(x, kK);
  factor(*site);
  const RoundedMatrix found = round(problem, start, RoundingWay::kRefined, *site);
  RoundedMatrix wanted = start;
  refine(problem.matrix, statistics, wanted, pool_);
  EXPECT_NEAR(damped_loss(problem, statistics, found) / damped_loss(problem, statistics, wanted), 1,
              2e-3);
  EXPECT_TRUE(has_codes(problem, found));
}

TEST_F(CalibrationOnGpu, MakesGoodForADriftAsTheCpuDoes) {
  uint32_t seed = 700;
  for (const char* name : {"w4a16_g32", "w4a16_g128_asym", "w4a8", "w4a8_g128", "mxfp4"}) {
    const QuantScheme scheme = find_scheme(name).value();
    for (const auto& [n, k] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 256}, {17, 128}, {70, 640}}) {
      const Problem problem(scheme, n, k, ++seed);
      const std::vector<float> x = bf16_rows(3 * k, k, ++seed);
      const std::vector<float> wanted = drifted(x, ++seed);
      const Gram gram = gram_of(x, k, pool_);
      Drift drift(k);
      drift.add({.x = x.data(), .wanted = wanted.data(), .count = 3 * k}, pool_);
      const SiteStatistics statistics = make_site_statistics(gram, Rounding::kGptaq, pool_, &drift);
      const RoundedMatrix expected =
          round_matrix(problem.matrix, Rounding::kGptaq, statistics, pool_);
      std::vector<RoundedMatrix> found;
      for (int run = 0; run < 2; ++run) {
        const auto site = site_with_drift(x, wanted, k);
        found.push_back(on_gpu(problem.matrix, Rounding::kGptaq, *site));
      }
      const std::string what = fmt::format("{} [{}, {}]", name, n, k);
      EXPECT_EQ(found[0].rounding, expected.rounding) << what;
      EXPECT_NEAR(found[0].outputs / expected.outputs, 1, 1e-5) << what;
      EXPECT_NEAR(found[0].rtn_error / expected.rtn_error, 1, 1e-3) << what;
      EXPECT_NEAR(found[0].error / expected.error, 1, n < 50 ? 0.05 : 5e-3) << what;
      EXPECT_GT(equal_share(found[0], expected), n < 50 ? 0.5 : 0.9) << what;
      EXPECT_EQ(found[0].values, found[1].values) << what;
      EXPECT_EQ(found[0].error, found[1].error) << what;
      if (n < 17) {
        continue;
      }
      // Which gptq, that knows nothing of the drift, does not reach.
      const auto site = site_with_drift(x, x, k);
      const RoundedMatrix without = on_gpu(problem.matrix, Rounding::kGptq, *site);
      const PublishedRows rows{x, wanted};
      EXPECT_LT(measured_error(problem.matrix, rows, found[0].values),
                measured_error(problem.matrix, rows, without.values))
          << what;
    }
  }
}

TEST_F(CalibrationOnGpu, DoesWithoutADriftThatIsNoNumber) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  const Problem problem(scheme, 9, 64, 3);
  const std::vector<float> x = bf16_rows(100, 64, 5);
  std::vector<float> wanted = drifted(x, 6);
  const RoundedMatrix gptq = on_gpu(problem.matrix, Rounding::kGptq, *site_of(x, 64));
  wanted[70] = std::numeric_limits<float>::infinity();
  const RoundedMatrix found =
      on_gpu(problem.matrix, Rounding::kGptaq, *site_with_drift(x, wanted, 64));
  EXPECT_EQ(found.rounding, Rounding::kGptq);
  EXPECT_EQ(found.values, gptq.values);
}

TEST_F(CalibrationOnGpu, RoundsToTheNearestWithoutNumbers) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  const Problem problem(scheme, 9, 64, 3);
  std::vector<float> x = bf16_rows(100, 64, 5);
  x[70] = std::numeric_limits<float>::infinity();
  const auto site = site_of(x, 64);
  const RoundedMatrix found = on_gpu(problem.matrix, Rounding::kGptq, *site);
  EXPECT_EQ(found.rounding, Rounding::kRtn);
  const SiteStatistics none;
  EXPECT_EQ(found.values, round_matrix(problem.matrix, Rounding::kRtn, none, pool_).values);
}

}  // namespace
}  // namespace nibble
