#include "quantizer/algorithms/lwc.h"

#include <cmath>

#include "quantizer/algorithms/learned.h"

namespace nibble {
namespace {

constexpr int64_t kRows = RowTile::kRows;
constexpr float kMostShare = 0.98F;  // of the range that scales to begin with may have
// Adam's, as its paper has them.
constexpr float kFirstDecay = 0.9F;
constexpr float kSecondDecay = 0.999F;

class ClippingLearner final {
 public:
  explicit ClippingLearner(RowTile& tile)
      : tile_(tile),
        range_{code_range(tile.format().code)},
        slopes_(static_cast<size_t>(tile.k() * kRows)),
        logits_(static_cast<size_t>(tile.groups() * kRows)),
        whole_(logits_.size()),
        means_(logits_.size()),
        squares_(logits_.size()),
        sums_(logits_.size()) {}

  void begin() {
    std::fill(means_.begin(), means_.end(), 0.0F);
    std::fill(squares_.begin(), squares_.end(), 0.0F);
    steps_ = 0;
    std::vector<float> largest(logits_.size());
    for (int64_t i = 0; i < tile_.k(); ++i) {
      for (int64_t row = 0; row < kRows; ++row) {
        float& most = largest[static_cast<size_t>(i / tile_.width() * kRows + row)];
        most = std::max(most, std::fabs(tile_.w()[i * kRows + row]));
      }
    }
    for (size_t i = 0; i < logits_.size(); ++i) {
      const float scale = tile_.scales()[i];
      const float least = std::fabs(scale) / kMostShare;
      whole_[i] = std::copysign(std::max(largest[i] / range_.codes.high, least), scale);
      const float share = scale / whole_[i];
      logits_[i] = std::log(share / (1 - share));
    }
    begun_ = false;
  }

  void round() {
    for (size_t i = 0; begun_ && i < logits_.size(); ++i) {
      tile_.scales()[i] = as_stored(tile_.format(), whole_[i] * share(i));
    }
    for (int64_t i = 0; i < tile_.k(); ++i) {
      const int64_t group = i / tile_.width() * kRows;
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t at = i * kRows + row;
        const StraightThrough to =
            range_.round(tile_.w()[at], 0, tile_.scales()[group + row], tile_.zeros()[group + row]);
        tile_.values()[at] = to.value;
        slopes_[static_cast<size_t>(at)] = to.slope;
      }
    }
  }

  void step(float left) {
    begun_ = true;
    ++steps_;
    std::fill(sums_.begin(), sums_.end(), 0.0F);
    for (int64_t i = 0; i < tile_.k(); ++i) {
      const int64_t group = i / tile_.width() * kRows;
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t at = i * kRows + row;
        sums_[static_cast<size_t>(group + row)] +=
            tile_.gradients()[at] * slopes_[static_cast<size_t>(at)];
      }
    }
    const auto count = static_cast<float>(steps_);
    const float first = 1 - std::pow(kFirstDecay, count);
    const float second = 1 - std::pow(kSecondDecay, count);
    for (size_t i = 0; i < logits_.size(); ++i) {
      const float gradient = sums_[i] * whole_[i] * share(i) * (1 - share(i));
      means_[i] += (1 - kFirstDecay) * (gradient - means_[i]);
      squares_[i] += (1 - kSecondDecay) * (gradient * gradient - squares_[i]);
      const float size = std::sqrt(squares_[i] / second);
      logits_[i] += size > 0 ? left * kClippingRate * means_[i] / first / size : 0.0F;
    }
  }

 private:
  [[nodiscard]] float share(size_t i) const { return 1 / (1 + std::exp(-logits_[i])); }

  RowTile& tile_;
  IntRange range_;
  int steps_ = 0;
  bool begun_ = false;
  std::vector<float> slopes_;   // [k, kRows]
  std::vector<float> logits_;   // all others: [groups, kRows]
  std::vector<float> whole_;    // scales without clipping
  std::vector<float> means_;    // of gradients
  std::vector<float> squares_;  // likewise
  std::vector<float> sums_;
};

}  // namespace

void learn_clipping(const MatrixToRound& matrix,
                    const SiteStatistics& site,
                    RoundedMatrix& rounded,
                    ThreadPool& pool) {
  learn_rows<ClippingLearner>(matrix, site, kClippingSteps, rounded, pool);
}

}  // namespace nibble
