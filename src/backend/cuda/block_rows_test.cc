#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gmock/gmock.h>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/bf16_rows.h"
#include "quant/block_rounding.h"

// Rows in blocks of 4 and 8 bits, by the kernels and by quant/block_rounding.h.
namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

constexpr WeightFormat kChannels{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
WeightFormat groups_of(int block) {
  return {WeightCode::kInt4, ScalePer::kGroup, block, DType::kBF16};
}

ActSpec random_spec(int64_t k, int block, bool ordered, std::mt19937& random) {
  BlockPrecision blocks{.block = block, .bits = {}, .clip = 0.85F};
  for (int64_t i = 0; i < k / block; ++i) {
    blocks.bits.push_back(random() % 4 == 0 ? 8 : 4);
  }
  ActSpec spec(ActFormat::kIntBlocks);
  spec.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  if (ordered) {
    std::vector<int32_t> columns(static_cast<size_t>(k));
    std::iota(columns.begin(), columns.end(), 0);
    std::ranges::shuffle(columns, random);
    spec.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
  }
  return spec;
}

/// Rows of n on the GPU and what rounds them.
class BlockRows final {
 public:
  BlockRows(const ActSpec& spec, const WeightFormat& weight, int64_t rows, int64_t n)
      : spec_(spec),
        blocks_(DeviceBlocks::create(spec, weight, n).value()),
        rows_(rows),
        n_(n),
        stride_(int_scale_stride(rows)),
        codes_(static_cast<size_t>(rows * n)),
        scales_(static_cast<size_t>(int_scale_rows(blocks_->view(), n) * stride_)) {}

  [[nodiscard]] QuantizedRows out() const {
    return {ActFormat::kIntBlocks, codes_.data(), scales_.data(), blocks_->view()};
  }

  /// Codes and scales are those of `wanted` [rows, n]: exactly, or, of numbers that were computed,
  /// next to them.
  void expect(const std::vector<float>& wanted, bool exactly) const {
    const std::vector<uint8_t> codes = codes_.host();
    const std::vector<float> scales = scales_.host();
    const BlockScales form = blocks_->view().scales;
    std::vector<int8_t> row(static_cast<size_t>(n_));
    std::vector<float> ordered(row.size());
    std::vector<float> steps(static_cast<size_t>(scale_count(*spec_.blocks, form)));
    for (int64_t r = 0; r < rows_; ++r) {
      for (size_t i = 0; i < row.size(); ++i) {
        const size_t from = spec_.columns != nullptr ? static_cast<size_t>((*spec_.columns)[i]) : i;
        ordered[i] = wanted[static_cast<size_t>(r * n_) + from];
      }
      round_blocks(*spec_.blocks, form, ordered.data(), {row.data(), steps.data()});
      const int shift = by_class() ? class_codes(*spec_.blocks, ordered.data()).shift : 0;
      const auto scale_at = [&](size_t b) {
        return scales[b * static_cast<size_t>(stride_) + static_cast<size_t>(r)];
      };
      for (size_t b = 0; b < steps.size(); ++b) {
        if (std::isnan(steps[b])) {
          ASSERT_TRUE(std::isnan(scale_at(b)));
          continue;
        }
        ASSERT_TRUE(exactly ? scale_at(b) == steps[b] : is_near(scale_at(b), steps[b]))
            << "row " << r << " scale " << b << ": " << scale_at(b) << " for " << steps[b];
      }
      for (size_t b = steps.size(); b < scales.size() / static_cast<size_t>(stride_); ++b) {
        ASSERT_EQ(scale_at(b), 0.0F) << "scale " << b << " beyond the row";
      }
      for (size_t i = 0; i < row.size(); ++i) {
        const size_t b = i / static_cast<size_t>(spec_.blocks->block);
        const size_t step = by_class() ? 0 : b;
        if (std::isnan(steps[step])) {
          continue;  // its codes mean nothing
        }
        const int code = static_cast<int8_t>(codes[static_cast<size_t>(r * n_) + i]);
        if (exactly) {
          ASSERT_EQ(code, row[i]) << "row " << r << " channel " << i;
          continue;
        }
        const double unit = std::max(scale_at(step), steps[step]) *
                            (by_class() && spec_.blocks->bits[b] == 4 ? 1 << shift : 1);
        ASSERT_NEAR(double{scale_at(step)} * code, double{steps[step]} * row[i], 1.2 * unit)
            << "row " << r << " channel " << i;
      }
    }
  }

 private:
  [[nodiscard]] bool by_class() const { return blocks_->view().scales == BlockScales::kClass; }
  /// Of numbers that were computed; a scale that blocks share may be the next one, of half or twice
  /// the size.
  [[nodiscard]] bool is_near(float scale, float wanted) const {
    const auto near = [&](double size) {
      return std::fabs(scale - size * wanted) <= 1e-3 * wanted;
    };
    return near(1) || (by_class() && (near(0.5) || near(2)));
  }

  ActSpec spec_;
  std::shared_ptr<const DeviceBlocks> blocks_;
  int64_t rows_, n_, stride_;
  DeviceArray<uint8_t> codes_;
  DeviceArray<float> scales_;
};

/// Every width, block, form and order: in registers, read twice, wider than usual memory, and wider
/// than the tables that travel with a launch.
template <typename Check>
void for_each_form(const Check& check) {
  std::mt19937 random(11);
  for (const int64_t n : {64, 576, 4096, 14336, 40960, 66048}) {
    for (const int block : {32, 64, 128}) {
      for (int form = 0; form < 4 && n % block == 0; form += n > kChannelsHere ? 2 : 1) {
        SCOPED_TRACE(::testing::Message() << "n " << n << " block " << block << " form " << form);
        const ActSpec spec = random_spec(n, block, form % 2 == 1, random);
        check(spec, form < 2 ? groups_of(block) : kChannels, n);
      }
    }
  }
}

TEST(BlockRows, AreRoundedToTheBitsOfTheRule) {
  NIBBLE_NEEDS_GPU();
  for_each_form([](const ActSpec& spec, const WeightFormat& weight, int64_t n) {
    const int64_t rows = n > 10000 ? 3 : 19;
    std::vector<float> x = random_values(static_cast<size_t>(rows * n), 5, 1.0F);
    for (size_t i = 0; i < x.size(); i += 97) {
      x[i] *= 30.0F;
    }
    // Rows whose numbers of 8 bits are smaller and larger than those of 4, by every shift.
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const bool eight = spec.blocks->bits[static_cast<size_t>(i / spec.blocks->block)] == 8;
        const int64_t column =
            spec.columns != nullptr ? (*spec.columns)[static_cast<size_t>(i)] : i;
        x[static_cast<size_t>(r * n + column)] *=
            eight ? std::exp2(static_cast<float>(r % 8) - 2.0F) : 1.0F;
      }
    }
    std::fill_n(x.begin(), spec.blocks->block, 0.0F);
    if (rows > 2) {
      x[static_cast<size_t>(2 * n) + 1] = std::numeric_limits<float>::quiet_NaN();
      x[static_cast<size_t>(3 * n) - 1] = std::numeric_limits<float>::infinity();
    }
    const DeviceArray<uint16_t> given(round_to_bf16(x));
    const BlockRows result(spec, weight, rows, n);
    ASSERT_EQ(quantize_rows({.x = given.data(), .rows = rows, .n = n, .out = result.out()}, {}),
              cudaSuccess);
    result.expect(x, true);
  });
}

TEST(BlockRows, AreNormedAndActivatedInFrontOfIt) {
  NIBBLE_NEEDS_GPU();
  for_each_form([](const ActSpec& spec, const WeightFormat& weight, int64_t n) {
    constexpr float kEps = 1e-5F;
    const int64_t rows = n == 4096 ? 33 : 3;  // many and few
    std::vector<float> x = random_values(static_cast<size_t>(2 * rows * n), 6, 1.0F);
    const DeviceArray<uint16_t> given(round_to_bf16(x));
    std::vector<float> wanted(static_cast<size_t>(rows * n));
    for (int64_t i = 0; i < rows * n; ++i) {
      const auto gate = static_cast<size_t>(i / n * 2 * n + i % n);
      wanted[static_cast<size_t>(i)] = static_cast<float>(
          exact_activation(GemmInput::Kind::kSiluMul, x[gate], x[gate + static_cast<size_t>(n)]));
    }
    const BlockRows activated(spec, weight, rows, n);
    ASSERT_EQ(
        activation_quantize({.x = given.data(), .rows = rows, .n = n, .out = activated.out()}, {}),
        cudaSuccess);
    activated.expect(wanted, false);
    const DeviceArray<float> floats(x);
    const std::vector<float> weights = random_values(static_cast<size_t>(n), 7, 1.0F);
    const DeviceArray<float> device_weights(weights);
    for (int64_t r = 0; r < rows; ++r) {
      double squares = kEps;
      for (int64_t i = r * n; i < (r + 1) * n; ++i) {
        squares += static_cast<double>(x[static_cast<size_t>(i)]) * x[static_cast<size_t>(i)] /
                   static_cast<double>(n);
      }
      for (int64_t i = r * n; i < (r + 1) * n; ++i) {
        wanted[static_cast<size_t>(i)] = static_cast<float>(
            x[static_cast<size_t>(i)] / std::sqrt(squares) * weights[static_cast<size_t>(i % n)]);
      }
    }
    const BlockRows normed(spec, weight, rows, n);
    ASSERT_EQ(norm_quantize({.x = floats.data(),
                             .norm = {GemmInput::Kind::kRmsNorm, device_weights.data(), kEps},
                             .rows = rows,
                             .n = n,
                             .out = normed.out()},
                            {}),
              cudaSuccess);
    normed.expect(wanted, false);
  });
}

// Rows that are each of an expert with blocks and an order of its own, or none: as one by one.
TEST(BlockRows, OfExpertsAreActivatedAsEachOfThem) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRows = 9, kWanted = 7;
  std::mt19937 random(12);
  for (const int64_t n : {64, 192, 2048, 4096}) {
    for (const WeightFormat& weight : {groups_of(32), kChannels}) {
      SCOPED_TRACE(::testing::Message() << "n " << n << (weight.grouped() ? "" : " by class"));
      const bool by_class = !weight.grouped();
      const std::vector<ActSpec> specs = {random_spec(n, 32, true, random),
                                          random_spec(n, by_class ? 64 : 32, false, random),
                                          random_spec(n, 32, true, random)};
      const auto experts = DeviceExpertBlocks::create(specs, weight, n).value();
      ASSERT_NE(experts->view().each, nullptr);
      ASSERT_NE(experts->view().all.columns, nullptr);
      std::vector<float> x = random_values(static_cast<size_t>(2 * kRows * n), 6, 1.0F);
      const DeviceArray<uint16_t> given(round_to_bf16(x));
      const std::vector<int32_t> of_rows = {0, 0, 1, 1, 1, 2, 0, -5, 99};  // of those wanted
      const DeviceArray<int32_t> device_experts(of_rows), wanted(std::vector<int32_t>{kWanted});
      const auto stride = static_cast<size_t>(int_scale_stride(kRows));
      const auto scale_rows = static_cast<size_t>(int_scale_rows(experts->view().all, n));
      const DeviceArray<uint8_t> codes(static_cast<size_t>(kRows * n));
      const DeviceArray<float> scales(std::vector<float>(scale_rows * stride, 5.0F));
      ASSERT_EQ(activation_quantize({.x = given.data(),
                                     .rows = kRows,
                                     .n = n,
                                     .out = {ActFormat::kIntBlocks, codes.data(), scales.data(),
                                             experts->view().all},
                                     .wanted = wanted.data(),
                                     .each_blocks = experts->view().each,
                                     .experts = device_experts.data()},
                                    {}),
                cudaSuccess);
      const std::vector<uint8_t> got = codes.host();
      const std::vector<float> got_scales = scales.host();
      for (int64_t row = 0; row < kWanted; ++row) {
        const auto at = static_cast<size_t>(row);
        const auto alone =
            DeviceBlocks::create(specs[static_cast<size_t>(of_rows[at])], weight, n).value();
        const DeviceArray<uint8_t> own(static_cast<size_t>(n));
        const DeviceArray<float> own_scales(scale_rows * static_cast<size_t>(int_scale_stride(1)));
        ASSERT_EQ(activation_quantize({.x = given.data() + row * 2 * n,
                                       .rows = 1,
                                       .n = n,
                                       .out = {ActFormat::kIntBlocks, own.data(), own_scales.data(),
                                               alone->view()}},
                                      {}),
                  cudaSuccess);
        const auto first = got.begin() + row * n;
        EXPECT_EQ(own.host(), std::vector<uint8_t>(first, first + n)) << "row " << row;
        const std::vector<float> wanted_scales = own_scales.host();
        for (size_t s = 0; s < scale_rows; ++s) {
          EXPECT_EQ(got_scales[s * stride + at], wanted_scales[s * 8]) << "row " << row;
        }
      }
      for (size_t s = 0; s < scale_rows; ++s) {
        EXPECT_EQ(got_scales[s * stride + kWanted], 5.0F);
      }
    }
  }
}

TEST(DeviceExpertBlocks, ThatAreAlikeAreOne) {
  NIBBLE_NEEDS_GPU();
  std::mt19937 random(13);
  const ActSpec spec = random_spec(256, 64, true, random);
  const std::vector<ActSpec> alike(3, spec);
  EXPECT_EQ(DeviceExpertBlocks::create(alike, kChannels, 256).value()->view().each, nullptr);
  const std::vector<ActSpec> others = {spec, random_spec(256, 64, false, random)};
  EXPECT_NE(DeviceExpertBlocks::create(others, kChannels, 256).value()->view().each, nullptr);
}

TEST(DeviceExpertBlocks, RefuseWhatOneOfThemCannotBe) {
  std::mt19937 random(14);
  std::vector<ActSpec> specs = {random_spec(256, 64, false, random),
                                random_spec(192, 64, false, random)};
  EXPECT_FALSE(DeviceExpertBlocks::create(specs, kChannels, 256).ok());
  specs[1].blocks = nullptr;
  EXPECT_THAT(std::string(DeviceExpertBlocks::create(specs, kChannels, 256).status().message()),
              ::testing::HasSubstr("without the bits"));
  const std::vector<ActSpec> others = {ActSpec(ActFormat::kInt8Token)};
  EXPECT_EQ(DeviceExpertBlocks::create(others, kChannels, 256).value(), nullptr);
}

TEST(DeviceBlocks, RefuseWhatIsNoOrderOfChannels) {
  std::mt19937 random(1);
  ActSpec spec = random_spec(256, 64, true, random);
  std::vector<int32_t> columns = *spec.columns;
  columns[3] = columns[4];
  spec.columns = std::make_shared<const std::vector<int32_t>>(columns);
  EXPECT_THAT(std::string(DeviceBlocks::create(spec, kChannels, 256).status().message()),
              ::testing::HasSubstr("occurs twice"));
  columns.pop_back();
  columns[3] = 255;
  spec.columns = std::make_shared<const std::vector<int32_t>>(columns);
  EXPECT_FALSE(DeviceBlocks::create(spec, kChannels, 256).ok());
  spec.blocks = nullptr;
  EXPECT_THAT(std::string(DeviceBlocks::create(spec, kChannels, 256).status().message()),
              ::testing::HasSubstr("without the bits"));
}

}  // namespace
}  // namespace nibble::cuda
