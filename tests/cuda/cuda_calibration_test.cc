// Rounding on the GPU beside the CPU's, by the same rows.

#include "backend/cuda/calibration/cuda_calibration.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/calibration/cuda_site.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "calibration/device_rounder.h"
#include "quantizer/algorithms/gptq.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/rtn.h"
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

  RoundedMatrix on_gpu(const MatrixToRound& matrix, Rounding rounding, SiteMath& site) {
    PartTimes times;
    DeviceRounding parts(*math_, pool_, times);
    const auto rounder = DeviceRounder::create(site, rounding, parts).value();
    RoundedMatrix out;
    EXPECT_TRUE(rounder->round(matrix, out).ok());
    return out;
  }

  /// What the CPU makes of it by columns, before it refines that.
  RoundedMatrix by_columns(const MatrixToRound& matrix, const SiteStatistics& site) {
    RoundedMatrix out = round_matrix(matrix, Rounding::kRtn, site, pool_);
    choose_all_scales(matrix, site.importance.data(), out, pool_);
    round_by_columns(matrix, site, out, pool_);
    out.rounding = Rounding::kGptq;
    out.error =
        output_error(*site.gram, {matrix.w, out.values.data(), matrix.n}, pool_) / out.outputs;
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
        const RoundedMatrix wanted =
            rounding == Rounding::kGptq ? by_columns(problem.matrix, statistics)
                                        : round_matrix(problem.matrix, rounding, statistics, pool_);
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
        EXPECT_GT(equal_share(found, wanted), by_columns ? (n == 1 ? 0.8 : 0.97) : 0.99) << what;
        EXPECT_NEAR(found.error / wanted.error, 1, by_columns && n == 1 ? 0.05 : 2e-3) << what;
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
    const RoundedMatrix wanted = by_columns(problem.matrix, statistics);
    std::vector<RoundedMatrix> found;
    for (int run = 0; run < 2; ++run) {
      found.push_back(on_gpu(problem.matrix, Rounding::kGptq, *site));
    }
    EXPECT_EQ(found[0].values, found[1].values);
    EXPECT_EQ(found[0].error, found[1].error);
    EXPECT_GT(equal_share(found[0], wanted), 0.97) << k;
    EXPECT_NEAR(found[0].error / wanted.error, 1, 2e-3) << k;
  }
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
