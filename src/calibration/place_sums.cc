#include "calibration/place_sums.h"

#include "quantizer/algorithms/activations.h"

namespace nibble {

PlaceSums::PlaceSums(int64_t k, const std::set<ActFormat>& rounded) : rows_(k) {
  for (const ActFormat act : rounded) {
    changes_.emplace(act, Gram(k));
  }
}

void PlaceSums::add(const std::vector<float>& x, ThreadPool& pool) {
  const int64_t k = rows_.k();
  const int64_t count = std::ssize(x) / k;
  rows_.add(x.data(), count, pool);
  for (auto& [act, gram] : changes_) {
    std::vector<float> changes = x;
    pool.parallel_for(count, [&, act = act](int64_t row, int) {
      float* at = changes.data() + row * k;
      round_row(act, at, k);
      for (int64_t i = 0; i < k; ++i) {
        at[i] -= x[static_cast<size_t>(row * k + i)];
      }
    });
    gram.add(changes.data(), count, pool);
  }
}

void PlaceSums::add_sums(const PlaceSums& other, double factor) {
  rows_.add_sums(other.rows_, factor);
  for (auto& [act, gram] : changes_) {
    gram.add_sums(other.changes_.at(act), factor);
  }
}

void PlaceSums::finish() {
  rows_.finish();
  for (auto& [act, gram] : changes_) {
    gram.finish();
  }
}

const Gram* PlaceSums::changes(ActFormat act) const {
  const auto found = changes_.find(act);
  return found == changes_.end() ? nullptr : &found->second;
}

}  // namespace nibble
