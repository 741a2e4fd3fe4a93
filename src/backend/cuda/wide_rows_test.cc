#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/bf16_rows.h"
#include "base/f16.h"
#include "quant/block_rounding.h"

// Rows in blocks of INT8 and of BF16, by the kernels and by quant/block_rounding.h.
namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

constexpr WeightFormat kChannels{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};

/// Of every four blocks `bf16_of_4` are in BF16, nearly.
ActSpec random_spec(int64_t k, int block, int bf16_of_4, std::mt19937& random) {
  BlockPrecision blocks{.block = block, .bits = {}};
  for (int64_t i = 0; i < k / block; ++i) {
    blocks.bits.push_back(static_cast<int>(random() % 4) < bf16_of_4 ? 16 : 8);
  }
  ActSpec spec(ActFormat::kBf16Blocks);
  spec.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  return spec;
}

void mix_columns(ActSpec& spec, std::mt19937& random) {
  std::vector<int32_t> columns(static_cast<size_t>(spec.blocks->k()));
  std::iota(columns.begin(), columns.end(), 0);
  std::ranges::shuffle(columns, random);
  spec.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
}

/// How near to the rule rows must be: the same, or next to it, of numbers that were computed.
enum class Nearness { kSame, kNext };

/// Rows of n on the GPU and what rounds them.
class WideBlockRows final {
 public:
  WideBlockRows(const ActSpec& spec, int64_t rows)
      : spec_(spec),
        blocks_(DeviceBlocks::create(spec, kChannels, spec.blocks->k()).value()),
        rows_(rows),
        values_(static_cast<size_t>(rows * blocks_->view().wide.row_bytes())),
        scales_(static_cast<size_t>(rows)) {}

  [[nodiscard]] QuantizedRows out() const {
    return {ActFormat::kBf16Blocks, values_.data(), scales_.data(), blocks_->view()};
  }

  /// Of `wanted` [rows, n].
  void expect(const std::vector<float>& wanted, Nearness nearness) const {
    const std::vector<uint8_t> values = values_.host();
    const std::vector<float> scales = scales_.host();
    const auto row_bytes = values.size() / scales.size();
    const auto n = static_cast<size_t>(spec_.blocks->k());
    std::vector<float> ordered(n);
    for (size_t r = 0; r < scales.size(); ++r) {
      SCOPED_TRACE(::testing::Message() << "row " << r);
      for (size_t i = 0; i < n; ++i) {
        const size_t from = spec_.columns != nullptr ? static_cast<size_t>((*spec_.columns)[i]) : i;
        ordered[i] = wanted[r * n + from];
      }
      ASSERT_NO_FATAL_FAILURE(
          expect_row(ordered, values.data() + r * row_bytes, scales[r], nearness));
    }
  }

 private:
  void expect_row(const std::vector<float>& wanted,
                  const uint8_t* row,
                  float scale,
                  Nearness nearness) const {
    const BlockPrecision& blocks = *spec_.blocks;
    const auto block = static_cast<size_t>(blocks.block);
    const WideOrder order = wide_order(blocks);
    std::vector<int16_t> codes(wanted.size());
    std::vector<float> steps(blocks.bits.size() + 1);
    round_wide_blocks(blocks, wanted.data(), {codes.data(), steps.data()});
    const auto of_bf16 = std::ranges::count(blocks.bits, 16);
    const auto end = steps.begin() + 1 + of_bf16;
    const bool spoiled = std::any_of(steps.begin(), end, [](float s) { return std::isnan(s); });
    ASSERT_EQ(std::isnan(scale), spoiled);
    const bool same = nearness == Nearness::kSame;
    if (!spoiled) {
      ASSERT_NEAR(scale, steps[0], same ? 0.0 : 1e-3 * steps[0]);
    }
    std::vector<bool> filled(static_cast<size_t>(order.rows(nullptr).row_bytes()));
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool int8 = blocks.bits[i / block] == 8;
      const size_t bytes = int8 ? 1 : 2;
      const size_t place = static_cast<size_t>(order.places[i / block]) + bytes * (i % block);
      std::fill_n(filled.begin() + static_cast<ptrdiff_t>(place), bytes, true);
      if (spoiled) {
        continue;
      }
      if (int8) {
        ASSERT_LE(std::abs(static_cast<int8_t>(row[place]) - codes[i]), same ? 0 : 1)
            << "channel " << i;
        continue;
      }
      uint16_t bits = 0;
      std::memcpy(&bits, row + place, sizeof(bits));
      const float want = bf16_to_f32(f32_to_bf16(wanted[i]));
      ASSERT_NEAR(bf16_to_f32(bits), want, same ? 0.0 : std::fabs(want) * 0x1p-7 + 4e-6)
          << "channel " << i;
    }
    for (size_t i = 0; i < filled.size(); ++i) {
      ASSERT_TRUE(filled[i] || row[i] == 0) << "byte " << i << " beyond the channels";
    }
  }

  ActSpec spec_;
  std::shared_ptr<const DeviceBlocks> blocks_;
  int64_t rows_;
  DeviceArray<uint8_t> values_;
  DeviceArray<float> scales_;
};

/// Every width, block, share and order: in registers, read twice, and wider than usual memory.
template <typename Check>
void for_each_form(const Check& check) {
  std::mt19937 random(11);
  for (const int64_t n : {32, 64, 96, 576, 4096, 14336, 40960}) {
    for (const int block : {32, 64, 128}) {
      for (int share = 0; share <= 4 && n % block == 0; share += n > 1000 ? 2 : 1) {
        SCOPED_TRACE(::testing::Message() << "n " << n << " block " << block << " BF16 " << share);
        ActSpec spec = random_spec(n, block, share, random);
        if (share % 2 == 1 || (n > 1000 && block == 32)) {
          mix_columns(spec, random);
        }
        ASSERT_NO_FATAL_FAILURE(check(spec, n));
      }
    }
  }
}

TEST(WideRows, AreRoundedToTheBitsOfTheRule) {
  NIBBLE_NEEDS_GPU();
  for_each_form([](const ActSpec& spec, int64_t n) {
    const int64_t rows = n > 10000 ? 3 : 19;
    std::vector<float> x = random_values(static_cast<size_t>(rows * n), 5, 1.0F);
    for (size_t i = 0; i < x.size(); i += 97) {
      x[i] *= 30.0F;
    }
    std::fill_n(x.begin(), n, 0.0F);
    const DeviceArray<uint16_t> given(round_to_bf16(x));
    const WideBlockRows result(spec, rows);
    ASSERT_EQ(quantize_rows({.x = given.data(), .rows = rows, .n = n, .out = result.out()}, {}),
              cudaSuccess);
    result.expect(x, Nearness::kSame);
  });
}

// Wherever such a number is; in BF16 from 2^104 on.
TEST(WideRows, AreSpoiledByWhatIsNotFinite) {
  NIBBLE_NEEDS_GPU();
  std::mt19937 random(12);
  constexpr int64_t kN = 256;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> spoiling = {
      kInfinity,   -kInfinity, std::numeric_limits<float>::quiet_NaN(), 0x1p104F, -0x1.8p110F,
      0x1.fep103F, 0x1p103F};
  const auto rows = static_cast<int64_t>(spoiling.size());
  for (const int share : {0, 2, 4}) {
    const ActSpec spec = random_spec(kN, 32, share, random);
    for (const int64_t channel : {int64_t{0}, int64_t{77}, kN - 1}) {
      SCOPED_TRACE(::testing::Message() << "BF16 " << share << " channel " << channel);
      std::vector<float> x = random_values(static_cast<size_t>(rows * kN), 5, 1.0F);
      for (int64_t r = 0; r < rows; ++r) {
        x[static_cast<size_t>(r * kN + channel)] = spoiling[static_cast<size_t>(r)];
      }
      const DeviceArray<uint16_t> given(round_to_bf16(x));
      const WideBlockRows result(spec, rows);
      ASSERT_EQ(quantize_rows({.x = given.data(), .rows = rows, .n = kN, .out = result.out()}, {}),
                cudaSuccess);
      result.expect(x, Nearness::kSame);
    }
  }
}

TEST(WideRows, AreNormedAndActivatedInFrontOfIt) {
  NIBBLE_NEEDS_GPU();
  for_each_form([](const ActSpec& spec, int64_t n) {
    constexpr int64_t kRows = 3;
    constexpr float kEps = 1e-5F;
    std::vector<float> x = random_values(static_cast<size_t>(2 * kRows * n), 6, 1.0F);
    const DeviceArray<uint16_t> given(round_to_bf16(x));
    std::vector<float> wanted(static_cast<size_t>(kRows * n));
    for (int64_t i = 0; i < kRows * n; ++i) {
      const auto gate = static_cast<size_t>(i / n * 2 * n + i % n);
      wanted[static_cast<size_t>(i)] = static_cast<float>(
          exact_activation(GemmInput::Kind::kSiluMul, x[gate], x[gate + static_cast<size_t>(n)]));
    }
    const WideBlockRows activated(spec, kRows);
    ASSERT_EQ(
        activation_quantize({.x = given.data(), .rows = kRows, .n = n, .out = activated.out()}, {}),
        cudaSuccess);
    ASSERT_NO_FATAL_FAILURE(activated.expect(wanted, Nearness::kNext));
    const DeviceArray<float> floats(x);
    const std::vector<float> weights = random_values(static_cast<size_t>(n), 7, 1.0F);
    const DeviceArray<float> device_weights(weights);
    for (int64_t r = 0; r < kRows; ++r) {
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
    const WideBlockRows normed(spec, kRows);
    ASSERT_EQ(norm_quantize({.x = floats.data(),
                             .norm = {GemmInput::Kind::kRmsNorm, device_weights.data(), kEps},
                             .rows = kRows,
                             .n = n,
                             .out = normed.out()},
                            {}),
              cudaSuccess);
    normed.expect(wanted, Nearness::kNext);
  });
}

TEST(WideRows, NeedBlocksOfTheirOwnForm) {
  const QuantizedRows out{.format = ActFormat::kBf16Blocks,
                          .blocks = {.block = 32, .scales = BlockScales::kClass}};
  EXPECT_EQ(quantize_rows({.rows = 1, .n = 64, .out = out}, {}), cudaErrorInvalidValue);
}

TEST(WideOrder, PutsInt8FirstAndFillsUpBothParts) {
  const BlockPrecision blocks{.block = 64, .bits = {16, 8, 8, 16, 8}};
  const WideOrder order = wide_order(blocks);
  EXPECT_EQ(order.int8_channels, 192);
  EXPECT_EQ(order.int8_blocks, 2);  // of 128
  EXPECT_EQ(order.bf16_blocks, 2);  // of 64
  EXPECT_EQ(order.rows(nullptr).row_bytes(), 512);
  EXPECT_THAT(order.places, ::testing::ElementsAre(256, 0, 64, 384, 128));
  EXPECT_THAT(order.runs, ::testing::ElementsAre(2, 3, 4, 5, 8, 9, -1, -1, 0, 1, 6, 7));
}

TEST(WideOrder, HasNoPartWithoutBlocks) {
  const WideOrder int8 = wide_order({.block = 32, .bits = {8, 8, 8}});
  EXPECT_EQ(int8.int8_blocks, 2);
  EXPECT_EQ(int8.bf16_blocks, 0);
  EXPECT_THAT(int8.runs, ::testing::ElementsAre(0, 1, 2, -1, -1, -1, -1, -1));
  const WideOrder bf16 = wide_order({.block = 32, .bits = {16}});
  EXPECT_EQ(bf16.int8_blocks, 0);
  EXPECT_EQ(bf16.bf16_blocks, 2);
  EXPECT_THAT(bf16.runs, ::testing::ElementsAre(0, -1, -1, -1));
}

// Nowhere a row takes more than products are given room for.
TEST(WideOrder, HasRowsOfBoundedSize) {
  std::mt19937 random(3);
  for (int64_t k = 32; k <= 4096; k += 32) {
    for (int share = 0; share <= 4; ++share) {
      const ActSpec spec = random_spec(k, 32, share, random);
      const WideRows rows = wide_order(*spec.blocks).rows(nullptr);
      EXPECT_LE(rows.row_bytes(), 2 * most_wide_row_numbers(k)) << k;
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
