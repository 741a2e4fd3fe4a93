#include <cmath>
#include <random>
#include <vector>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"
#include "backend/cuda/testing/gemm_schedules.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "quant/scheme.h"

// Every tile of w4a16_sm90/w4a16_sm90.cuh with every way to share its steps.
namespace nibble::cuda {
namespace {

float round_to_bf16(float value) { return bf16_to_f32(f32_to_bf16(value)); }

/// Random weights and `rows` random rows, with what their product is.
class Subject final {
 public:
  Subject(std::string_view scheme_name, int64_t n, int64_t k, int64_t rows)
      : n_(n), k_(k), random_(static_cast<uint32_t>(n + k)) {
    const QuantScheme scheme = find_scheme(scheme_name).value();
    kernel_ = make_w4a16_wide({.weight = scheme.weight, .act = scheme.act, .n = n, .k = k},
                              query_device(0).value())
                  .value();
    gemm_ = dynamic_cast<const GemmSm90*>(kernel_.get());
    std::vector<uint8_t> codes(static_cast<size_t>(n * k / 2));
    for (uint8_t& byte : codes) {
      byte = static_cast<uint8_t>(random_());
    }
    const int64_t groups = k / scheme.weight.group_size;
    std::vector<float> scales(static_cast<size_t>(n * groups));
    for (float& scale : scales) {
      scale = round_to_bf16(std::uniform_real_distribution<float>(0.5F, 2.0F)(random_));
    }
    std::vector<float> x(static_cast<size_t>(rows * k));
    std::vector<uint16_t> packed_x(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = round_to_bf16(std::normal_distribution<float>()(random_));
      packed_x[i] = f32_to_bf16(x[i]);
    }
    expected_.resize(static_cast<size_t>(rows * n));
    std::vector<float> weights(static_cast<size_t>(k));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const int code = codes[static_cast<size_t>((row * k + i) / 2)] >> (4 * (i % 2)) & 15;
        weights[static_cast<size_t>(i)] =
            round_to_bf16(static_cast<float>(code - 8) *
                          scales[static_cast<size_t>(row * groups + i / scheme.weight.group_size)]);
      }
      for (int64_t token = 0; token < rows; ++token) {
        double sum = 0.0;
        for (int64_t i = 0; i < k; ++i) {
          sum += static_cast<double>(weights[static_cast<size_t>(i)]) *
                 static_cast<double>(x[static_cast<size_t>(token * k + i)]);
        }
        expected_[static_cast<size_t>(token * n + row)] = sum;
      }
    }
    const testing::DeviceArray<uint8_t> device_codes(codes);
    const testing::DeviceArray<float> device_scales(scales);
    packed_ = std::make_unique<testing::DeviceArray<uint8_t>>(kernel_->packed_bytes());
    EXPECT_EQ(kernel_->pack(device_codes.data(), device_scales.data(), packed_->data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    x_ = std::make_unique<testing::DeviceArray<uint16_t>>(packed_x);
    workspace_ = std::make_unique<testing::DeviceArray<uint8_t>>(size_t{96} << 20);
    workspace_->zero();
  }
  [[nodiscard]] const GemmSm90& gemm() const { return *gemm_; }

  /// ‖y − product‖ / ‖product‖ of the first m rows.
  double error(int64_t m, int tile, const GemmSchedule& schedule) {
    return error_in<float>(m, tile, schedule, GemmResult::kF32, 4,
                           [](float value) { return value; });
  }
  /// The same of results in BF16.
  double error_in_bf16(int64_t m, int tile, const GemmSchedule& schedule) {
    return error_in<uint16_t>(m, tile, schedule, GemmResult::kBf16, 8, bf16_to_f32);
  }

 private:
  /// gap: from one row of results to the next.
  template <typename T, typename Value>
  double error_in(int64_t m,
                  int tile,
                  const GemmSchedule& schedule,
                  GemmResult result,
                  int64_t gap,
                  const Value& value) {
    const int64_t stride = n_ + gap;
    const testing::DeviceArray<T> y(static_cast<size_t>(m * stride));
    EXPECT_EQ(gemm_->run_schedule(tile, schedule,
                                  {.x = x_->data(),
                                   .packed = packed_->data(),
                                   .y = y.data(),
                                   .y_stride = stride,
                                   .m = m,
                                   .result = result,
                                   .workspace = workspace_->data()},
                                  {}),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<T> got = y.host();
    double difference = 0.0, norm = 0.0;
    for (int64_t token = 0; token < m; ++token) {
      for (int64_t row = 0; row < n_; ++row) {
        const double wanted = expected_[static_cast<size_t>(token * n_ + row)];
        const double off = value(got[static_cast<size_t>(token * stride + row)]) - wanted;
        difference += off * off;
        norm += wanted * wanted;
      }
    }
    return std::sqrt(difference / norm);
  }

  int64_t n_, k_;
  std::mt19937 random_;
  std::unique_ptr<GemmKernel> kernel_;
  const GemmSm90* gemm_ = nullptr;
  std::vector<double> expected_;
  std::unique_ptr<testing::DeviceArray<uint8_t>> packed_, workspace_;
  std::unique_ptr<testing::DeviceArray<uint16_t>> x_;
};

std::vector<GemmSchedule> schedules(const GemmSm90& gemm, int index, int64_t m, bool clusters) {
  return testing::gemm_schedules(gemm, index, m, clusters, [](int tiles, int most) {
    return std::vector{tiles, 2 * tiles, tiles + 1, most};
  });
}

/// Schedules of more than two blocks that own two row blocks, or all others.
enum class Which : uint8_t { kOfManyBlocks, kOthers };

void check_tiles(
    std::string_view scheme, int64_t n, int64_t k, std::vector<int64_t> row_counts, Which which) {
  const bool brief = testing::brief_tests();
  if (brief) {
    row_counts = {row_counts[(row_counts.size() - 1) / 2]};
  }
  Subject subject(scheme, n, k, row_counts.back());
  for (const int64_t m : row_counts) {
    for (int tile = 0; tile < static_cast<int>(subject.gemm().tiles().size()); ++tile) {
      int number = 0;
      for (const GemmSchedule& schedule : schedules(subject.gemm(), tile, m, n % 2 == 0)) {
        if ((schedule.parts > 2) != (which == Which::kOfManyBlocks)) {
          continue;
        }
        if (brief && number++ % 4 != 1) {  // a cluster, whole tiles
          continue;
        }
        EXPECT_LE(subject.error(m, tile, schedule), 1e-5)
            << scheme << " n " << n << " k " << k << " m " << m << " tile " << tile << " cluster "
            << schedule.cluster << " split " << schedule.split_blocks << " of "
            << schedule.split_tiles << " turn " << schedule.turn << " parts " << schedule.parts;
        if (n % 64 == 0) {  // rows that leave in whole words
          EXPECT_LE(subject.error_in_bf16(m, tile, schedule), 3e-3)
              << scheme << " n " << n << " k " << k << " m " << m << " tile " << tile << " turn "
              << schedule.turn << " parts " << schedule.parts;
        }
      }
    }
  }
}

void check_all(Which which) {
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  check_tiles("w4a16_g128", 328, 1536, {17, 64, 100, 257}, which);
  check_tiles("w4a16_g32", 328, 1504, {17, 65, 128, 192}, which);
  check_tiles("w4a16_g128", 320, 1280, {17, 96, 130}, which);
  check_tiles("w4a16_g32", 67, 704, {33, 129}, which);
  if (which == Which::kOthers) {  // more clusters than run at once
    check_tiles("w4a16_g128", 1088, 1280, {257}, which);
  }
}

TEST(GemmW4A16WideSm90, TilesAndSchedulesEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  check_all(Which::kOthers);
}

TEST(GemmW4A16WideSm90, SumsOfManyBlocksEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  check_all(Which::kOfManyBlocks);
}

}  // namespace
}  // namespace nibble::cuda
