#include "model/block_table.h"

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "base/check.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 7, kWidth = 5;

/// Element i of row r is 10 r + i.
class Ramp final : public SourceMatrix {
 public:
  Ramp() {
    n_ = kRows;
    k_ = kWidth;
  }
  Status decode(int64_t row, int64_t rows, float* out) const override {
    for (int64_t i = 0; i < rows * kWidth; ++i) {
      out[i] = static_cast<float>(10 * (row + i / kWidth) + i % kWidth);
    }
    return {};
  }
  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t /*row*/,
                                                                int64_t /*rows*/) const override {
    return {};
  }
};

/// A step over tokens 6, 0 and 3 at places 4, 0 and 1.
template <typename Body>
void run_step(const Body& body) {
  const auto backend = make_cpu_backend({.threads = 1, .isa = "scalar"}).value();
  const std::vector<int32_t> tokens = {6, 0, 3};
  const int32_t page = 0;
  const std::vector<SequenceSpan> sequences = {
      {.q_begin = 0, .q_len = 1, .kv_len = 5, .pages = &page},
      {.q_begin = 1, .q_len = 2, .kv_len = 2, .pages = &page}};
  backend->run_step({.input = {.tokens = tokens, .sequences = sequences, .logit_rows = {}},
                     .page_size = 16,
                     .program = backend->new_program()},
                    body);
}

TEST(BlockTable, ReadsTheRowsOfTokensAndAddsThoseOfPlaces) {
  const BlockTable table(std::make_unique<Ramp>(), nullptr);
  EXPECT_EQ(table.rows(), kRows);
  EXPECT_EQ(table.width(), kWidth);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out(3 * kWidth + 1, kNan);
  run_step([&](Step& step) {
    table.gather(step, out.data());
    table.add_positions(step, 2, out.data());
  });
  constexpr int64_t kSums[] = {6 + 6, 0 + 2, 3 + 3};
  for (size_t r = 0; r < 3; ++r) {
    for (size_t i = 0; i < kWidth; ++i) {
      EXPECT_EQ(out[r * kWidth + i],
                static_cast<float>(10 * kSums[r] + 2 * static_cast<int64_t>(i)));
    }
  }
  EXPECT_TRUE(std::isnan(out.back()));
  EXPECT_THROW(run_step([&](Step& step) { table.add_positions(step, 3, out.data()); }),
               InternalError);
}

}  // namespace
}  // namespace nibble
