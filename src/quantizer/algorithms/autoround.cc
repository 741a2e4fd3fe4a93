#include "quantizer/algorithms/autoround.h"

#include "quantizer/algorithms/learned.h"

namespace nibble {
namespace {

constexpr int64_t kRows = RowTile::kRows;
constexpr float kMostOffset = 0.5F;
constexpr float kMostChange = 0.5F;  // of a scale's factor

float sign(float x) { return x > 0 ? 1.0F : x < 0 ? -1.0F : 0.0F; }

class OffsetLearner final {
 public:
  explicit OffsetLearner(RowTile& tile)
      : tile_(tile),
        range_{code_range(tile.format().code)},
        offsets_(static_cast<size_t>(tile.k() * kRows)),
        slopes_(offsets_.size()),
        inside_(offsets_.size()) {}

  void begin() {
    first_scales_.assign(tile_.scales(), tile_.scales() + tile_.groups() * kRows);
    factors_.assign(first_scales_.size(), 1.0F);
    std::fill(offsets_.begin(), offsets_.end(), 0.0F);
  }

  void round() {
    for (size_t i = 0; i < factors_.size(); ++i) {
      tile_.scales()[i] = as_stored(tile_.format(), factors_[i] * first_scales_[i]);
    }
    for (int64_t i = 0; i < tile_.k(); ++i) {
      const int64_t group = i / tile_.width() * kRows;
      round_column(i * kRows, tile_.scales() + group, tile_.zeros() + group);
    }
  }

  void step(float left) {
    const float rate = left / static_cast<float>(kOffsetSteps);
    std::vector<float> sums(factors_.size());
    for (int64_t i = 0; i < tile_.k(); ++i) {
      const int64_t group = i / tile_.width() * kRows;
      for (int64_t row = 0; row < kRows; ++row) {
        const auto at = static_cast<size_t>(i * kRows + row);
        const float gradient = tile_.gradients()[at];  // half of what the value's growth gains
        const float scale = tile_.scales()[group + row];
        sums[static_cast<size_t>(group + row)] += gradient * slopes_[at];
        const float moved = offsets_[at] + rate * inside_[at] * sign(gradient * scale);
        offsets_[at] = std::min(std::max(moved, -kMostOffset), kMostOffset);
      }
    }
    for (size_t i = 0; i < factors_.size(); ++i) {
      const float moved = factors_[i] + kFactorRate * rate * sign(sums[i] * first_scales_[i]);
      factors_[i] = std::min(std::max(moved, 1 - kMostChange), 1 + kMostChange);
    }
  }

 private:
  void round_column(int64_t at, const float* scales, const float* zeros) {
    const float* w = tile_.w() + at;
    float* values = tile_.values() + at;
    for (int64_t row = 0; row < kRows; ++row) {
      const auto here = static_cast<size_t>(at + row);
      const StraightThrough to = range_.round(w[row], offsets_[here], scales[row], zeros[row]);
      values[row] = to.value;
      slopes_[here] = to.slope;
      inside_[here] = to.inside;
    }
  }

  RowTile& tile_;
  IntRange range_;
  std::vector<float> offsets_;       // [k, kRows]
  std::vector<float> slopes_;        // [k, kRows]
  std::vector<float> inside_;        // [k, kRows]
  std::vector<float> first_scales_;  // [groups, kRows]
  std::vector<float> factors_;       // [groups, kRows]
};

}  // namespace

void learn_offsets(const MatrixToRound& matrix,
                   const SiteStatistics& site,
                   RoundedMatrix& rounded,
                   ThreadPool& pool) {
  learn_rows<OffsetLearner>(matrix, site, kOffsetSteps, rounded, pool);
}

}  // namespace nibble
