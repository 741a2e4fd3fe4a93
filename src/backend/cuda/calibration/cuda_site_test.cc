// Sums of products and their factor on the GPU beside double precision.

#include "backend/cuda/calibration/cuda_site.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

using testing::brief_tests;
using testing::DeviceArray;
using testing::random_values;

std::vector<uint16_t> bf16_of(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::ranges::transform(values, bits.begin(), [](float x) { return f32_to_bf16(x); });
  return bits;
}

class CalibrationSums : public ::testing::Test {
 protected:
  void SetUp() override {
    NIBBLE_NEEDS_GPU();
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    work_ = CalibrationWork::create(stream_).value();
  }
  void TearDown() override {
    work_.reset();
    if (stream_ != nullptr) {
      cudaStreamDestroy(stream_);
    }
  }

  std::unique_ptr<CudaSite> site(int64_t k, ActFormat act = ActFormat::kBf16) {
    auto made = CudaSite::create(*work_, k, act).value();
    return std::unique_ptr<CudaSite>(dynamic_cast<CudaSite*>(made.release()));
  }

  static std::vector<float> read(const float* from, int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), from, values.size() * 4, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

  /// Some sums beside those of x [rows, k] in double precision; their share of what the diagonal
  /// allows.
  static double worst(const std::vector<float>& sums, const std::vector<float>& x, int64_t k) {
    std::mt19937 random(5);
    const auto rows = std::ssize(x) / k;
    double most = 0;
    for (int sample = 0; sample < 3000; ++sample) {
      const auto i = static_cast<int64_t>(random() % static_cast<uint64_t>(k));
      const auto j = static_cast<int64_t>(random() % static_cast<uint64_t>(k));
      double expected = 0;
      double first = 0;
      double second = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const double a = x[static_cast<size_t>(row * k + i)];
        const double b = x[static_cast<size_t>(row * k + j)];
        expected += a * b;
        first += a * a;
        second += b * b;
      }
      const double found = sums[static_cast<size_t>(i * k + j)];
      EXPECT_EQ(found, sums[static_cast<size_t>(j * k + i)]);
      most = std::max(most, std::fabs(found - expected) / std::sqrt(first * second + 1e-30));
    }
    return most;
  }

  cudaStream_t stream_ = nullptr;
  std::unique_ptr<CalibrationWork> work_;
};

TEST_F(CalibrationSums, OfBf16RowsAreTheirProducts) {
  for (const int64_t k : {8, 64, 136, 1032, 2056}) {
    for (const int64_t rows : {1, 3, 17, 300}) {
      std::vector<float> x = random_values(static_cast<size_t>(2 * rows * k), 3, 1.0F);
      const std::vector<uint16_t> bits = bf16_of(x);
      std::ranges::transform(bits, x.begin(), [](uint16_t b) { return bf16_to_f32(b); });
      const DeviceArray<uint16_t> on_gpu(bits);
      const auto sums = site(k);
      for (int part = 0; part < 2; ++part) {
        sums->add_rows({on_gpu.data() + part * rows * k, nullptr}, rows);
      }
      EXPECT_EQ(sums->rows(), 2 * rows);
      const std::vector<float> diagonal = sums->finish();
      const std::vector<float> h = read(sums->sums(), k * k);
      EXPECT_EQ(diagonal.back(), h.back());
      EXPECT_LT(worst(h, x, k), 2e-6) << k << " columns, " << rows << " rows";
    }
  }
}

TEST_F(CalibrationSums, OfCodesTimesScalesAreTheirProducts) {
  constexpr int64_t kK = 264;
  constexpr int64_t kRows = 45;
  std::mt19937 random(9);
  std::vector<int8_t> codes(static_cast<size_t>(kRows * kK));
  std::ranges::generate(codes, [&] { return static_cast<int8_t>(random() % 255 - 127); });
  std::vector<float> scales = random_values(kRows, 4, 0.01F);
  std::vector<float> x(codes.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(codes[i]) * scales[i / kK];
  }
  const DeviceArray<int8_t> codes_on_gpu(codes);
  const DeviceArray<float> scales_on_gpu(scales);
  const auto sums = site(kK, ActFormat::kInt8Token);
  sums->add_rows(
      work_->split({ActFormat::kInt8Token, codes_on_gpu.data(), scales_on_gpu.data()}, kRows, kK),
      kRows);
  sums->finish();
  EXPECT_LT(worst(read(sums->sums(), kK * kK), x, kK), 2e-5);
}

TEST_F(CalibrationSums, AddUpAndAreTheSameInEveryRun) {
  constexpr int64_t kK = 200;
  const DeviceArray<uint16_t> rows(bf16_of(random_values(500 * kK, 3, 1.0F)));
  std::vector<std::vector<float>> runs;
  for (int run = 0; run < 2; ++run) {
    const auto all = site(kK);
    const auto part = site(kK);
    part->add_rows({rows.data(), nullptr}, 500);
    all->add_rows({rows.data(), nullptr}, 100);
    all->add_sums(*part, 0.5);
    EXPECT_EQ(all->rows(), 100);
    all->finish();
    runs.push_back(read(all->sums(), kK * kK));
    part->finish();
    const std::vector<float> alone = read(part->sums(), kK * kK);
    EXPECT_GT(runs[run][0], 0.5F * alone[0]);
  }
  EXPECT_EQ(runs[0], runs[1]);
}

TEST_F(CalibrationSums, HaveAFactor) {
  for (const int64_t k : {32, 128, 136, 1000, 2048, 4096}) {
    if (k > 200 && brief_tests()) {
      continue;
    }
    const int64_t rows = 2 * k;
    std::vector<float> x = random_values(static_cast<size_t>(rows * k), 3, 1.0F);
    for (size_t i = 1; i < x.size(); ++i) {
      x[i] += i % static_cast<size_t>(k) == 0 ? 0.0F : 0.8F * x[i - 1];
    }
    const DeviceArray<uint16_t> on_gpu(bf16_of(x));
    const auto sums = site(k);
    sums->add_rows({on_gpu.data(), nullptr}, rows);
    const std::vector<float> diagonal = sums->finish();
    const std::vector<float> h = read(sums->sums(), k * k);
    std::vector<int32_t> order(static_cast<size_t>(k));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, std::mt19937(7));
    const double damping = 0.01 * static_cast<double>(rows);
    ASSERT_TRUE(sums->factor(order, {.damping = damping}).value()) << k;
    const std::vector<float> r = read(work_->factored.r, k * k);
    std::mt19937 random(11);
    for (int sample = 0; sample < 3000; ++sample) {
      const auto a = static_cast<size_t>(random() % static_cast<uint64_t>(k));
      const auto b = sample % 4 == 0 ? a : static_cast<size_t>(random() % static_cast<uint64_t>(k));
      const auto size = static_cast<size_t>(k);
      double product = 0;  // of rows of R, an upper triangle
      for (size_t t = std::max(a, b); t < size; ++t) {
        product += static_cast<double>(r[a * size + t]) * static_cast<double>(r[b * size + t]);
      }
      const auto i = static_cast<size_t>(order[a]);
      const auto j = static_cast<size_t>(order[b]);
      const double expected = static_cast<double>(h[i * size + j]) + (a == b ? damping : 0.0);
      const double allowed =
          2e-5 * (std::sqrt(static_cast<double>(diagonal[i]) * diagonal[j]) + damping);
      ASSERT_NEAR(product, expected, allowed) << k << " columns, " << a << ", " << b;
    }
  }
}

TEST_F(CalibrationSums, HaveFactorsThatAreMadeAtOnce) {
  for (const int64_t k : {40, 136, 392}) {
    std::vector<std::unique_ptr<CudaSite>> sites;
    std::vector<std::vector<int32_t>> orders;
    std::vector<CudaFactors::Request> requests;
    for (uint32_t i = 0; i < 5; ++i) {
      const DeviceArray<uint16_t> rows(
          bf16_of(random_values(static_cast<size_t>(2 * k * k), 3 + i, 1.0F + 0.2F * i)));
      sites.push_back(site(k));
      sites.back()->add_rows({rows.data(), nullptr}, 2 * k);
      sites.back()->finish();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      orders.emplace_back(static_cast<size_t>(k));
      std::iota(orders.back().begin(), orders.back().end(), 0);
      std::ranges::shuffle(orders.back(), std::mt19937(i));
    }
    for (size_t i = 0; i < sites.size(); ++i) {
      const double damping = i == 3 ? -1e9 : 0.01 * static_cast<double>(k);  // one has none
      requests.push_back({sites[i].get(), sites[i]->sums(), orders[i], {.damping = damping}});
    }
    ASSERT_TRUE(work_->ahead.make(*work_, k, requests).ok());
    for (size_t i = 0; i < sites.size(); ++i) {
      EXPECT_EQ(sites[i]->factor(orders[i], requests[i].damping).value(), i != 3);
      if (i == 3) {
        continue;
      }
      EXPECT_EQ(work_->factored.r, work_->ahead.find(requests[i])->r);
      const std::vector<float> at_once = read(work_->factored.r, k * k);
      sites[i]->add_sums(*sites[i], 0.0);  // what was made ahead is forgotten
      EXPECT_EQ(work_->ahead.find(requests[i]), nullptr);
      ASSERT_TRUE(sites[i]->factor(orders[i], requests[i].damping).value());
      const std::vector<float> alone = read(work_->factored.r, k * k);
      for (int64_t row = 0; row < k; ++row) {
        for (int64_t column = row; column < k; ++column) {
          const auto at = static_cast<size_t>(row * k + column);
          ASSERT_NEAR(at_once[at], alone[at], 1e-3 * std::sqrt(static_cast<double>(k)))
              << k << ": " << row << ", " << column;
        }
      }
    }
  }
}

TEST_F(CalibrationSums, WithoutAFactorSaySo) {
  const auto sums = site(136);
  sums->finish();
  std::vector<int32_t> order(136);
  std::iota(order.begin(), order.end(), 0);
  EXPECT_FALSE(sums->factor(order, {.damping = -2}).value());
  EXPECT_TRUE(sums->factor(order, {.damping = 0.5}).value());  // of dead columns
  EXPECT_FLOAT_EQ(read(work_->factored.r, 1)[0], std::sqrt(1.5F));
}

}  // namespace
}  // namespace nibble::cuda
