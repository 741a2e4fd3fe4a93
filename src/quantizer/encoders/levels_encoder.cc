#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "quant/codec.h"
#include "quant/levels.h"
#include "quantizer/encoders/int_scales.h"
#include "quantizer/encoders/zero_point_encoder.h"

namespace nibble {
namespace {

constexpr CodeRange kRange = code_range(WeightCode::kInt4);
constexpr float kSteps = kRange.high - kRange.low;
constexpr int64_t kLanes = 16;  // sums that the compiler takes side by side, in one order
// Scales of rows have four bits, so that times a step of four they are BF16: those of eight to
// sixteen steps in the largest group are tried, as many as an octave has, and one.
constexpr int kCandidates = 9;
constexpr uint32_t kCandidateUnit = 1U << 20;  // of a float's bits: a unit of four

/// The least number of four bits that is not below `value`, a normal number.
float four_bits_above(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value) + kCandidateUnit - 1;
  return std::bit_cast<float>(bits & ~(kCandidateUnit - 1));
}

/// The largest one whose outermost weight is finite.
float most_channel() {
  const float most = std::numeric_limits<float>::max() / kMostLevel;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(most) & ~(kCandidateUnit - 1));
}

float next_candidate(float value) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) + kCandidateUnit);
}

/// What weights of a group become: step * channel is their scale.
struct Level {
  int step = 1;
  int zero = 0;
  double error = 0;  // squared, in steps of the channel
};

/// One group of a row.
struct Group {
  const float* x = nullptr;
  const float* importance = nullptr;  // or null
  int64_t width = 0;                  // a multiple of kLanes
  float scale = 0;                    // that it would have alone
  float middle = 0;                   // of its range
};

/// The zero point by which codes of this scale lie around the range's middle.
int zero_of(const Group& group, float scale) {
  const float exact = (kRange.high + kRange.low) / 2 - group.middle / scale;
  return static_cast<int>(round_half_even(std::clamp(exact, kRange.low, kRange.high)));
}

/// What rounding to `level` loses, in steps of the channel.
double error_of(const Group& group, const Level& level, float channel) {
  const float scale = static_cast<float>(level.step) * channel;
  const float inverse = 1.0F / scale;
  const auto zero = static_cast<float>(level.zero);
  float sums[kLanes] = {};
  for (int64_t i = 0; i < group.width; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float shifted = group.x[i + lane] * inverse + zero;
      const float above = shifted > kRange.low ? shifted : kRange.low;
      const float error = shifted - round_half_even(above < kRange.high ? above : kRange.high);
      const float counts = group.importance == nullptr ? 1.0F : group.importance[i + lane];
      sums[lane] += error * error * counts;
    }
  }
  double sum = 0;
  for (const float lane : sums) {
    sum += lane;
  }
  return sum * level.step * level.step;
}

/// The better of the steps below and above what the group would have alone, as far as all codes of
/// theirs stay within kMostLevel.
Level best_level(const Group& group, float channel) {
  const int below = static_cast<int>(std::min(group.scale / channel, float{kMostLevel}));
  Level best;
  for (int step = below; step <= below + 1; ++step) {
    Level level{.step = std::clamp(step, 1, most_step(0))};
    const auto place = [&] {
      level.zero = zero_of(group, static_cast<float>(level.step) * channel);
    };
    place();
    while (level.step > most_step(level.zero)) {
      --level.step;
      place();
    }
    level.error = error_of(group, level, channel);
    if (step == below || level.error < best.error) {
      best = level;
    }
  }
  return best;
}

/// INT4 in groups of two levels: each row is searched for the scale of its own by which its groups'
/// scales, all integers times it, lose least.
class LevelsEncoder final : public ZeroPointEncoder {
 public:
  using ZeroPointEncoder::ZeroPointEncoder;

  [[nodiscard]] bool ties_scales() const override { return true; }

  void choose_scales(const ScaleSearch& search, float* scales, float* zeros) const override {
    const int64_t groups = format_.groups(k_);
    std::vector<Group> row(static_cast<size_t>(groups));
    for (int64_t i = 0; i < search.rows; ++i) {
      read_groups(search, i, row);
      choose_row(row, scales + i * groups, zeros + i * groups);
    }
  }

 private:
  void read_groups(const ScaleSearch& search, int64_t index, std::span<Group> row) const {
    const int64_t width = format_.group_size;
    const int64_t groups = std::ssize(row);
    Range ranges[rows::kMostGroups];
    for (int64_t first = 0; first < groups; first += rows::kMostGroups) {
      const int64_t count = std::min(rows::kMostGroups, groups - first);
      choose_ranges(search, index * groups + first, count, ranges);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t column = (first + i) * width;
        row[static_cast<size_t>(first + i)] = {
            .x = search.x + index * k_ + column,
            .importance = search.importance == nullptr ? nullptr : search.importance + column,
            .width = width,
            .scale = ranges[i].high / kSteps - ranges[i].low / kSteps,
            .middle = ranges[i].high / 2 + ranges[i].low / 2};
      }
    }
  }

  void choose_row(std::span<const Group> row, float* scales, float* zeros) const {
    float largest = 0;
    for (const Group& group : row) {
      largest = std::max(largest, group.scale);
    }
    if (vanishes(largest)) {
      std::fill_n(scales, row.size(), zero_scale(format_.scale_dtype));
      std::fill_n(zeros, row.size(), 0.0F);
      return;
    }
    const float first =
        std::min(four_bits_above(largest / static_cast<float>(most_step(0) + 1)), most_channel());
    std::vector<Level> levels(row.size());
    double least = std::numeric_limits<double>::infinity();
    float channel = first;
    for (int i = 0; i < kCandidates && channel <= most_channel(); ++i) {
      const double unit = channel / first;
      double error = 0;
      for (size_t g = 0; g < row.size(); ++g) {
        levels[g] = best_level(row[g], channel);
        error += levels[g].error * unit * unit;
      }
      if (error < least) {
        least = error;
        for (size_t g = 0; g < row.size(); ++g) {
          scales[g] = static_cast<float>(levels[g].step) * channel;  // exact
          zeros[g] = static_cast<float>(levels[g].zero);
        }
      }
      channel = next_candidate(channel);
    }
  }
};

}  // namespace

EncoderPointer make_levels_encoder(const EncoderOptions& options,
                                   const rows::RowKernels& kernels,
                                   int64_t n,
                                   int64_t k) {
  return std::make_unique<LevelsEncoder>(options, kernels, n, k);
}

}  // namespace nibble
