// FP8 in blocks of 128x128 from numbers to products: blocks that the matrix ends in, that are zero,
// and that hold numbers near the smallest (experts that training left dead) give no NaN anywhere.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/quant_config_writer.h"
#include "ops/gemm.h"
#include "quant/codec.h"
#include "quantizer/encoder.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRows = 300;     // two blocks and 44 rows
constexpr int64_t kColumns = 328;  // two blocks and 72 columns
constexpr int64_t kSize = 128;
constexpr int64_t kBlocks = 3;  // of rows, and of columns

/// What the numbers of each block are multiplied by.
constexpr float kFactors[kBlocks][kBlocks] = {
    {1.0F, 0.0F, 1e-23F}, {1e-38F, 0.02F, 3e-44F}, {0.0F, 1e30F, 1e-30F}};

float factor_of(int64_t row, int64_t column) { return kFactors[row / kSize][column / kSize]; }

std::vector<float> weights() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(kRows * kColumns);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    values[static_cast<size_t>(i)] = normal(random) * factor_of(i / kColumns, i % kColumns);
  }
  return values;
}

class Fp8Blocks : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / "fp8_blocks";
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Stores the weights as `nibble quantize` does, and reads them again.
  void store(Dialect dialect) {
    const QuantScheme scheme = find_scheme("w8a8_fp8_block").value();
    const auto encoder =
        make_encoder({.scheme = scheme, .dialect = dialect}, kRows, kColumns).value();
    std::vector<TensorPlan> plan;
    std::vector<std::vector<std::byte>> data;
    for (size_t slot = 0; slot < encoder->slots().size(); ++slot) {
      const TensorSlot& tensor = encoder->slots()[slot];
      plan.push_back({"m." + tensor.suffix, tensor.dtype, tensor.shape, 0});
      data.emplace_back(static_cast<size_t>(encoder->place(slot, 0, kRows).bytes));
    }
    for (int64_t row = 0; row < kRows; row += encoder->row_block()) {
      const int64_t rows = std::min(encoder->row_block(), kRows - row);
      std::vector<std::byte*> out;
      for (size_t slot = 0; slot < data.size(); ++slot) {
        out.push_back(data[slot].data() + encoder->place(slot, row, rows).offset);
      }
      RowsError error;
      const float* x = weights_.data() + row * kColumns;
      ASSERT_TRUE(encoder->encode(row, rows, x, {}, out, error).ok());
      ASSERT_TRUE(std::isfinite(error.noise) && std::isfinite(error.scale_high));
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 30).value();
    for (size_t slot = 0; slot < data.size(); ++slot) {
      ASSERT_TRUE(writer.write(plan[slot].name, data[slot]).ok());
    }
    ASSERT_TRUE(writer.finish().ok());
    config_ = read_quant_config(
                  Json::object(
                      {{"quantization_config",
                        stored_config_json({.dialect = dialect, .uses = {{scheme, {}}}}).value()}}),
                  "")
                  .value();
  }

  [[nodiscard]] QuantTensor load() const {
    const CheckpointReader reader = CheckpointReader::open(folder_.string()).value();
    const MappedLinear mapped = map_linear_weights(reader, config_, "m").value();
    EXPECT_EQ(mapped.act.format, ActFormat::kFp8Group);
    return copy_of(mapped.weight).value();
  }

  std::vector<float> weights_ = weights();
  QuantConfig config_;
  fs::path folder_;
};

TEST_F(Fp8Blocks, DecodeToNumbersNearTheOriginalOnes) {
  for (const Dialect dialect : {Dialect::kFp8, Dialect::kCompressedTensors}) {
    SetUp();
    store(dialect);
    const QuantTensor weight = load();
    std::vector<float> row(kColumns);
    for (int64_t i = 0; i < kRows; ++i) {
      decode_row(weight, i, row.data());
      for (int64_t j = 0; j < kColumns; ++j) {
        const float value = row[static_cast<size_t>(j)];
        const float wanted = weights_[static_cast<size_t>(i * kColumns + j)];
        // Half a step of E4M3, or of the smallest numbers of the block; a scale of F32 has no bits
        // left below its smallest normal number.
        const double step =
            std::max({std::abs(static_cast<double>(wanted)) / 16,
                      static_cast<double>(factor_of(i, j)) * 5 / 448 / 1024, 448 * 1.2e-38});
        ASSERT_TRUE(std::isfinite(value)) << i << ", " << j;
        ASSERT_NEAR(value, wanted, step) << i << ", " << j;
      }
    }
  }
}

TEST_F(Fp8Blocks, MultiplyToNumbersOnEveryInstructionSet) {
  store(Dialect::kFp8);
  const QuantTensor weight = load();
  constexpr int64_t kTokens = 5;
  std::vector<float> x(kTokens * kColumns);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  std::ranges::generate(x, [&] { return normal(random); });
  std::fill_n(x.begin(), kColumns, 0.0F);            // a row of zeros
  std::fill_n(x.begin() + kColumns, kSize, 1e-42F);  // and one that begins near zero
  const ActSpec act(ActFormat::kFp8Group);
  std::vector<float> expected(kTokens * kRows);
  reference_gemm(
      weight, act,
      {.x = x.data(), .x_stride = kColumns, .m = kTokens, .y = expected.data(), .y_stride = kRows});
  for (const std::string_view isa : cpu::supported_isas()) {
    SCOPED_TRACE(isa);
    const auto backend =
        make_cpu_backend({.threads = 2, .isa = std::string(isa), .limit = ThreadLimit::kNone})
            .value();
    const QuantView view = view_of(weight);
    const auto gemm = backend->prepare_gemm({&view, 1}, act, kTokens).value();
    std::vector<float> y(kTokens * kRows, std::numeric_limits<float>::quiet_NaN());
    gemm->run(
        {.x = x.data(), .x_stride = kColumns, .m = kTokens, .y = y.data(), .y_stride = kRows});
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<float> w(kColumns);
      decode_row(weight, row, w.data());
      for (int64_t token = 0; token < kTokens; ++token) {
        double magnitude = 0;
        for (int64_t j = 0; j < kColumns; ++j) {
          magnitude += std::abs(static_cast<double>(w[static_cast<size_t>(j)]) *
                                x[static_cast<size_t>(token * kColumns + j)]);
        }
        const auto at = static_cast<size_t>(token * kRows + row);
        ASSERT_TRUE(std::isfinite(y[at])) << token << ", " << row;
        ASSERT_NEAR(y[at], expected[at], 1e-5 * magnitude + 1e-30) << token << ", " << row;
      }
    }
  }
}

}  // namespace
}  // namespace nibble
