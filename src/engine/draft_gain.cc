#include "engine/draft_gain.h"

#include <algorithm>

namespace nibble {
namespace {

constexpr double kNewest = 1.0 / 8;        // weight of the newest of many
constexpr int64_t kFirst = 2;              // of which the lesser counts
constexpr int64_t kFewest = 3;             // that say something
constexpr double kMostOver = 2.0;          // times what was expected
constexpr double kKept = 0.9;              // of what was learnt from earlier proposals
constexpr double kWorthIt = 1.03;          // times are never exact
constexpr int64_t kPlainEvery = 64;        // steps: one in so many costs 1 % or so
constexpr int64_t kProbe = 2;              // proposals, after a pause
constexpr double kMostAcceptance = 0.995;  // nothing is certain

}  // namespace

void DraftClock::update(double& mean, int64_t& count, double seconds) {
  ++count;
  if (count <= kFirst) {
    mean = count == 1 ? seconds : std::min(mean, seconds);
  } else {
    const double weight = std::max(1.0 / static_cast<double>(count - 1), kNewest);
    mean += (std::min(seconds, kMostOver * mean) - mean) * weight;
  }
}

DraftClock::Means* DraftClock::of(int64_t sequences) {
  return sequences > kMostSpeculatedRows ? nullptr : &means_[static_cast<size_t>(sequences)];
}

void DraftClock::note_step(int64_t sequences, int64_t drafted, double seconds) {
  Means* const means = of(sequences);
  if (means == nullptr) {
    return;
  }
  if (drafted == 0) {
    update(means->costs.step, means->plain_steps, seconds);
    means->since_plain = 0;
  } else {
    const auto rows = static_cast<double>(drafted);
    double& row = means->costs.row;
    const double expected = means->costs.step + rows * row;
    const double counted = std::min(seconds, kMostOver * expected);
    const double more = std::max(counted - means->costs.step, 0.0) / rows;
    row += (more - row) * std::max(1.0 / static_cast<double>(++means->verified_steps), kNewest);
  }
}

void DraftClock::note_passes(int64_t sequences, int64_t passes, double seconds) {
  Means* const means = of(sequences);
  if (means != nullptr && passes > 0) {
    update(means->costs.pass, means->passes, seconds / static_cast<double>(passes));
  }
}

bool DraftClock::wants_plain_step(int64_t sequences) {
  Means* const means = of(sequences);
  return means != nullptr && (means->plain_steps < kFewest || ++means->since_plain > kPlainEvery);
}

DraftCosts DraftClock::costs(int64_t sequences) const {
  return means_[static_cast<size_t>(std::min(sequences, kMostSpeculatedRows))].costs;
}

int64_t best_draft(const DraftCosts& costs, double acceptance, int64_t sequences, int64_t most) {
  const double rate = std::min(acceptance, kMostAcceptance);
  const double each = costs.pass + static_cast<double>(sequences) * costs.row;
  double best = kWorthIt / costs.step;
  int64_t out = 0;
  double tokens = 1;
  double certainty = 1;
  for (int64_t count = 1; count <= most; ++count) {
    certainty *= rate;
    tokens += certainty;
    const double speed = tokens / (costs.step + static_cast<double>(count) * each);
    if (speed > best) {
      best = speed;
      out = count;
    }
  }
  return out;
}

int64_t DraftGain::next(const DraftCosts& costs, int64_t sequences, int64_t most) {
  if (pause_ > 0) {
    --pause_;
    return 0;
  }
  const int64_t count = best_draft(costs, acceptance(), sequences, most);
  if (count > 0) {
    next_pause_ = kFirstPause;
    return count;
  }
  // A step with a proposal that is in vain takes longer for everybody.
  pause_ = next_pause_ * sequences;
  next_pause_ = std::min(2 * next_pause_, kLongestPause);
  return std::min(kProbe, most);
}

void DraftGain::learn(int64_t proposed, int64_t accepted) {
  const int64_t tried = std::min(accepted + 1, proposed);
  right_ = right_ * kKept + static_cast<double>(accepted);
  tried_ = tried_ * kKept + static_cast<double>(tried);
}

}  // namespace nibble
