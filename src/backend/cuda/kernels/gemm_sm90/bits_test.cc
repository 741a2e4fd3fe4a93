#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/testing/gemm_schedules.h"
#include "backend/cuda/testing/gpu_test.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"
#include "quant/testing/random_levels.h"

// Integer products give a row the same bits whatever the batch, the tile and the schedule: the
// CPU's.
namespace nibble::cuda {
namespace {

constexpr int64_t kMostRows = 300;
constexpr int64_t kGap = 4;  // from one row of results to the next

/// A product of random codes with kMostRows random rows.
class Subject final {
 public:
  Subject(const GemmEntry& entry, std::string_view scheme_name, int64_t n, int64_t k)
      : n_(n), k_(k), random_(static_cast<uint32_t>(n + k)) {
    const QuantScheme scheme = find_scheme(scheme_name).value();
    const DeviceInfo device = query_device(0).value();
    kernel_ =
        entry.make({.weight = scheme.weight, .act = scheme.act, .n = n, .k = k}, device).value();
    gemm_ = dynamic_cast<const GemmSm90*>(kernel_.get());
    const int64_t row_bytes = QuantTensor::code_row_bytes(scheme.weight.code, k);
    weight_.format = scheme.weight;
    weight_.codes = random_bytes(static_cast<size_t>(n * row_bytes));
    weight_.scales = random_scales(static_cast<size_t>(n));
    std::vector<float> numbers = weight_.scales;
    if (in_two_levels(scheme.weight, scheme.act)) {
      numbers = take_levels();
    }
    const DeviceArray codes(weight_.codes);
    const DeviceArray scales(numbers);
    packed_ = std::make_unique<Bytes>(kernel_->packed_bytes());
    EXPECT_EQ(kernel_->pack(codes.data(), scales.data(), packed_->data(), nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    host_x_ = random_bytes(static_cast<size_t>(kMostRows * k));
    x_ = std::make_unique<Bytes>(host_x_);
    host_x_scales_ = random_scales(static_cast<size_t>(kMostRows));
    x_scales_ = std::make_unique<testing::DeviceArray<float>>(host_x_scales_);
    host_bias_ = random_scales(static_cast<size_t>(n));
    bias_ = std::make_unique<testing::DeviceArray<float>>(host_bias_);
    // Room for the sums of two blocks on each multiprocessor in any tile.
    workspace_ = std::make_unique<Bytes>(size_t{96} << 20);
    workspace_->zero();
  }
  [[nodiscard]] const GemmSm90& gemm() const { return *gemm_; }

  /// That some rows of a result are what the CPU computes.
  void expect_cpus(const std::vector<float>& y) const {
    for (int64_t token = 0; token < kMostRows; token += 13) {
      for (int64_t row = 0; row < n_; ++row) {
        ASSERT_EQ(y[static_cast<size_t>(token * (n_ + kGap) + row)], expected(token, row))
            << "n " << n_ << " k " << k_ << " token " << token << " row " << row;
      }
    }
  }

  /// Rows 0 .. m - 1 with the product's own choice, or with a tile and a schedule.
  std::vector<float> run(int64_t m, int tile = -1, const GemmSchedule* schedule = nullptr) {
    const testing::DeviceArray<float> y(static_cast<size_t>(m * (n_ + kGap)));
    run({.y = y.data(), .y_stride = n_ + kGap, .m = m, .result = GemmResult::kF32}, tile, schedule);
    return y.host();
  }

  /// Rows 0 .. m - 1 in BF16, without what lies between them.
  std::vector<uint16_t> run_bf16(int64_t m, int64_t gap, int tile, const GemmSchedule& schedule) {
    const int64_t stride = n_ + gap;
    const testing::DeviceArray<uint16_t> y(
        std::vector<uint16_t>(static_cast<size_t>(m * stride), 0xffff));
    run({.y = y.data(), .y_stride = stride, .m = m, .result = GemmResult::kBf16}, tile, &schedule);
    std::vector<uint16_t> rows = y.host();
    for (int64_t row = 0; row < m; ++row) {
      std::copy_n(rows.begin() + row * stride, n_, rows.begin() + row * n_);
    }
    rows.resize(static_cast<size_t>(m * n_));
    return rows;
  }

 private:
  [[nodiscard]] float expected(int64_t token, int64_t row) const {
    const bool nibbles = weight_.format.code == WeightCode::kInt4;
    int32_t sum = 0;
    for (int64_t i = 0; i < k_; ++i) {
      const uint8_t byte = weight_.codes[static_cast<size_t>((row * k_ + i) / (nibbles ? 2 : 1))];
      int code = nibbles ? (byte >> (4 * (i % 2)) & 15) - 8 : static_cast<int8_t>(byte);
      if (!weight_.zeros.empty()) {
        const auto group =
            static_cast<size_t>(row * weight_.format.groups(k_) + i / weight_.format.group_size);
        code = (code - weight_.zeros[group]) * weight_.steps[group];
      }
      sum += code * static_cast<int8_t>(host_x_[static_cast<size_t>(token * k_ + i)]);
    }
    const auto channel = static_cast<size_t>(row);
    const float scale = weight_.scales[channel] * host_x_scales_[static_cast<size_t>(token)];
    const float scaled = static_cast<float>(sum) * scale;
    return scaled + host_bias_[channel];
  }

  void run(GemmLaunch args, int tile, const GemmSchedule* schedule) {
    args.x = x_->data();
    args.x_scales = x_scales_->data();
    args.packed = packed_->data();
    args.bias = bias_->data();
    args.workspace = workspace_->data();
    EXPECT_EQ(schedule == nullptr ? kernel_->run(args, {})
                                  : gemm_->run_schedule(tile, *schedule, args, {}),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  using Bytes = testing::DeviceArray<uint8_t>;
  template <typename T>
  using DeviceArray = testing::DeviceArray<T>;

  std::vector<uint8_t> random_bytes(size_t count) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) {
      byte = static_cast<uint8_t>(random_());
    }
    return bytes;
  }
  std::vector<float> random_scales(size_t count) {
    std::vector<float> scales(count);
    for (float& scale : scales) {
      scale = std::uniform_real_distribution<float>(0.5F, 2.0F)(random_);
    }
    return scales;
  }

  /// Random levels; returns scales and zero points as a kernel packs them.
  std::vector<float> take_levels() {
    QuantTensor tensor = QuantTensor::allocate(weight_.format, n_, k_).value();
    make_levels(tensor, random_);
    const auto scales = tensor.scales.as<float>();
    const auto zeros = tensor.zeros.as<int8_t>();
    weight_.zeros.assign(zeros.begin(), zeros.end());
    for (int64_t row = 0; row < n_; ++row) {
      const RowLevels levels = levels_of(view_of(tensor), row);
      weight_.scales[static_cast<size_t>(row)] = levels.channel;
      weight_.steps.insert(weight_.steps.end(), levels.steps.begin(), levels.steps.end());
    }
    std::vector<float> numbers(scales.begin(), scales.end());
    numbers.insert(numbers.end(), zeros.begin(), zeros.end());
    return numbers;
  }

  struct Weight {
    WeightFormat format;
    std::vector<uint8_t> codes;
    std::vector<float> scales;  // of rows
    std::vector<int> zeros;     // of groups in levels
    std::vector<int> steps;
  };

  int64_t n_, k_;
  std::mt19937 random_;
  Weight weight_;
  std::vector<uint8_t> host_x_;
  std::vector<float> host_x_scales_, host_bias_;
  std::unique_ptr<GemmKernel> kernel_;
  const GemmSm90* gemm_ = nullptr;
  std::unique_ptr<Bytes> packed_, x_, workspace_;
  std::unique_ptr<testing::DeviceArray<float>> x_scales_, bias_;
};

std::vector<GemmSchedule> schedules(const GemmSm90& gemm, int index, int64_t m, bool clusters) {
  return testing::gemm_schedules(gemm, index, m, clusters, [](int tiles, int most) {
    return std::vector{tiles, 2 * tiles, 3 * tiles, tiles + 1, (tiles + most) / 2, most};
  });
}

void expect_rows(const std::vector<float>& all, const std::vector<float>& some) {
  ASSERT_EQ(std::memcmp(all.data(), some.data(), some.size() * sizeof(float)), 0);
}

void check_bits(const GemmEntry& entry, std::string_view scheme, int64_t n, int64_t k) {
  Subject subject(entry, scheme, n, k);
  const std::vector<float> all = subject.run(kMostRows);
  subject.expect_cpus(all);
  const bool brief = testing::brief_tests();
  for (int64_t m = 1; m < kMostRows; m += brief ? 150 : 1) {
    SCOPED_TRACE(::testing::Message() << scheme << " n " << n << " k " << k << " m " << m);
    expect_rows(all, subject.run(m));
  }
  const int tiles = static_cast<int>(subject.gemm().tiles().size());
  for (const int64_t m : {1, 8, 17, 64, 65, 129, 256, 300}) {
    for (int tile = 0; tile < tiles && (m == 65 || !brief); ++tile) {
      int number = 0;
      for (const GemmSchedule& schedule : schedules(subject.gemm(), tile, m, n % 2 == 0)) {
        if (brief && number++ % 4 != 1) {  // a cluster, whole tiles, tiles in parts
          continue;
        }
        SCOPED_TRACE(::testing::Message()
                     << scheme << " n " << n << " k " << k << " m " << m << " tile " << tile
                     << " cluster " << schedule.cluster << " split " << schedule.split_blocks
                     << " of " << schedule.split_tiles);
        expect_rows(all, subject.run(m, tile, &schedule));
      }
    }
  }
}

// Results of BF16 leave in whole words, or, where rows are no whole words apart, in pairs.
void check_words(const GemmEntry& entry, std::string_view scheme) {
  Subject subject(entry, scheme, 320, 768);
  for (const int64_t m : testing::row_counts({33, 130, 300}, {130})) {
    const std::vector<uint16_t> pairs = subject.run_bf16(m, 4, 0, subject.gemm().schedule(0, m));
    for (int tile = 0; tile < static_cast<int>(subject.gemm().tiles().size()); ++tile) {
      for (const GemmSchedule& schedule : schedules(subject.gemm(), tile, m, true)) {
        SCOPED_TRACE(::testing::Message()
                     << scheme << " m " << m << " tile " << tile << " cluster " << schedule.cluster
                     << " split " << schedule.split_blocks << " of " << schedule.split_tiles);
        ASSERT_EQ(subject.run_bf16(m, 8, tile, schedule), pairs);
      }
      if (testing::brief_tests()) {
        continue;
      }
      ASSERT_EQ(subject.run_bf16(m, 4, tile, subject.gemm().schedule(tile, m)), pairs);
    }
  }
}

TEST(GemmSm90, ResultsInWordsAreThoseInPairs) {
  NIBBLE_NEEDS_GPU();
  check_words(kGemmW4A8Sm90, "w4a8");
  check_words(kGemmW4A8LevelsSm90, "w4a8_g128");
  check_words(kGemmW8A8Int8Sm90, "w8a8_int8");
}
TEST(GemmSm80, IntegerProductsAreTheCpus) {
  NIBBLE_NEEDS_GPU();
  Subject int4(kGemmW4A8Sm80, "w4a8", 328, 1536), int8(kGemmW8A8Int8Sm80, "w8a8_int8", 328, 1536);
  int4.expect_cpus(int4.run(kMostRows));
  int8.expect_cpus(int8.run(kMostRows));
}
TEST(GemmSm90, Int4TimesInt8GivesARowTheSameBits) {
  NIBBLE_NEEDS_GPU();
  check_bits(kGemmW4A8Sm90, "w4a8", 328, 1536);
  check_bits(kGemmW4A8Sm90, "w4a8", 67, 704);
}
TEST(GemmSm90, Int4InLevelsTimesInt8GivesARowTheSameBits) {
  NIBBLE_NEEDS_GPU();
  check_bits(kGemmW4A8LevelsSm90, "w4a8_g128", 328, 1536);
  check_bits(kGemmW4A8LevelsSm90, "w4a8_g64", 67, 704);
}
TEST(GemmSm90, Int8TimesInt8GivesARowTheSameBits) {
  NIBBLE_NEEDS_GPU();
  check_bits(kGemmW8A8Int8Sm90, "w8a8_int8", 328, 1536);
  check_bits(kGemmW8A8Int8Sm90, "w8a8_int8", 67, 704);
}

}  // namespace
}  // namespace nibble::cuda
