#include "backend/cuda/kernels/w4a8_bf16.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/testing/gemm_schedules.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/packed_weight.h"
#include "base/f16.h"
#include "quant/quant_tensor.h"

// Products of INT4 with rows of which blocks are in INT8 and in BF16. Scales of tokens are powers
// of two and numbers of BF16 small multiples of one, so that every sum in F32 is exact: whatever
// tile, schedule or kernel has them, results have the same bits.
namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

constexpr float kStep = 0x1p-3F;     // of numbers and of scales
constexpr int64_t kMostRows = 4096;  // of which any tile has room

struct Shape {
  int64_t n = 0, k = 0;
  int block = 32;
  int bf16_of_8 = 1;  // blocks in BF16 of every eight, nearly
};

std::shared_ptr<const BlockPrecision> random_blocks(const Shape& shape, std::mt19937& random) {
  BlockPrecision blocks{.block = shape.block, .bits = {}};
  for (int64_t i = 0; i < shape.k / shape.block; ++i) {
    blocks.bits.push_back(static_cast<int>(random() % 8) < shape.bf16_of_8 ? 16 : 8);
  }
  return std::make_shared<const BlockPrecision>(std::move(blocks));
}

QuantTensor random_weight(const WeightFormat& format, const Shape& shape, std::mt19937& random) {
  QuantTensor weight = QuantTensor::allocate(format, shape.n, shape.k).value();
  for (std::byte& byte : weight.codes.as<std::byte>()) {
    byte = static_cast<std::byte>(random());
  }
  for (float& scale : weight.scales.as<float>()) {
    scale = 0.001F + 1e-5F * static_cast<float>(random() % 1000);
  }
  return weight;
}

/// The rows of a product as its kernel reads them, and what they are.
struct Rows {
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  std::vector<double> numbers;  // [m, k]
};

Rows random_rows(const BlockPrecision& blocks, int64_t m) {
  std::mt19937 random(static_cast<uint32_t>(m));
  const WideOrder order = wide_order(blocks);
  const auto row_bytes = static_cast<size_t>(order.rows(nullptr).row_bytes());
  const auto k = static_cast<size_t>(blocks.k()), block = static_cast<size_t>(blocks.block);
  Rows rows{std::vector<uint8_t>(static_cast<size_t>(m) * row_bytes), {}, {}};
  for (size_t r = 0; r < static_cast<size_t>(m); ++r) {
    rows.scales.push_back(random() % 2 == 0 ? kStep : 2 * kStep);
    for (size_t i = 0; i < k; ++i) {
      uint8_t* place = rows.bytes.data() + r * row_bytes + order.places[i / block];
      if (blocks.bits[i / block] == 8) {
        const auto code = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
        place[i % block] = static_cast<uint8_t>(code);
        rows.numbers.push_back(code * static_cast<double>(rows.scales.back()));
      } else {
        const float number = kStep * static_cast<float>(static_cast<int>(random() % 255) - 127);
        const uint16_t bits = f32_to_bf16(number);
        std::memcpy(place + 2 * (i % block), &bits, sizeof(bits));
        rows.numbers.push_back(number);
      }
    }
  }
  return rows;
}

/// One product, ready to run in any way, beside the reference.
class Product final {
 public:
  Product(const Shape& shape, uint32_t seed) : shape_(shape) {
    std::mt19937 random(seed);
    const QuantScheme scheme = find_scheme("w4a8_bf16").value();
    act_.format = scheme.act;
    act_.blocks = random_blocks(shape, random);
    blocks_ = DeviceBlocks::create(act_, scheme.weight, shape.k).value();
    weight_ = random_weight(scheme.weight, shape, random);
    problem_ = {.weight = scheme.weight,
                .act = scheme.act,
                .n = shape.n,
                .k = shape.k,
                .blocks = act_.blocks};
  }

  [[nodiscard]] std::unique_ptr<GemmKernel> make(const GemmEntry& entry) const {
    const DeviceInfo device = query_device(0).value();
    EXPECT_TRUE(entry.accepts(problem_, device));
    return entry.make(problem_, device).value();
  }
  [[nodiscard]] const IntBlocks& blocks() const { return blocks_->view(); }

  /// Packs, and unpacks the same.
  [[nodiscard]] std::unique_ptr<DeviceArray<uint8_t>> pack(const GemmKernel& kernel) const {
    return testing::packed_and_back(kernel, weight_);
  }

  /// run(launch) into poisoned memory gives the exact results, in F32, added and in BF16. The scale
  /// of row `spoiled` is NaN, if there is one.
  template <typename Run>
  void check(const GemmKernel& kernel,
             const DeviceArray<uint8_t>& packed,
             int64_t m,
             const Run& run,
             int64_t spoiled = -1) {
    SCOPED_TRACE(::testing::Message()
                 << "n " << shape_.n << " k " << shape_.k << " block " << shape_.block << " BF16 "
                 << shape_.bf16_of_8 << "/8 m " << m);
    const Wanted& known = wanted_of(m);
    std::vector<float> scales = known.rows.scales;
    if (spoiled >= 0) {
      scales[static_cast<size_t>(spoiled)] = std::numeric_limits<float>::quiet_NaN();
    }
    const DeviceArray<uint8_t> x(known.rows.bytes);
    const DeviceArray<float> device_scales(scales), device_bias(known.bias);
    DeviceArray<uint8_t> workspace(kernel.workspace_bytes(kMostRows));
    workspace.zero();
    GemmLaunch launch{.x = x.data(),
                      .x_scales = device_scales.data(),
                      .blocks = &blocks_->view(),
                      .packed = packed.data(),
                      .bias = device_bias.data(),
                      .y_stride = shape_.n + 24,
                      .m = m,
                      .workspace = workspace.data()};
    for (const GemmResult result : {GemmResult::kF32, GemmResult::kAddF32, GemmResult::kBf16}) {
      launch.result = result;
      ASSERT_NO_FATAL_FAILURE(check_result(launch, known.y, spoiled, run));
    }
    std::vector<uint8_t> counters = workspace.host();
    counters.resize(std::min(counters.size(), kGemmCounterBytes));
    ASSERT_EQ(std::ranges::count(counters, 0), std::ssize(counters))
        << "the workspace's counters were not left zero";
  }

 private:
  struct Wanted {
    Rows rows;
    std::vector<float> bias, y;
  };

  template <typename Run>
  void check_result(GemmLaunch launch,
                    const std::vector<float>& wanted,
                    int64_t spoiled,
                    const Run& run) {
    const auto size = static_cast<size_t>(launch.m * launch.y_stride);
    const bool bf16 = launch.result == GemmResult::kBf16;
    const DeviceArray<float> floats(std::vector<float>(size, 3.0F));
    const DeviceArray<uint16_t> halves(std::vector<uint16_t>(size, 0xfff1));
    launch.y = bf16 ? static_cast<void*>(halves.data()) : floats.data();
    ASSERT_EQ(run(launch), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<float> got = floats.host();
    const std::vector<uint16_t> got_halves = halves.host();
    const auto stride = static_cast<size_t>(launch.y_stride), n = static_cast<size_t>(shape_.n);
    for (size_t i = 0; i < size; ++i) {
      const size_t row = i / stride, column = i % stride;
      const float before = launch.result == GemmResult::kAddF32 ? 3.0F : 0.0F;
      if (column >= n) {
        ASSERT_TRUE(got[i] == 3.0F && got_halves[i] == 0xfff1) << "written past n in row " << row;
      } else if (static_cast<int64_t>(row) == spoiled) {
        ASSERT_TRUE(std::isnan(bf16 ? bf16_to_f32(got_halves[i]) : got[i])) << "column " << column;
      } else if (bf16) {
        ASSERT_EQ(got_halves[i], f32_to_bf16(wanted[row * n + column]))
            << "row " << row << " column " << column;
      } else {
        ASSERT_EQ(got[i], wanted[row * n + column] + before)
            << "row " << row << " column " << column;
      }
    }
  }

  const Wanted& wanted_of(int64_t m) {
    if (const auto found = wanted_.find(m); found != wanted_.end()) {
      return found->second;
    }
    Wanted& wanted = wanted_[m];
    wanted.rows = random_rows(*act_.blocks, m);
    wanted.bias = random_values(static_cast<size_t>(shape_.n), 3, 1.0F);
    const auto k = static_cast<size_t>(shape_.k);
    const auto* codes = reinterpret_cast<const uint8_t*>(weight_.codes.data());
    for (size_t row = 0; row < static_cast<size_t>(m); ++row) {
      for (size_t column = 0; column < static_cast<size_t>(shape_.n); ++column) {
        double sum = 0.0;
        for (size_t i = 0; i < k; ++i) {
          const int code = (codes[(column * k + i) / 2] >> (i % 2 * 4) & 15) - 8;
          sum += code * wanted.rows.numbers[row * k + i];
        }
        EXPECT_LT(std::fabs(sum), 0x1p24 * kStep);
        const auto scaled = static_cast<float>(sum * weight_.scales.as<float>()[column]);
        wanted.y.push_back(scaled + wanted.bias[column]);
      }
    }
    return wanted;
  }

  Shape shape_;
  ActSpec act_;
  std::shared_ptr<const DeviceBlocks> blocks_;
  QuantTensor weight_;
  GemmProblem problem_;
  std::map<int64_t, Wanted> wanted_;  // by rows
};

// Blocks of every size; none, some and all in BF16; parts of K blocks; edges of tiles of rows.
const Shape kShapes[] = {{200, 640, 32, 1}, {67, 96, 32, 3},   {330, 416, 32, 4},
                         {64, 576, 64, 2},  {128, 832, 64, 1}, {136, 768, 128, 2},
                         {65, 384, 128, 0}, {320, 352, 32, 8}, {1, 32, 32, 0},
                         {1, 32, 32, 8},    {40, 128, 128, 4}};

void check_entry(const GemmEntry& entry) {
  uint32_t seed = 5;
  for (const Shape& shape : kShapes) {
    Product product(shape, ++seed);
    const auto kernel = product.make(entry);
    const auto packed = product.pack(*kernel);
    for (const int64_t m : testing::row_counts({1, 3, 16, 17, 64, 65, 300}, {3, 65})) {
      ASSERT_NO_FATAL_FAILURE(product.check(
          *kernel, *packed, m, [&](const GemmLaunch& launch) { return kernel->run(launch, {}); },
          m > 2 ? m / 2 : -1));
    }
  }
}

TEST(W4A8Bf16, HopperIsExactWhereSumsAre) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  check_entry(kGemmW4A8Bf16Sm90);
}

TEST(W4A8Bf16, KernelsOfOlderGpusAreExactWhereSumsAre) {
  NIBBLE_NEEDS_GPU();
  check_entry(kGemmW4A8Bf16Sm80);
}

// Parts of a tile that have one precision alone, or both.
TEST(W4A8Bf16, EveryTileAndScheduleIsExactWhereSumsAre) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  for (const Shape& shape : {Shape{320, 1024, 32, 3}, {66, 768, 64, 7}, {131, 640, 128, 1}}) {
    Product product(shape, 9);
    const auto kernel = product.make(kGemmW4A8Bf16Sm90);
    const auto& gemm = dynamic_cast<const GemmSm90&>(*kernel);
    const auto packed = product.pack(gemm);
    for (int tile = 0; tile < static_cast<int>(gemm.tiles().size()); ++tile) {
      const int64_t tokens = gemm.tiles()[static_cast<size_t>(tile)].tokens;
      for (const int64_t m : testing::row_counts({1, tokens - 1, 2 * tokens + 1}, {tokens - 1})) {
        const auto schedules =
            testing::gemm_schedules(gemm, tile, m, shape.n % 2 == 0, [](int tiles, int most) {
              return std::vector{tiles, 2 * tiles, 3 * tiles, tiles + 1, most};
            });
        int number = 0;
        for (const GemmSchedule& schedule : schedules) {
          if (testing::brief_tests() && number++ % 4 != 1) {
            continue;
          }
          SCOPED_TRACE(::testing::Message()
                       << "tile " << tile << " cluster " << schedule.cluster << " split "
                       << schedule.split_blocks << " of " << schedule.split_tiles);
          ASSERT_NO_FATAL_FAILURE(product.check(gemm, *packed, m, [&](const GemmLaunch& launch) {
            return gemm.run_schedule(tile, schedule, launch, {});
          }));
        }
      }
    }
  }
}

TEST(W4A8Bf16, RowsOfAnotherOrderAreRefused) {
  NIBBLE_NEEDS_GPU();
  const Product product({64, 512, 32, 2}, 1), other({64, 512, 32, 8}, 2);
  for (const GemmEntry* entry : {&kGemmW4A8Bf16Sm80, &kGemmW4A8Bf16Sm90}) {
    if (entry == &kGemmW4A8Bf16Sm90 && !query_device(0).value().hopper()) {
      continue;
    }
    const auto kernel = product.make(*entry);
    EXPECT_EQ(kernel->run({.blocks = nullptr, .m = 1}, {}), cudaErrorInvalidValue);
    EXPECT_EQ(kernel->run({.blocks = &other.blocks(), .m = 1}, {}), cudaErrorInvalidValue);
  }
}

TEST(W4A8Bf16, KernelsAcceptTheirOwnFormAlone) {
  const DeviceInfo hopper{.major = 9, .shared_bytes = size_t{227} << 10};
  const DeviceInfo ampere{.major = 8, .shared_bytes = size_t{163} << 10};
  const QuantScheme scheme = find_scheme("w4a8_bf16").value();
  GemmProblem problem{.weight = scheme.weight, .act = scheme.act, .n = 5, .k = 96};
  EXPECT_TRUE(kGemmW4A8Bf16Sm90.accepts(problem, hopper));
  EXPECT_TRUE(kGemmW4A8Bf16Sm80.accepts(problem, ampere));
  EXPECT_FALSE(kGemmW4A8Bf16Sm90.accepts(problem, ampere));
  EXPECT_FALSE(kGemmW4A8Sm90.accepts(problem, hopper));
  problem.experts = 4;
  EXPECT_FALSE(kGemmW4A8Bf16Sm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4A8Bf16Sm80.accepts(problem, hopper));
  problem.experts = 0;
  problem.k = 1 << 20;  // sums would overflow
  EXPECT_FALSE(kGemmW4A8Bf16Sm90.accepts(problem, hopper));
  problem = {.weight = scheme.weight, .act = ActFormat::kInt8Token, .n = 5, .k = 128};
  EXPECT_FALSE(kGemmW4A8Bf16Sm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4A8Bf16Sm80.accepts(problem, hopper));
}

}  // namespace
}  // namespace nibble::cuda
