// The experts of a layer by w4ax/experts.cuh, tile by tile beside the reference.

#include "backend/cuda/kernels/w4ax/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/random_blocks.h"
#include "backend/testing/random_gemm.h"
#include "base/f16.h"
#include "base/math.h"
#include "ops/gemm.h"
#include "quant/block_rounding.h"

namespace nibble::cuda {
namespace {

using testing::brief_tests;
using testing::DeviceArray;
using testing::random_values;

constexpr int kExperts = 5;
constexpr float kPoison = 3.0F;

/// Whether rows of all experts are rounded alike.
enum class Rows : uint8_t { kAlike, kOfEachExpert };

/// Random experts whose rows are tiles of them, in no order and with rows of nobody in between.
class Layer final {
 public:
  Layer(std::string_view scheme, const Problem& shape, Rows rows)
      : shape_(shape), scheme_(find_scheme(scheme).value()) {
    const size_t specs = rows == Rows::kAlike ? 1 : kExperts;
    for (size_t i = 0; i < specs; ++i) {
      acts_.push_back(random_blocks(scheme_, shape.k, static_cast<uint32_t>(30 + i)));
    }
    blocks_ = DeviceExpertBlocks::create(acts_, scheme_.weight, shape.k).value();
    const GemmProblem problem{.weight = scheme_.weight,
                              .act = scheme_.act,
                              .n = shape.n,
                              .k = shape.k,
                              .experts = kExperts};
    const DeviceInfo device = query_device(0).value();
    EXPECT_TRUE(kExpertsW4Ax.accepts(problem, device));
    kernel_ = kExpertsW4Ax.make(problem, device).value();
    stride_ = round_up(kernel_->packed_bytes(), size_t{128});
    packed_ = std::make_unique<DeviceArray<uint8_t>>(kExperts * stride_);
    for (uint32_t e = 0; e < kExperts; ++e) {
      weights_.push_back(random_weight(scheme_.weight, shape, 50 + e).value());
      pack(e);
    }
    bias_ = random_values(static_cast<size_t>(kExperts * shape.n), 3, 1.0F);
  }

  [[nodiscard]] const GemmKernel& kernel() const { return *kernel_; }

  void check(int tile_rows) {
    SCOPED_TRACE(::testing::Message()
                 << "n " << shape_.n << " k " << shape_.k << ", tiles of " << tile_rows);
    list_tiles(tile_rows);
    make_rows();
    for (const bool biased : {false, true}) {
      const std::vector<float> wanted = results(biased);
      check_result<float>(GemmResult::kF32, wanted, biased, tile_rows);
      check_result<uint16_t>(GemmResult::kBf16, wanted, biased, tile_rows);
    }
  }

  /// The first expert's rows as a dense product of the same kernel.
  void check_dense(int64_t m) {
    SCOPED_TRACE(::testing::Message() << m << " rows of n " << shape_.n << " k " << shape_.k);
    tiles_ = {{.expert = 0, .first = 0, .rows = static_cast<int32_t>(m)}};
    slots_ = m;
    make_rows();
    const std::vector<float> wanted = results(true);
    const DeviceArray<float> bias(bias_);
    const auto blocks = DeviceBlocks::create(acts_[0], scheme_.weight, shape_.k).value();
    const int64_t stride = shape_.n + 3;
    const DeviceArray<float> y(std::vector<float>(static_cast<size_t>(m * stride), kPoison));
    for (const GemmResult result : {GemmResult::kF32, GemmResult::kAddF32}) {
      ASSERT_EQ(kernel_->run({.x = codes_->data(),
                              .x_scales = scales_->data(),
                              .blocks = &blocks->view(),
                              .packed = packed_->data(),
                              .bias = bias.data(),
                              .y = y.data(),
                              .y_stride = stride,
                              .m = m,
                              .result = result},
                             {}),
                cudaSuccess);
      const std::vector<float> got = y.host();
      for (int64_t i = 0; i < m * stride; ++i) {
        const bool inside = i % stride < shape_.n;
        const float want =
            inside ? wanted[static_cast<size_t>(i / stride * shape_.n + i % stride)] : kPoison;
        const bool twice = inside && result == GemmResult::kAddF32;
        ASSERT_EQ(got[static_cast<size_t>(i)], twice ? want + want : want) << "at " << i;
      }
    }
  }

  /// A launch that the kernel takes, of no tiles.
  [[nodiscard]] GroupedLaunch launch_of_nothing() {
    tiles_ = {{.expert = 0, .first = 0, .rows = 1}};
    slots_ = 1;
    make_rows();
    return {.x = codes_->data(),
            .x_scales = scales_->data(),
            .blocks = &blocks_->view(),
            .packed = packed_->data(),
            .slots = 1,
            .max_tiles = 1,
            .tile_rows = 8};
  }

 private:
  void pack(uint32_t expert) {
    const QuantTensor& weight = weights_[expert];
    const auto* bytes = reinterpret_cast<const uint8_t*>(weight.codes.data());
    const auto numbers = weight.scales.as<float>();
    const DeviceArray<uint8_t> codes(std::vector<uint8_t>(bytes, bytes + weight.codes.size()));
    const DeviceArray<float> scales(std::vector<float>(numbers.begin(), numbers.end()));
    EXPECT_EQ(
        kernel_->pack(codes.data(), scales.data(), packed_->data() + expert * stride_, nullptr),
        cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  void list_tiles(int tile_rows) {
    const int counts[] = {tile_rows, 1, std::max(1, tile_rows / 2), tile_rows / 4 * 3 + 1, 3};
    tiles_.clear();
    int next = 1;
    for (int i = 0; i < 12; ++i) {
      const int rows = std::min(counts[i % 5], tile_rows);
      tiles_.push_back({.expert = i * 3 % kExperts, .first = next, .rows = rows});
      next += rows + i % 3;
    }
    slots_ = next + 2;
  }

  [[nodiscard]] const ActSpec& act_of(const ExpertTile& tile) const {
    return acts_[acts_.size() == 1 ? 0 : static_cast<size_t>(tile.expert)];
  }

  // Codes of any kind and scales that are no numbers for those of nobody.
  void make_rows() {
    x_ = random_values(static_cast<size_t>(slots_ * shape_.k), static_cast<uint32_t>(slots_), 1.0F);
    std::vector<int8_t> codes(x_.size(), 77);
    const BlockScales form = blocks_->view().all.scales;
    const auto stride = static_cast<size_t>(int_scale_stride(slots_));
    std::vector<float> scales(
        static_cast<size_t>(int_scale_rows(blocks_->view().all, shape_.k)) * stride,
        std::numeric_limits<float>::quiet_NaN());
    for (const ExpertTile& tile : tiles_) {
      const BlockPrecision& blocks = *act_of(tile).blocks;
      std::vector<float> steps(static_cast<size_t>(scale_count(blocks, form)));
      for (int64_t slot = tile.first; slot < tile.first + tile.rows; ++slot) {
        round_blocks(blocks, form, x_.data() + slot * shape_.k,
                     {codes.data() + slot * shape_.k, steps.data()});
        for (size_t row = 0; row * stride < scales.size(); ++row) {
          scales[row * stride + static_cast<size_t>(slot)] = row < steps.size() ? steps[row] : 0.0F;
        }
      }
    }
    codes_ = std::make_unique<DeviceArray<int8_t>>(codes);
    scales_ = std::make_unique<DeviceArray<float>>(scales);
  }

  // Of all slots; those of nobody are poison.
  [[nodiscard]] std::vector<float> results(bool biased) const {
    std::vector<float> y(static_cast<size_t>(slots_ * shape_.n), kPoison);
    for (const ExpertTile& tile : tiles_) {
      reference_gemm(weights_[static_cast<size_t>(tile.expert)], act_of(tile),
                     {.x = x_.data() + tile.first * shape_.k,
                      .x_stride = shape_.k,
                      .m = tile.rows,
                      .y = y.data() + tile.first * shape_.n,
                      .y_stride = shape_.n,
                      .bias = biased ? bias_.data() + tile.expert * shape_.n : nullptr});
    }
    return y;
  }

  static void set(float& to, float value) { to = value; }
  static void set(uint16_t& to, float value) { to = f32_to_bf16(value); }

  template <typename T>
  void check_result(GemmResult result,
                    const std::vector<float>& wanted,
                    bool biased,
                    int tile_rows) {
    std::vector<T> expected(wanted.size()), poison(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      set(expected[i], wanted[i]);
      set(poison[i], kPoison);
    }
    const DeviceArray<T> y(poison);
    const DeviceArray<float> bias(bias_);
    std::vector<ExpertTile> listed = tiles_;
    listed.resize(tiles_.size() + 4, {.expert = 0, .first = 0, .rows = 8});  // not to be looked at
    const DeviceArray<ExpertTile> tiles(listed);
    const DeviceArray<int32_t> count(std::vector<int32_t>{static_cast<int32_t>(tiles_.size())});
    ASSERT_EQ(kernel_->run_grouped({.x = codes_->data(),
                                    .x_scales = scales_->data(),
                                    .blocks = &blocks_->view(),
                                    .packed = packed_->data(),
                                    .expert_bytes = static_cast<int64_t>(stride_),
                                    .bias = biased ? bias.data() : nullptr,
                                    .y = y.data(),
                                    .result = result,
                                    .slots = slots_,
                                    .tiles = tiles.data(),
                                    .tile_count = count.data(),
                                    .max_tiles = static_cast<int64_t>(listed.size()),
                                    .tile_rows = tile_rows},
                                   {}),
              cudaSuccess);
    const std::vector<T> got = y.host();
    for (size_t i = 0; i < got.size(); ++i) {
      const auto columns = static_cast<size_t>(shape_.n);
      ASSERT_EQ(got[i], expected[i]) << "slot " << i / columns << " channel " << i % columns;
    }
  }

  Problem shape_;
  QuantScheme scheme_;
  std::vector<ActSpec> acts_;
  std::shared_ptr<const DeviceExpertBlocks> blocks_;
  std::unique_ptr<GemmKernel> kernel_;
  size_t stride_ = 0;
  std::unique_ptr<DeviceArray<uint8_t>> packed_;
  std::vector<QuantTensor> weights_;
  std::vector<float> bias_, x_;
  std::vector<ExpertTile> tiles_;
  int64_t slots_ = 0;
  std::unique_ptr<DeviceArray<int8_t>> codes_;
  std::unique_ptr<DeviceArray<float>> scales_;
};

struct Case {
  std::string_view scheme;
  Problem shape;
};
// K of less than a block of 128, less than the ring, and beyond it.
const Case kCases[] = {
    {"w4ax", {330, 640}},    {"w4ax", {1, 128}},       {"w4ax_b64", {67, 576}},
    {"w4ax_b64", {130, 64}}, {"w4ax_b32", {330, 416}}, {"w4ax_b32", {64, 32}},
};

TEST(ExpertsW4Ax, HaveTheBitsOfTheReference) {
  NIBBLE_NEEDS_GPU();
  for (const Case& each : kCases) {
    if (brief_tests() && each.shape.n != 67) {
      continue;
    }
    for (const Rows rows : {Rows::kAlike, Rows::kOfEachExpert}) {
      SCOPED_TRACE(each.scheme);
      Layer layer(each.scheme, each.shape, rows);
      for (const int tile_rows : {1, 8, 16, 32, 50, 64}) {
        layer.check(tile_rows);
      }
    }
  }
}

TEST(ExpertsW4Ax, HaveTheBitsOfTheReferenceInDenseProducts) {
  NIBBLE_NEEDS_GPU();
  for (const Case& each : kCases) {
    SCOPED_TRACE(each.scheme);
    Layer layer(each.scheme, each.shape, Rows::kAlike);
    for (const int64_t m : testing::row_counts({1, 8, 13, 27, 64, 131}, {13})) {
      layer.check_dense(m);
    }
  }
}

TEST(ExpertsW4Ax, RefuseRowsOfAnotherForm) {
  NIBBLE_NEEDS_GPU();
  Layer layer("w4ax_b64", {64, 128}, Rows::kAlike);
  const GemmKernel& kernel = layer.kernel();
  const GroupedLaunch good = layer.launch_of_nothing();
  const auto refused = [&](const auto& change) {
    GroupedLaunch launch = good;
    change(launch);
    return kernel.run_grouped(launch, {}) == cudaErrorInvalidValue;
  };
  ExpertBlocks other = *good.blocks;
  other.all.block = 32;
  EXPECT_TRUE(refused([](GroupedLaunch& to) { to.blocks = nullptr; }));
  EXPECT_TRUE(refused([&](GroupedLaunch& to) { to.blocks = &other; }));
  EXPECT_TRUE(refused([](GroupedLaunch& to) { to.tile_rows = 65; }));
  EXPECT_TRUE(refused([](GroupedLaunch& to) { to.max_tiles = 0; }));
  EXPECT_TRUE(refused([](GroupedLaunch& to) { to.result = GemmResult::kAddF32; }));
  EXPECT_TRUE(refused([](GroupedLaunch& to) { to.rows = GroupedRows::kOneForAll; }));
  GroupedLaunch nothing = good;
  nothing.slots = 0;
  EXPECT_EQ(kernel.run_grouped(nothing, {}), cudaSuccess);
}

TEST(ExpertsW4Ax, AreTakenForExpertsAlone) {
  const QuantScheme scheme = find_scheme("w4ax_b32").value();
  const DeviceInfo ampere{.major = 8, .shared_bytes = 163 << 10};
  GemmProblem problem{.weight = scheme.weight, .act = scheme.act, .n = 64, .k = 96, .experts = 4};
  EXPECT_TRUE(kExpertsW4Ax.grouped);
  EXPECT_TRUE(kExpertsW4Ax.accepts(problem, ampere));
  problem.experts = 0;
  EXPECT_FALSE(kExpertsW4Ax.accepts(problem, ampere));
  problem.experts = 4;
  problem.act = ActFormat::kBf16;
  EXPECT_FALSE(kExpertsW4Ax.accepts(problem, ampere));
  problem.act = scheme.act;
  problem.weight = find_scheme("w4ax_class").value().weight;  // rows with one scale: w4a8's
  EXPECT_FALSE(kExpertsW4Ax.accepts(problem, ampere));
  problem.weight = scheme.weight;
  EXPECT_FALSE(kExpertsW4Ax.accepts(problem, {.major = 7, .shared_bytes = 163 << 10}));
}

}  // namespace
}  // namespace nibble::cuda
