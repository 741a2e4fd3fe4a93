#include "bench/moe/steering.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/check.h"
#include "base/f16.h"

namespace nibble {

namespace {

// Logits of chosen experts are between 4 and 5, those of others about normal with a deviation of
// 0.1, whatever a device rounds. The column of a chosen expert is of the size of random ones, so
// that rows rounded to 8 bits keep their precision.
constexpr float kPull = 4.0F;
constexpr float kNoise = 0.1F;

}  // namespace

Result<QuantTensor> steering_router(int64_t experts, int64_t hidden) {
  CHECK_LE(experts, hidden);
  const WeightFormat format{WeightCode::kBf16, ScalePer::kNone};
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor router, QuantTensor::allocate(format, experts, hidden));
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0F, kNoise / std::sqrt(static_cast<float>(hidden)));
  const auto weights = router.codes.as<uint16_t>();
  std::ranges::generate(weights, [&] { return f32_to_bf16(normal(random)); });
  for (int64_t e = 0; e < experts; ++e) {
    weights[static_cast<size_t>(e * hidden + e)] = f32_to_bf16(kPull);
  }
  return router;
}

Result<Buffer> steered_rows(const SteeredRows& rows, uint64_t seed) {
  CHECK_LE(rows.experts, rows.hidden);
  const auto top_k = static_cast<size_t>(rows.top_k);
  const auto hidden = static_cast<size_t>(rows.hidden);
  const size_t count = rows.chosen.size() / top_k;
  NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(count * hidden * sizeof(uint16_t)));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto values = buffer.as<uint16_t>();
  std::ranges::generate(values, [&] { return f32_to_bf16(normal(random)); });
  for (size_t row = 0; row < count; ++row) {
    const auto of_row = values.subspan(row * hidden, hidden);
    std::ranges::fill(of_row.first(static_cast<size_t>(rows.experts)), uint16_t{0});
    for (size_t i = 0; i < top_k; ++i) {  // 1.25 for the best, 1 and a little for the last
      const float pull = 1.0F + 0.25F * static_cast<float>(top_k - i) / static_cast<float>(top_k);
      of_row[static_cast<size_t>(rows.chosen[row * top_k + i])] = f32_to_bf16(pull);
    }
  }
  return buffer;
}

}  // namespace nibble
