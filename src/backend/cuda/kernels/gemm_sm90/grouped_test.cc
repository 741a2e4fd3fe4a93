// The experts of a layer by gemm_sm90/grouped.cuh, tile by tile against the dense kernel of the
// same packed weights.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "base/math.h"
#include "quant/code_traits.h"
#include "quant/scheme.h"
#include "quant/testing/random_levels.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;

enum class Elements : uint8_t { kIntegers, kFp8, kBf16 };

/// `count` bytes of any codes but those of NaN in E4M3, or of numbers around 1 in BF16.
std::vector<uint8_t> random_codes(size_t count, Elements elements, std::mt19937& random) {
  std::vector<uint8_t> codes(count);
  for (size_t i = 0; elements == Elements::kBf16 && i < count; i += 2) {
    const uint16_t value = f32_to_bf16(std::normal_distribution<float>()(random));
    std::memcpy(codes.data() + i, &value, 2);
  }
  if (elements == Elements::kBf16) {
    return codes;
  }
  for (uint8_t& code : codes) {
    code = static_cast<uint8_t>(random());
    code = elements == Elements::kFp8 && (code & 0x7f) == 0x7f ? 0x38 : code;
  }
  return codes;
}

std::vector<float> random_scales(size_t count, std::mt19937& random) {
  std::vector<float> scales(count);
  for (float& scale : scales) {
    scale = 0.01F * (1.0F + std::fabs(std::normal_distribution<float>()(random)));
  }
  return scales;
}

/// Scales of n rows of k weights.
std::vector<float> random_scales(const WeightFormat& format,
                                 int64_t n,
                                 int64_t k,
                                 std::mt19937& random) {
  if (format.zero_points == ZeroPoints::kPerScale) {  // and these behind them
    QuantTensor weight = QuantTensor::allocate(format, n, k).value();
    make_levels(weight, random);
    const auto scales = weight.scales.as<float>();
    std::vector<float> numbers(scales.begin(), scales.end());
    std::ranges::copy(weight.zeros.as<int8_t>(), std::back_inserter(numbers));
    return numbers;
  }
  const int64_t of_row = std::max<int64_t>(1, format.groups(k));
  std::vector<float> scales = random_scales(static_cast<size_t>(n * of_row), random);
  for (float& scale : scales) {
    scale = format.scale_dtype == DType::kF8E8M0 ? std::exp2(std::round(std::log2(scale))) : scale;
  }
  return scales;
}

struct Sizes {
  int64_t n = 0, k = 0;
};

/// Experts of a layer and rows for them, between which lie poisoned ones that no tile has.
class Layer final {
 public:
  static constexpr int kExperts = 5;

  Layer(const GemmEntry& entry, std::string_view scheme_name, const Sizes& sizes)
      : sizes_(sizes), random_(static_cast<uint32_t>(sizes.n)) {
    const QuantScheme scheme = find_scheme(scheme_name).value();
    const DeviceInfo device = query_device(0).value();
    const bool wide = scheme.act == ActFormat::kFloat;
    const GemmProblem problem{scheme.weight, wide ? ActFormat::kBf16 : scheme.act, sizes.n,
                              sizes.k};
    EXPECT_TRUE(entry.grouped && entry.accepts(problem, device));

    elements_ = wide                                 ? Elements::kBf16
                : scheme.act == ActFormat::kFp8Token ? Elements::kFp8
                                                     : Elements::kIntegers;
    x_row_bytes_ = sizes.k * (wide ? 2 : 1);
    kernel_ = entry.make(problem, device).value();
    const auto code_bytes = static_cast<size_t>(sizes.n * sizes.k) *
                            static_cast<size_t>(code_traits(scheme.weight.code).bits) / 8;
    const Elements weights = scheme.weight.code == WeightCode::kFp8E4M3 ? Elements::kFp8
                             : scheme.weight.quantized()                ? Elements::kIntegers
                                                                        : Elements::kBf16;
    stride_ = round_up(kernel_->packed_bytes(), 128);
    packed_ = std::make_unique<DeviceArray<uint8_t>>(kExperts * stride_);
    for (size_t e = 0; e < kExperts; ++e) {
      const DeviceArray<uint8_t> codes(random_codes(code_bytes, weights, random_));
      const DeviceArray<float> scales(random_scales(scheme.weight, sizes.n, sizes.k, random_));
      EXPECT_EQ(kernel_->pack(codes.data(), scales.data(), packed_->data() + e * stride_, nullptr),
                cudaSuccess);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    bias_ = std::make_unique<DeviceArray<float>>(
        random_scales(static_cast<size_t>(kExperts * sizes.n), random_));
  }

  /// Tiles of up to tile_rows rows.
  void check(int tile_rows) {
    list_tiles(tile_rows);
    std::vector<uint8_t> x(static_cast<size_t>(slots_ * x_row_bytes_), 0xff);
    std::vector<float> x_scales(static_cast<size_t>(slots_), NAN);
    for (const ExpertTile& tile : tiles_) {
      const auto rows = static_cast<size_t>(tile.rows);
      std::ranges::copy(random_codes(rows * static_cast<size_t>(x_row_bytes_), elements_, random_),
                        x.begin() + tile.first * x_row_bytes_);
      std::ranges::copy(random_scales(rows, random_), x_scales.begin() + tile.first);
    }
    x_ = std::make_unique<DeviceArray<uint8_t>>(x);
    x_scales_ = std::make_unique<DeviceArray<float>>(x_scales);
    for (const bool biased : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "n " << sizes_.n << " k " << sizes_.k << ", tiles of "
                                        << tile_rows << (biased ? ", bias" : ""));
      check_result<uint16_t>(GemmResult::kBf16, biased, tile_rows);
      check_result<float>(GemmResult::kF32, biased, tile_rows);
    }
  }

 private:
  // Full tiles, others and single rows, of experts in no order, with rows in between; more items
  // than blocks where n is large.
  void list_tiles(int tile_rows) {
    const int counts[] = {tile_rows,         1, std::max(1, tile_rows / 2), tile_rows / 2 + 1,
                          tile_rows / 4 * 3, 3, tile_rows / 4 * 3 + 1,      tile_rows / 5 * 4 + 1};
    tiles_.clear();
    int next = 0;
    for (int i = 0; i < 31; ++i) {
      const int rows = std::min(counts[i % 8], tile_rows);
      tiles_.push_back({.expert = i * 3 % kExperts, .first = next, .rows = rows});
      next += rows + i % 3;
    }
    slots_ = next + 1;
  }

  template <typename T>
  void check_result(GemmResult result, bool biased, int tile_rows) {
    const auto count = static_cast<size_t>(slots_ * sizes_.n);
    const DeviceArray<T> y(count), expected(count);
    std::vector<ExpertTile> listed = tiles_;
    listed.resize(tiles_.size() + 4);
    const DeviceArray<ExpertTile> tiles(listed);
    const DeviceArray<int32_t> tile_count(
        std::vector<int32_t>{static_cast<int32_t>(tiles_.size())});
    ASSERT_EQ(kernel_->run_grouped({.x = x_->data(),
                                    .x_scales = x_scales_->data(),
                                    .packed = packed_->data(),
                                    .expert_bytes = static_cast<int64_t>(stride_),
                                    .bias = biased ? bias_->data() : nullptr,
                                    .y = y.data(),
                                    .result = result,
                                    .slots = slots_,
                                    .tiles = tiles.data(),
                                    .tile_count = tile_count.data(),
                                    .max_tiles = static_cast<int64_t>(listed.size()),
                                    .tile_rows = tile_rows},
                                   {}),
              cudaSuccess);
    DeviceArray<uint8_t> workspace(kernel_->workspace_bytes(tile_rows));
    workspace.zero();
    for (const ExpertTile& tile : tiles_) {
      ASSERT_EQ(
          kernel_->run({.x = x_->data() + tile.first * x_row_bytes_,
                        .x_scales = x_scales_->data() + tile.first,
                        .packed = packed_->data() + static_cast<size_t>(tile.expert) * stride_,
                        .bias = biased ? bias_->data() + tile.expert * sizes_.n : nullptr,
                        .y = expected.data() + tile.first * sizes_.n,
                        .y_stride = sizes_.n,
                        .m = tile.rows,
                        .result = result,
                        .workspace = workspace.data()},
                       {}),
          cudaSuccess);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    compare(y.host(), expected.host());
  }

  // Integers have the same bits; other sums of the dense kernel may be those of several parts.
  template <typename T>
  void compare(const std::vector<T>& got, const std::vector<T>& want) {
    if (elements_ == Elements::kIntegers) {
      EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(T)), 0);
      return;
    }
    const auto value = [](T raw) {
      return sizeof(T) == 4 ? static_cast<double>(raw) : bf16_to_f32(static_cast<uint16_t>(raw));
    };
    double difference = 0.0, total = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double g = value(got[i]), w = value(want[i]);
      ASSERT_EQ(std::isnan(g), std::isnan(w)) << "at " << i;
      if (!std::isnan(w)) {
        difference += (g - w) * (g - w);
        total += w * w;
      }
    }
    EXPECT_LE(std::sqrt(difference / total), 1e-2);
  }

  Sizes sizes_;
  std::mt19937 random_;
  Elements elements_ = Elements::kIntegers;
  int64_t x_row_bytes_ = 0;
  std::unique_ptr<GemmKernel> kernel_;
  size_t stride_ = 0;
  std::unique_ptr<DeviceArray<uint8_t>> packed_, x_;
  std::unique_ptr<DeviceArray<float>> bias_, x_scales_;
  std::vector<ExpertTile> tiles_;
  int64_t slots_ = 0;
};

// Rows of pairs, of single values and of whole words; k short of a step, of the ring and beyond it.
void check_layers(const GemmEntry& entry, std::string_view scheme) {
  for (const Sizes& sizes : {Sizes{330, 832}, Sizes{67, 192}, Sizes{64, 64}, Sizes{1344, 1024}}) {
    if (testing::brief_tests() && sizes.n != 67) {
      continue;
    }
    Layer layer(entry, scheme, sizes);
    for (const int tile_rows : {8, 16, 32, 64, 96, 128, 160, 256}) {
      layer.check(tile_rows);
    }
  }
}

TEST(GroupedSm90, Int4TimesInt8EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW4A8Sm90, "w4a8");
}
TEST(GroupedSm90, Int4InLevelsTimesInt8EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW4A8LevelsSm90, "w4a8_g64");
}
TEST(GroupedSm90, Int8TimesInt8EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW8A8Int8Sm90, "w8a8_int8");
}
TEST(GroupedSm90, E4M3TimesE4M3EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW8A8Fp8Sm90, "w8a8_fp8");
}
TEST(GroupedSm90, Int8TimesBf16EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW8A16Sm90, "w8a16_channel");
}
TEST(GroupedSm90, Int4TimesBf16EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmW4A16ChannelSm90, "w4a16_channel");
}
TEST(GroupedSm90, Bf16TimesBf16EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmBf16Sm90, "bf16");
}

TEST(GroupedSm90, Mxfp4TimesE4M3EqualsTheDenseProducts) {
  NIBBLE_NEEDS_GPU();
  check_layers(kGemmMxfp4Fp8Sm90, "mxfp4_fp8");
}

}  // namespace
}  // namespace nibble::cuda
