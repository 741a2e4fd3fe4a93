#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4ax/w4ax_sm80.h"
#include "backend/cuda/kernels/w4ax/w4ax_sm90.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/packed_weight.h"
#include "base/f16.h"
#include "ops/gemm.h"
#include "quant/block_rounding.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

using testing::brief_tests;
using testing::DeviceArray;
using testing::random_values;

struct Shape {
  int64_t n = 0, k = 0;
  int block = 128;  // of the rows
};

std::shared_ptr<const BlockPrecision> random_blocks(int64_t k, int block, std::mt19937& random) {
  BlockPrecision blocks{.block = block, .bits = {}, .clip = 0.85F};
  for (int64_t i = 0; i < k / block; ++i) {
    blocks.bits.push_back(random() % 4 == 0 ? 8 : 4);
  }
  return std::make_shared<const BlockPrecision>(std::move(blocks));
}

QuantTensor random_weight(const WeightFormat& format, const Shape& shape, std::mt19937& random) {
  QuantTensor weight = QuantTensor::allocate(format, shape.n, shape.k).value();
  for (std::byte& byte : weight.codes.as<std::byte>()) {
    byte = static_cast<std::byte>(random());
  }
  for (float& scale : weight.scales.as<float>()) {
    scale = bf16_to_f32(f32_to_bf16(0.001F + 1e-5F * static_cast<float>(random() % 1000)));
  }
  return weight;
}

/// The rows of a product as its kernel reads them.
struct Rows {
  std::vector<float> x;
  std::vector<int8_t> codes;
  std::vector<float> scales;
};

Rows random_rows(const ActSpec& act, const IntBlocks& view, const Shape& shape, int64_t m) {
  Rows rows{
      random_values(static_cast<size_t>(m * shape.k), static_cast<uint32_t>(m), 1.0F), {}, {}};
  rows.codes.resize(rows.x.size());
  // Products read whole tiles of tokens, whatever lies there.
  rows.scales.resize(
      static_cast<size_t>(int_scale_rows(view, shape.k) * int_scale_stride(m) + 128));
  std::vector<float> scales(static_cast<size_t>(scale_count(*act.blocks, view.scales)));
  for (int64_t r = 0; r < m; ++r) {
    round_blocks(*act.blocks, view.scales, rows.x.data() + r * shape.k,
                 {rows.codes.data() + r * shape.k, scales.data()});
    for (size_t b = 0; b < scales.size(); ++b) {
      rows.scales[b * static_cast<size_t>(int_scale_stride(m)) + static_cast<size_t>(r)] =
          scales[b];
    }
  }
  return rows;
}

/// One product of a scheme, ready to run in any way, beside the reference.
class Product final {
 public:
  Product(std::string_view scheme, const Shape& shape, uint32_t seed) : shape_(shape) {
    std::mt19937 random(seed);
    const QuantScheme row = find_scheme(scheme).value();
    act_.format = row.act;
    act_.blocks = random_blocks(shape.k, shape.block, random);
    blocks_ = DeviceBlocks::create(act_, row.weight, shape.k).value();
    weight_ = random_weight(row.weight, shape, random);
    problem_ = {.weight = row.weight, .act = row.act, .n = shape.n, .k = shape.k};
  }

  [[nodiscard]] std::unique_ptr<GemmKernel> make(const GemmEntry& entry) const {
    const DeviceInfo device = query_device(0).value();
    EXPECT_TRUE(entry.accepts(problem_, device));
    return entry.make(problem_, device).value();
  }

  /// Packs, and unpacks the same.
  [[nodiscard]] std::unique_ptr<DeviceArray<uint8_t>> pack(const GemmKernel& kernel) const {
    return testing::packed_and_back(kernel, weight_);
  }

  /// run(launch) into poisoned memory gives the reference's bits, in F32, added and in BF16.
  template <typename Run>
  void check(const GemmKernel& kernel,
             const DeviceArray<uint8_t>& packed,
             int64_t m,
             const Run& run) {
    SCOPED_TRACE(::testing::Message() << "n " << shape_.n << " k " << shape_.k << " block "
                                      << shape_.block << " m " << m);
    const Wanted& known = wanted_of(m);
    const Rows& rows = known.rows;
    const std::vector<float>& wanted = known.y;
    const DeviceArray<int8_t> codes(rows.codes);
    const DeviceArray<float> scales(rows.scales), device_bias(known.bias);
    DeviceArray<uint8_t> workspace(kernel.workspace_bytes(m));
    workspace.zero();
    GemmLaunch launch{.x = codes.data(),
                      .x_scales = scales.data(),
                      .blocks = &blocks_->view(),
                      .packed = packed.data(),
                      .bias = device_bias.data(),
                      .y_stride = shape_.n + 24,
                      .m = m,
                      .workspace = workspace.data()};
    const auto size = static_cast<size_t>(m * launch.y_stride);
    for (const GemmResult result : {GemmResult::kF32, GemmResult::kAddF32, GemmResult::kBf16}) {
      launch.result = result;
      const bool bf16 = result == GemmResult::kBf16;
      const DeviceArray<float> floats(std::vector<float>(size, 3.0F));
      const DeviceArray<uint16_t> halves(size);
      launch.y = bf16 ? static_cast<void*>(halves.data()) : floats.data();
      ASSERT_EQ(run(launch), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<float> got = floats.host();
      const std::vector<uint16_t> got_halves = halves.host();
      for (size_t i = 0; i < size; ++i) {
        const size_t row = i / static_cast<size_t>(launch.y_stride);
        const size_t column = i % static_cast<size_t>(launch.y_stride);
        const bool inside = column < static_cast<size_t>(shape_.n);
        const float want = inside ? wanted[row * static_cast<size_t>(shape_.n) + column] : 0.0F;
        if (bf16) {
          ASSERT_EQ(got_halves[i], inside ? f32_to_bf16(want) : 0xffff)
              << "row " << row << " column " << column;
          continue;
        }
        const float added = result == GemmResult::kAddF32 ? want + 3.0F : want;
        ASSERT_EQ(got[i], inside ? added : 3.0F) << "row " << row << " column " << column;
      }
    }
    counters_ = workspace.host();
    counters_.resize(std::min(counters_.size(), kGemmCounterBytes));
  }

  /// Of the last check.
  void expect_counters_of_zero() const {
    EXPECT_EQ(std::ranges::count(counters_, 0), std::ssize(counters_))
        << "the workspace's counters were not left zero";
  }

 private:
  struct Wanted {
    Rows rows;
    std::vector<float> bias, y;
  };

  const Wanted& wanted_of(int64_t m) {
    if (const auto found = wanted_.find(m); found != wanted_.end()) {
      return found->second;
    }
    Wanted& wanted = wanted_[m];
    wanted.rows = random_rows(act_, blocks_->view(), shape_, m);
    wanted.bias = random_values(static_cast<size_t>(shape_.n), 3, 1.0F);
    wanted.y.resize(static_cast<size_t>(m * shape_.n));
    reference_gemm(weight_, act_,
                   {.x = wanted.rows.x.data(),
                    .x_stride = shape_.k,
                    .m = m,
                    .y = wanted.y.data(),
                    .y_stride = shape_.n,
                    .bias = wanted.bias.data()});
    return wanted;
  }

  Shape shape_;
  ActSpec act_;
  std::shared_ptr<const DeviceBlocks> blocks_;
  QuantTensor weight_;
  GemmProblem problem_;
  std::map<int64_t, Wanted> wanted_;  // by rows
  std::vector<uint8_t> counters_;
};

struct Case {
  std::string_view scheme;
  Shape shape;
};
const Case kCases[] = {
    {"w4ax", {200, 640, 128}},
    {"w4ax_b64", {67, 576, 64}},
    {"w4ax_b32", {330, 416, 32}},
    {"w4ax", {1, 128, 128}},
};
// Rows that have one scale, which the kernels of w4a8 multiply.
const Case kClassCases[] = {
    {"w4ax_class", {200, 640, 128}}, {"w4ax_class", {67, 576, 64}},
    {"w4ax_class", {330, 448, 32}},  {"w4ax_class", {1, 128, 128}},
    {"w4ax_class", {40, 66048, 64}},
};

void check_entry(const GemmEntry& entry, std::span<const Case> cases) {
  for (const Case& each : cases) {
    SCOPED_TRACE(each.scheme);
    Product product(each.scheme, each.shape, 5);
    const auto kernel = product.make(entry);
    const auto packed = product.pack(*kernel);
    for (const int64_t m : testing::row_counts({1, 3, 17, 65, 130}, {3, 65})) {
      product.check(*kernel, *packed, m,
                    [&](const GemmLaunch& launch) { return kernel->run(launch, {}); });
      if (entry.name.starts_with("gemm_w4ax")) {
        product.expect_counters_of_zero();
      }
    }
  }
}

TEST(W4Ax, HopperHasTheBitsOfTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  check_entry(kGemmW4AxSm90, kCases);
}

TEST(W4Ax, KernelsOfOlderGpusHaveTheBitsOfTheReference) {
  NIBBLE_NEEDS_GPU();
  check_entry(kGemmW4AxSm80, kCases);
}

TEST(W4Ax, OfOneScaleHasTheBitsOfTheReferenceByW4A8) {
  NIBBLE_NEEDS_GPU();
  check_entry(kGemmW4A8Sm80, kClassCases);
  if (query_device(0).value().hopper()) {
    check_entry(kGemmW4A8Sm90, kClassCases);
  }
}

TEST(W4Ax, OfOneScaleIsNotOfItsOwnKernels) {
  const QuantScheme scheme = find_scheme("w4ax_class").value();
  const DeviceInfo hopper{.major = 9, .shared_bytes = size_t{227} << 10};
  GemmProblem problem{.weight = scheme.weight, .act = scheme.act, .n = 64, .k = 128};
  EXPECT_TRUE(kGemmW4A8Sm90.accepts(problem, hopper));
  EXPECT_TRUE(kGemmW4A8Sm80.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4AxSm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4AxSm80.accepts(problem, hopper));
  problem.weight = find_scheme("w4ax").value().weight;
  EXPECT_FALSE(kGemmW4A8Sm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4A8Sm80.accepts(problem, hopper));
  EXPECT_TRUE(kGemmW4AxSm90.accepts(problem, hopper));
}

// Of few blocks, so that tiles pass from one to the next.
TEST(W4Ax, EveryTileAndScheduleHasTheBitsOfTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  constexpr int64_t kK = 1920;  // 15 K blocks and one that fills up
  for (const std::string_view scheme : {"w4ax", "w4ax_b64", "w4ax_b32"}) {
    const int block = find_scheme(scheme).value().weight.group_size;
    Product product(scheme, {520, kK, block}, 9);
    const auto kernel = product.make(kGemmW4AxSm90);
    const auto& gemm = dynamic_cast<const W4AxSm90&>(*kernel);
    const auto packed = product.pack(gemm);
    for (int tile = 0; tile < gemm.tile_count(); ++tile) {
      if (int_k_blocks(kK) % gemm.tile(tile).depth != 0) {
        continue;
      }
      const int64_t tokens = gemm.tile(tile).tokens;
      for (const int64_t m : testing::row_counts({1, tokens - 1, 2 * tokens + 1}, {tokens - 1})) {
        for (const int blocks : {1, 3, 4, 1000}) {
          SCOPED_TRACE(::testing::Message() << scheme << " tile " << tile << " blocks " << blocks);
          const ChainSchedule own = gemm.schedule(tile, m);
          const ChainSchedule schedule =
              make_chain_schedule(own.row_tiles, own.token_tiles, own.steps, blocks, true);
          product.check(gemm, *packed, m, [&](const GemmLaunch& launch) {
            return gemm.run_schedule(tile, schedule, launch, {});
          });
          product.expect_counters_of_zero();
        }
      }
    }
  }
}

TEST(W4Ax, RefusesRowsOfAnotherForm) {
  NIBBLE_NEEDS_GPU();
  Product product("w4ax", {64, 256, 128}, 1);
  const auto kernel = product.make(kGemmW4AxSm80);
  IntBlocks other{.block = 64};
  EXPECT_EQ(kernel->run({.blocks = &other, .m = 1}, {}), cudaErrorInvalidValue);
  EXPECT_EQ(kernel->run({.blocks = nullptr, .m = 1}, {}), cudaErrorInvalidValue);
}

TEST(ChainSchedule, EveryStepIsTakenOnceAndSumsGoOnInOrder) {
  for (const int blocks : {1, 2, 5, 7, 132}) {
    for (const int tiles : {1, 4, 5, 7, 9, 133, 300}) {
      for (const int steps : {1, 3, 28}) {
        const ChainSchedule schedule = make_chain_schedule(tiles, 1, steps, blocks, true);
        std::vector<int> taken(static_cast<size_t>(tiles * steps));
        for (int block = 0; block < schedule.blocks; ++block) {
          ChainParts parts(schedule, block);
          GemmPart part;
          bool last = false;
          for (int number = 0; parts.next(part); ++number) {
            EXPECT_FALSE(last) << "a block ends with what it takes over";
            last = part.begin > 0;
            EXPECT_TRUE(part.end == steps || number == 0) << "and begins with what it hands on";
            EXPECT_LT(part.begin, part.end);
            EXPECT_FALSE(part.begin > 0 && part.end < steps);
            for (int step = part.begin; step < part.end; ++step) {
              ++taken[static_cast<size_t>(part.row_tile * steps + step)];
            }
          }
        }
        EXPECT_EQ(std::ranges::count(taken, 1), std::ssize(taken))
            << tiles << " tiles, " << blocks << " blocks, " << steps << " steps";
      }
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
