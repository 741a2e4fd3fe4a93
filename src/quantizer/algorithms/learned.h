#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/math.h"
#include "base/thread_pool.h"
#include "quant/codec.h"
#include "quantizer/algorithms/row_tile.h"

// What roundings that are learned by gradient steps have in common. The loss is a matrix's own:
// the squared error of its outputs, trace(E H E^T), whose gradient is exact but for codes, through
// which it passes as if they were not rounded (straight-through estimator).
namespace nibble {

/// The rows of a tile with the least loss so far.
class BestRows final {
 public:
  void clear() { losses_.clear(); }
  void keep(RowTile& tile);
  /// Puts them back into the tile.
  void restore(RowTile& tile) const;

 private:
  std::vector<double> losses_;  // of each row
  std::vector<float> values_;   // [k, kRows]
  std::vector<float> scales_;   // [groups, kRows]
};

/// What a weight is rounded to, and how its value grows with its scale.
struct StraightThrough {
  float value = 0;
  float slope = 0;
  float inside = 0;  // 1; 0 where the code was clipped
};

/// Rounds w / scale + offset + zero to an integer in the range of codes.
struct IntRange {
  CodeRange codes;
  [[nodiscard]] StraightThrough round(float w, float offset, float scale, float zero) const {
    constexpr float kMagic = 12582912.0F;  // adding it leaves integers, ties to even
    const float exact = w / scale;
    const float shifted = std::min(std::max(exact + offset + zero, codes.low - 1), codes.high + 1);
    const float rounded = (shifted + kMagic) - kMagic;
    const float code = std::min(std::max(rounded, codes.low), codes.high);
    const float inside = code == rounded ? 1.0F : 0.0F;
    const float steps = code - zero;
    return {steps * scale, steps - inside * exact, inside};
  }
};

/// Rounds all rows by a Learner, `steps` times bettered, and keeps the best state of each row:
///   Learner(RowTile&)
///   void begin()           the tile has w, and scales to begin with
///   void round()           fills the tile's values and scales
///   void step(float left)  a step down; left: what of the steps is still to come, from 1 to 0
/// `rounded` has scales. Does not depend on the number of threads.
template <typename Learner>
void learn_rows(const MatrixToRound& matrix,
                const SiteStatistics& site,
                int steps,
                RoundedMatrix& rounded,
                ThreadPool& pool) {
  struct Work {
    Work(const MatrixToRound& matrix, const SiteStatistics& site)
        : tile(matrix, site, {}), learner(tile) {}
    RowTile tile;
    Learner learner;
    BestRows best;
  };
  rounded.values.assign(static_cast<size_t>(matrix.n * matrix.k), 0.0F);
  std::vector<std::unique_ptr<Work>> work(static_cast<size_t>(pool.threads()));
  pool.parallel_for(ceil_div(matrix.n, RowTile::kRows), [&](int64_t piece, int thread) {
    auto& mine = work[static_cast<size_t>(thread)];
    if (mine == nullptr) {
      mine = std::make_unique<Work>(matrix, site);
    }
    mine->tile.load(piece * RowTile::kRows, rounded);
    mine->best.clear();
    mine->learner.begin();
    for (int step = 0;; ++step) {
      mine->learner.round();
      mine->tile.find_gradients();
      mine->best.keep(mine->tile);
      if (step == steps) {
        break;
      }
      mine->learner.step(1 - static_cast<float>(step) / static_cast<float>(steps));
    }
    mine->best.restore(mine->tile);
    mine->tile.store(rounded);
  });
}

/// A scale as it is stored, near one that is.
[[nodiscard]] float as_stored(const WeightFormat& format, float scale);

}  // namespace nibble
