// Sums of experts' rows with what these would be, on the GPU beside the CPU's rows.

#include "backend/expert_drifts.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/calibration/cuda_site.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

/// What the CPU's experts are shown.
class Shown final : public ExpertObserver {
 public:
  explicit Shown(int64_t k) : k_(k) {}
  [[nodiscard]] bool wants(int32_t /*expert*/) const override { return true; }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    counts.resize(static_cast<size_t>(expert) + 1);
    counts[static_cast<size_t>(expert)] = std::ssize(of);
    order.insert(order.end(), of.begin(), of.end());
    all.insert(all.end(), rows, rows + std::ssize(of) * k_);
  }

  std::vector<int64_t> counts;  // by expert
  std::vector<int64_t> order;   // rows of the step, expert by expert
  std::vector<float> all;       // what they multiply

 private:
  int64_t k_;
};

std::vector<float> floats_of(const std::vector<uint16_t>& bits) {
  std::vector<float> values(bits.size());
  std::ranges::transform(bits, values.begin(), [](uint16_t b) { return bf16_to_f32(b); });
  return values;
}

class ExpertDriftTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr ExpertsShape kShape{6, 2, 128, 64};

  void SetUp() override {
    NIBBLE_NEEDS_GPU();
    gpu_ = make_cuda_backend({}).value();
    cpu_ = make_cpu_backend({.threads = 2}).value();
    math_ = gpu_->calibration_math().value();
  }

  /// Rows [count, k] in BF16 that are a little off others.
  static std::vector<uint16_t> near(const std::vector<uint16_t>& rows, uint32_t seed) {
    std::vector<float> values = floats_of(rows);
    const std::vector<float> noise = random_values(values.size(), seed, 0.1F);
    std::ranges::transform(values, noise, values.begin(), std::plus<>());
    return to_bf16(values);
  }

  /// Sums of all experts on the GPU beside those of rows in double precision.
  struct Rows {
    const Shown& x;
    std::vector<float> wanted;  // of x.all
    int64_t k;
  };
  void expect_sums(const std::vector<std::unique_ptr<SiteMath>>& sites, const Rows& rows) const {
    const int64_t k = rows.k;
    int64_t begin = 0;
    for (size_t expert = 0; expert < sites.size(); ++expert) {
      const auto& site = dynamic_cast<const CudaSite&>(*sites[expert]);
      const int64_t count = expert < rows.x.counts.size() ? rows.x.counts[expert] : 0;
      EXPECT_EQ(site.rows(), count) << expert;
      std::vector<float> drift(static_cast<size_t>(k * k));
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(
          cudaMemcpy(drift.data(), site.drift()->sums(), drift.size() * 4, cudaMemcpyDeviceToHost),
          cudaSuccess);
      double off = 0;
      double size = 0;
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          double sum = 0;
          for (int64_t row = begin; row < begin + count; ++row) {
            const double x = rows.x.all[static_cast<size_t>(row * k + i)];
            const double change =
                static_cast<double>(rows.wanted[static_cast<size_t>(row * k + i)]) - x;
            sum += change * rows.x.all[static_cast<size_t>(row * k + j)];
          }
          off += std::pow(drift[static_cast<size_t>(i * k + j)] - sum, 2);
          size += sum * sum;
        }
      }
      EXPECT_LE(std::sqrt(off), 1e-2 * std::sqrt(size)) << "expert " << expert;
      begin += count;
    }
  }

  std::vector<std::unique_ptr<SiteMath>> sites(int64_t k) {
    std::vector<std::unique_ptr<SiteMath>> made;
    for (int64_t expert = 0; expert < kShape.experts; ++expert) {
      made.push_back(math_->make_site(k, ActFormat::kBf16).value());
      EXPECT_TRUE(made.back()->expect_drift().ok());
    }
    return made;
  }
  static std::vector<SiteMath*> places(const std::vector<std::unique_ptr<SiteMath>>& sites) {
    std::vector<SiteMath*> all;
    std::ranges::transform(sites, std::back_inserter(all), [](const auto& s) { return s.get(); });
    return all;
  }

  std::unique_ptr<Backend> gpu_, cpu_;
  std::unique_ptr<CalibrationMath> math_;
};

TEST_P(ExpertDriftTest, AreThoseOfTheRows) {
  RandomExperts layer(find_scheme(GetParam()).value(), kShape, DType::kBF16);
  layer.weights.form.router.renormalise = true;
  for (const int64_t m : {1, 3, 17, 150}) {
    SCOPED_TRACE(m);
    auto on_gpu = gpu_->prepare_experts(layer.request(150)).value();
    auto on_cpu = cpu_->prepare_experts(layer.request(150)).value();
    auto* drifts = dynamic_cast<ExpertDrifts*>(on_gpu.get());
    ASSERT_NE(drifts, nullptr);
    const std::vector<uint16_t> x = to_bf16(random_values(static_cast<size_t>(m * 128), 7, 1.0F));
    const std::vector<uint16_t> f = near(x, 9);
    const DeviceArray<uint16_t> x_on_gpu(x);
    const DeviceArray<uint16_t> f_on_gpu(f);
    const auto view = [&](const uint16_t* rows, const uint16_t* chosen_by, ExpertPart part) {
      return ExpertView{.x = {rows, DType::kBF16},
                        .chosen_by = {chosen_by, DType::kBF16},
                        .x_stride = 128,
                        .m = m,
                        .part = part};
    };
    const auto up = sites(128);
    drifts->add_rows_and_drifts(view(x_on_gpu.data(), x_on_gpu.data(), ExpertPart::kGateUp),
                                places(up), f_on_gpu.data());
    Shown shown(128);
    on_cpu->show_rows(view(x.data(), x.data(), ExpertPart::kGateUp), shown);
    const std::vector<float> plain = floats_of(f);
    std::vector<float> wanted;
    for (const int64_t row : shown.order) {
      wanted.insert(wanted.end(), plain.begin() + row * 128, plain.begin() + (row + 1) * 128);
    }
    expect_sums(up, {shown, wanted, 128});

    // Of down the GPU's own rows, which differ from the CPU's by roundings to BF16.
    const auto keep = [&](const DeviceArray<uint16_t>& rows, const std::vector<uint16_t>& on_host,
                          const DeviceArray<uint16_t>& out) {
      drifts->keep_down_rows(view(rows.data(), x_on_gpu.data(), ExpertPart::kDown), out.data());
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      Shown kept(kShape.width);
      on_cpu->show_rows(view(on_host.data(), x.data(), ExpertPart::kDown), kept);
      EXPECT_EQ(kept.order, shown.order);
      const std::vector<float> found = floats_of(out.host());
      EXPECT_LT(relative_error(found, kept.all), 1e-2);
      kept.all = found;
      return kept;
    };
    const auto slots = static_cast<size_t>(m * kShape.top_k * kShape.width);
    const DeviceArray<uint16_t> x_kept(slots);
    const DeviceArray<uint16_t> f_kept(slots);
    const Shown x_rows = keep(x_on_gpu, x, x_kept);
    const Shown f_rows = keep(f_on_gpu, f, f_kept);
    const auto down = sites(kShape.width);
    drifts->add_rows_and_drifts(view(x_on_gpu.data(), x_on_gpu.data(), ExpertPart::kDown),
                                places(down), f_kept.data());
    expect_sums(down, {x_rows, f_rows.all, kShape.width});
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes,
                         ExpertDriftTest,
                         ::testing::Values("bf16", "w4a16_g32", "w8a16_channel"));

TEST(SiteDrifts, AreAddedWithTheSums) {
  NIBBLE_NEEDS_GPU();
  const auto gpu = make_cuda_backend({}).value();
  const auto math = gpu->calibration_math().value();
  constexpr int64_t kK = 136;
  const DeviceArray<uint16_t> x(to_bf16(random_values(40 * kK, 3, 1.0F)));
  const DeviceArray<uint16_t> f(to_bf16(random_values(40 * kK, 4, 1.0F)));
  std::vector<std::unique_ptr<SiteMath>> made;
  for (int i = 0; i < 2; ++i) {
    made.push_back(math->make_site(kK, ActFormat::kBf16).value());
    ASSERT_TRUE(made.back()->expect_drift().ok());
  }
  auto& first = dynamic_cast<CudaSite&>(*made[0]);
  auto& second = dynamic_cast<CudaSite&>(*made[1]);
  first.add_drift_rows({x.data(), nullptr}, f.data(), 40);
  second.add_drift_rows({x.data(), nullptr}, f.data(), 40);
  second.add_sums(first, 0.5);
  std::vector<std::vector<float>> sums;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const CudaSite* site : {&first, &second}) {
    sums.emplace_back(static_cast<size_t>(kK * kK));
    EXPECT_EQ(cudaMemcpy(sums.back().data(), site->drift()->sums(), sums.back().size() * 4,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  for (size_t i = 0; i < sums[0].size(); ++i) {
    EXPECT_FLOAT_EQ(sums[1][i], 1.5F * sums[0][i]);
  }
}

}  // namespace
}  // namespace nibble::cuda
