#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/gemm_input.h"
#include "backend/testing/random_blocks.h"
#include "backend/testing/random_gemm.h"

// Products of INT4 with rows in blocks of two precisions: on every instruction set the bits of the
// reference.
namespace nibble {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMost = 70;

std::vector<QuantScheme> block_schemes() {
  std::vector<QuantScheme> found;
  for (const QuantScheme& scheme : all_schemes()) {
    if (in_blocks(scheme.act)) {
      found.push_back(scheme);
    }
  }
  return found;
}

class BlockActs : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    backend_ = make_cpu_backend(
                   {.threads = 3, .isa = std::string(GetParam()), .limit = ThreadLimit::kNone})
                   .value();
  }

  std::unique_ptr<Backend> backend_;
};

std::vector<float> rows(int64_t count, uint32_t seed) {
  std::vector<float> x = random_floats(count, seed);
  for (size_t i = 0; i < x.size(); i += 41) {
    x[i] *= 30.0F;
  }
  return x;
}

std::vector<uint32_t> bits_of(const std::vector<float>& y) {
  std::vector<uint32_t> bits(y.size());
  std::memcpy(bits.data(), y.data(), y.size() * sizeof(float));
  return bits;
}

/// Rows of y `n + 3` apart, poisoned before; the columns between stay so.
std::vector<float> product(PreparedGemm& gemm, GemmArgs args, int64_t n) {
  std::vector<float> y(static_cast<size_t>(args.m * (n + 3)), kNan);
  args.y = y.data();
  args.y_stride = n + 3;
  gemm.run(args);
  std::vector<float> dense;
  for (int64_t row = 0; row < args.m; ++row) {
    const auto at = y.begin() + row * (n + 3);
    EXPECT_TRUE(std::all_of(at + n, at + n + 3, [](float v) { return std::isnan(v); }));
    dense.insert(dense.end(), at, at + n);
  }
  return dense;
}

std::vector<float> expected(const QuantTensor& weight, const ActSpec& act, GemmArgs args) {
  std::vector<float> y(static_cast<size_t>(args.m * weight.n), kNan);
  args.y = y.data();
  args.y_stride = weight.n;
  reference_gemm(weight, act, args);
  return y;
}

TEST_P(BlockActs, HaveTheBitsOfTheReference) {
  uint32_t seed = 1;
  for (const QuantScheme& scheme : block_schemes()) {
    const int64_t block = scheme.weight.grouped() ? scheme.weight.group_size : 32;
    for (const int64_t blocks : {1, 3, 9, 17}) {
      for (const int64_t n : {1, 16, 37, 67}) {
        const int64_t k = blocks * block;
        const QuantTensor weight = random_weight(scheme.weight, {n, k}, ++seed).value();
        const ActSpec act = random_blocks(scheme, k, seed);
        const auto gemm = backend_->prepare_gemm(weight, act, kMost).value();
        const std::vector<float> x = rows(kMost * k, seed);
        for (const int64_t m : {1, 2, 3, 5, 16, 17, 31, 70}) {
          const GemmArgs args{.x = x.data(), .x_stride = k, .m = m};
          ASSERT_EQ(bits_of(product(*gemm, args, n)), bits_of(expected(weight, act, args)))
              << scheme.name << ": " << m << " x " << n << " x " << k;
        }
      }
    }
  }
}

/// Rows in blocks of 8 bits and of BF16 as their definition has them, in double precision; how far
/// fixed point may be from BF16 for each number.
struct DoubleRow {
  std::vector<double> x;
  std::vector<double> slack;
};

DoubleRow double_row(const BlockPrecision& blocks, const float* x) {
  DoubleRow row{std::vector<double>(x, x + blocks.k()),
                std::vector<double>(static_cast<size_t>(blocks.k()), 0.0)};
  double largest8 = 0;
  for (size_t i = 0; i < row.x.size(); ++i) {
    const bool wide = blocks.bits[i / static_cast<size_t>(blocks.block)] == 16;
    largest8 = wide ? largest8 : std::max(largest8, std::fabs(row.x[i]));
  }
  const auto block = static_cast<size_t>(blocks.block);
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    double largest = 0;
    for (size_t i = b * block; i < (b + 1) * block; ++i) {
      if (blocks.bits[b] == 16) {
        row.x[i] = to_f32(to_bf16({x[i]}))[0];
        largest = std::max(largest, std::fabs(row.x[i]));
      } else {
        // The factor is of F32, which may move a number over a tie.
        const float factor = 127.0F / static_cast<float>(largest8);
        row.x[i] = std::nearbyint(x[i] * factor) * largest8 / 127;
      }
    }
    std::fill_n(row.slack.begin() + static_cast<int64_t>(b * block), block, largest * 0x1p-14);
  }
  return row;
}

/// Of INT4 with a scale for each row.
std::vector<double> numbers_of(const QuantTensor& weight) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(weight.codes.data());
  std::vector<double> numbers;
  for (int64_t i = 0; i < weight.n * weight.k; ++i) {
    const int code = (bytes[i / 2] >> (i % 2 * 4) & 15) - 8;
    numbers.push_back(
        code * static_cast<double>(weight.scales.as<float>()[static_cast<size_t>(i / weight.k)]));
  }
  return numbers;
}

/// y of rows x, as far from double precision as fixed point and F32 may be.
void expect_near_double(const QuantTensor& weight,
                        const BlockPrecision& blocks,
                        const std::vector<float>& x,
                        const std::vector<float>& y) {
  const std::vector<double> w = numbers_of(weight);
  for (int64_t row = 0; row * weight.n < std::ssize(y); ++row) {
    const DoubleRow given = double_row(blocks, x.data() + row * weight.k);
    for (int64_t column = 0; column < weight.n; ++column) {
      const double* of = w.data() + column * weight.k;
      double want = 0;
      double slack = 0;
      for (size_t i = 0; i < given.x.size(); ++i) {
        want += given.x[i] * of[i];
        slack += given.slack[i] * std::fabs(of[i]) + std::fabs(given.x[i] * of[i]) * 1e-6;
      }
      ASSERT_NEAR(y[static_cast<size_t>(row * weight.n + column)], want, slack) << row << column;
    }
  }
}

/// Blocks of 8 bits and in BF16 in no order; every fifth seed has none of 8 bits.
ActSpec bf16_blocks(int block, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  BlockPrecision blocks{.block = block};
  for (int64_t b = 0; b < k / block; ++b) {
    blocks.bits.push_back(seed % 5 == 0 || random() % 2 == 0 ? 16 : 8);
  }
  ActSpec act(ActFormat::kBf16Blocks);
  act.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  return act;
}

TEST_P(BlockActs, OfInt8AndBf16AreNearDoublePrecision) {
  const QuantScheme scheme = find_scheme("w4a8_bf16").value();
  constexpr int64_t kN = 37;
  uint32_t seed = 100;
  for (const int block : {32, 64, 128}) {
    for (const int64_t k : {128, 384, 640}) {
      const ActSpec act = bf16_blocks(block, k, ++seed);
      const QuantTensor weight = random_weight(scheme.weight, {kN, k}, seed).value();
      const auto gemm = backend_->prepare_gemm(weight, act, kMost).value();
      const std::vector<float> x = rows(kMost * k, seed);
      for (const int64_t m : {1, 3, 17, 27}) {
        SCOPED_TRACE(testing::Message() << m << " x " << k << " in blocks of " << block);
        const GemmArgs args{.x = x.data(), .x_stride = k, .m = m};
        const std::vector<float> y = product(*gemm, args, kN);
        ASSERT_EQ(bits_of(y), bits_of(expected(weight, act, args)));
        expect_near_double(weight, *act.blocks, x, y);
      }
    }
  }
}

// Numbers of 8 bits from far below to far above those of 4, of any size.
TEST_P(BlockActs, OfOneScaleHaveTheBitsOfTheReferenceByEveryShift) {
  constexpr int64_t kN = 35;
  constexpr int64_t kK = 352;
  const float ratios[] = {0.0F, 1e-4F, 0.1F, 1.0F, 2.0F, 4.0F, 8.0F, 16.0F, 32.0F, 1e4F};
  constexpr int64_t kM = std::size(ratios);
  const QuantScheme scheme = find_scheme("w4ax_class").value();
  const QuantTensor weight = random_weight(scheme.weight, {kN, kK}, 23).value();
  const ActSpec act = random_blocks(scheme, kK, 24);
  const auto gemm = backend_->prepare_gemm(weight, act, kM).value();
  for (const float size : {1.0F, 1e33F, 1e-30F, 1e-36F, 1e-37F, 1e-38F, 1e-40F, 1e-44F}) {
    std::vector<float> x = random_floats(kM * kK, 25);
    for (int64_t i = 0; i < kM * kK; ++i) {
      const int bits = act.blocks->bits[static_cast<size_t>(i % kK / act.blocks->block)];
      x[static_cast<size_t>(i)] *= size * (bits == 8 ? ratios[i / kK] : 1.0F);
    }
    for (const int64_t m : {int64_t{1}, int64_t{3}, kM}) {
      const GemmArgs args{.x = x.data() + (kM - m) * kK, .x_stride = kK, .m = m};
      ASSERT_EQ(bits_of(product(*gemm, args, kN)), bits_of(expected(weight, act, args)))
          << size << ": " << m << " rows";
    }
  }
}

TEST_P(BlockActs, TakeColumnsBiasesSumsAndBf16) {
  for (const QuantScheme& scheme : block_schemes()) {
    constexpr int64_t kN = 35;
    constexpr int64_t kK = 640;
    const QuantTensor weight = random_weight(scheme.weight, {kN, kK}, 3).value();
    ActSpec act = random_blocks(scheme, kK, 4);
    std::vector<int32_t> columns(kK);
    std::iota(columns.begin(), columns.end(), 0);
    std::shuffle(columns.begin(), columns.end(), std::mt19937(3));
    act.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
    const auto gemm = backend_->prepare_gemm(weight, act, kMost).value();
    const std::vector<float> bias = random_floats(kN, 5);
    const std::vector<uint16_t> narrow = to_bf16(rows(kMost * kK, 6));
    const std::vector<float> wide = to_f32(narrow);
    for (const int64_t m : {1, 4, 19, 64}) {
      GemmArgs args{.x = wide.data(), .x_stride = kK, .m = m, .bias = bias.data()};
      const std::vector<float> want = expected(weight, act, args);
      EXPECT_EQ(bits_of(product(*gemm, args, kN)), bits_of(want)) << scheme.name << m;
      args.x = ConstActivations(narrow.data(), DType::kBF16);
      EXPECT_EQ(bits_of(product(*gemm, args, kN)), bits_of(want)) << scheme.name << m;
      std::vector<float> sums(static_cast<size_t>(m * kN), 1.5F);
      args.y = sums.data();
      args.y_stride = kN;
      args.output = GemmOutput::kAdd;
      gemm->run(args);
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(sums[i], 1.5F + want[i]) << scheme.name << i;
      }
    }
  }
}

TEST_P(BlockActs, RoundWhatNormsAndActivationsGive) {
  constexpr int64_t kN = 20;
  constexpr int64_t kK = 384;
  const std::vector<float> norm = random_floats(kK, 7);
  const std::vector<float> x = rows(kMost * kK, 8);
  const GemmInput inputs[] = {
      {.kind = GemmInput::Kind::kRmsNorm, .norm_weight = norm.data(), .eps = 1e-5F},
      {.kind = GemmInput::Kind::kRelu},
      {.kind = GemmInput::Kind::kRelu, .turn = 128}};
  for (const QuantScheme& scheme : block_schemes()) {
    const QuantTensor weight = random_weight(scheme.weight, {kN, kK}, 9).value();
    const ActSpec act = random_blocks(scheme, kK, 10);
    const auto gemm = backend_->prepare_gemm(weight, act, kMost).value();
    for (const GemmInput& input : inputs) {
      for (const int64_t m : {1, 40}) {
        const std::vector<float> made = input_of(*backend_, x.data(), m, kK, input);
        const GemmArgs given{.x = made.data(), .x_stride = kK, .m = m};
        const GemmArgs fused{.x = x.data(), .x_stride = kK, .m = m, .input = input};
        EXPECT_EQ(bits_of(product(*gemm, fused, kN)), bits_of(expected(weight, act, given)))
            << scheme.name << m;
      }
    }
  }
}

TEST_P(BlockActs, OfZerosAreZerosAndWhatIsNotFiniteSpoilsItsRow) {
  constexpr int64_t kN = 19;
  constexpr int64_t kK = 384;
  constexpr int64_t kM = 20;
  for (const QuantScheme& scheme : block_schemes()) {
    const QuantTensor weight = random_weight(scheme.weight, {kN, kK}, 11).value();
    const ActSpec act = random_blocks(scheme, kK, 12);
    const auto gemm = backend_->prepare_gemm(weight, act, kM).value();
    std::vector<float> x = rows(kM * kK, 13);
    std::fill_n(x.begin() + kK, kK, 0.0F);
    x[2 * kK + 5] = kNan;
    x[3 * kK + kK - 1] = kInfinity;
    x[4 * kK] = -kInfinity;
    for (const int64_t m : {int64_t{5}, kM}) {
      const std::vector<float> y = product(*gemm, {.x = x.data(), .x_stride = kK, .m = m}, kN);
      const std::vector<float> want =
          expected(weight, act, {.x = x.data(), .x_stride = kK, .m = m});
      for (int64_t i = 0; i < m * kN; ++i) {
        const auto at = static_cast<size_t>(i);
        const int64_t row = i / kN;
        EXPECT_EQ(std::isnan(y[at]), row >= 2 && row <= 4) << scheme.name << " row " << row;
        EXPECT_EQ(std::isnan(want[at]), std::isnan(y[at])) << scheme.name << " row " << row;
        if (!std::isnan(y[at])) {
          EXPECT_EQ(y[at], row == 1 ? 0.0F : want[at]) << scheme.name << " row " << row;
        }
      }
    }
  }
}

TEST_P(BlockActs, AreSharedByProductsOfTheSameBlocksAlone) {
  constexpr int64_t kK = 256;
  const QuantScheme scheme = find_scheme("w4ax_b32").value();
  const QuantTensor weight = random_weight(scheme.weight, {16, kK}, 14).value();
  const QuantTensor channel =
      random_weight(find_scheme("w4ax_class").value().weight, {16, kK}, 14).value();
  const ActSpec act = random_blocks(scheme, kK, 15);
  ActSpec clipped = act;
  BlockPrecision other = *act.blocks;
  other.clip = 1.0F;
  clipped.blocks = std::make_shared<const BlockPrecision>(other);
  const auto one = backend_->prepare_gemm(weight, act, 40).value();
  for (const int64_t m : {1, 40}) {
    EXPECT_TRUE(backend_->prepare_gemm(weight, act, 40).value()->reads_rows_of(*one, m));
    EXPECT_FALSE(backend_->prepare_gemm(weight, clipped, 40).value()->reads_rows_of(*one, m));
    EXPECT_FALSE(backend_->prepare_gemm(channel, act, 40).value()->reads_rows_of(*one, m));
  }
}

TEST_P(BlockActs, WeightsAreUnpackedAndReplaced) {
  for (const QuantScheme& scheme : block_schemes()) {
    constexpr int64_t kK = 256;
    const ActSpec act = random_blocks(scheme, kK, 16);
    const QuantTensor weight = random_weight(scheme.weight, {40, kK}, 17).value();
    const QuantTensor rows_of = random_weight(scheme.weight, {9, kK}, 18).value();
    const auto gemm = backend_->prepare_gemm(weight, act, 3).value();
    ASSERT_TRUE(gemm->update(7, rows_of).ok());
    const QuantTensor back = gemm->unpack().value();
    const auto row_bytes = static_cast<size_t>(weight.row_bytes());
    for (int64_t row = 0; row < 40; ++row) {
      const bool replaced = row >= 7 && row < 16;
      const auto at = static_cast<size_t>(row) * row_bytes;
      const auto from = static_cast<size_t>(row - 7) * row_bytes;
      EXPECT_EQ(
          std::memcmp(back.codes.data() + at,
                      replaced ? rows_of.codes.data() + from : weight.codes.data() + at, row_bytes),
          0)
          << scheme.name << row;
    }
  }
}

TEST_P(BlockActs, RefusalsNameTheField) {
  const QuantScheme scheme = find_scheme("w4ax_b64").value();
  const QuantTensor weight = random_weight(scheme.weight, {16, 256}, 19).value();
  const auto message = [&](int block, size_t count) {
    ActSpec act(ActFormat::kIntBlocks);
    act.blocks = std::make_shared<const BlockPrecision>(
        BlockPrecision{.block = block, .bits = std::vector<uint8_t>(count, 4)});
    return std::string(backend_->prepare_gemm(weight, act, 1).status().message());
  };
  EXPECT_THAT(message(32, 8), HasSubstr("field block: 32 beside weights in groups of 64"));
  EXPECT_THAT(message(64, 3), HasSubstr("field bits: has 3 blocks, but 256 input channels"));
  const WeightFormat bytes{WeightCode::kInt8, ScalePer::kChannel};
  EXPECT_THAT(std::string(backend_->check_gemm(bytes, ActFormat::kIntBlocks, 256).message()),
              HasSubstr("activations in blocks of 4 and 8 bits need int4 weights"));
  EXPECT_THAT(std::string(backend_->check_gemm(bytes, ActFormat::kBf16Blocks, 256).message()),
              HasSubstr("activations in blocks of 8 bits and of BF16 need int4 weights"));
}

INSTANTIATE_TEST_SUITE_P(Cpu,
                         BlockActs,
                         testing::ValuesIn(cpu::supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace nibble
