#include "engine/draft_gain.h"

#include <algorithm>

namespace nibble {
namespace {

constexpr double kNewest = 1.0 / 8;        // weight of the newest of many
constexpr double kKept = 0.9;              // of what was learnt from earlier proposals
constexpr double kWorthIt = 1.03;          // times are never exact
constexpr int64_t kPlainEvery = 64;        // steps: one in so many costs 1 % or so
constexpr int64_t kProbe = 2;              // proposals, after a pause
constexpr double kMostAcceptance = 0.995;  // nothing is certain

}  // namespace

void DraftClock::update(double& mean, int64_t& count, double seconds) {
  ++count;
  mean += (seconds - mean) * std::max(1.0 / static_cast<double>(count), kNewest);
}

DraftClock::Means* DraftClock::of(int64_t sequences) {
  return sequences > kSpeculatedRows ? nullptr : &means_[static_cast<size_t>(sequences)];
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
    const double more = std::max(seconds - means->costs.step, 0.0);
    update(means->costs.row, means->verified_steps, more / static_cast<double>(drafted));
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
  return means != nullptr && (means->plain_steps < 2 || ++means->since_plain > kPlainEvery);
}

DraftCosts DraftClock::costs(int64_t sequences) const {
  return means_[static_cast<size_t>(std::min(sequences, kSpeculatedRows))].costs;
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
  pause_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kLongestPause);
  return std::min(kProbe, most);
}

void DraftGain::learn(int64_t proposed, int64_t accepted) {
  const int64_t tried = std::min(accepted + 1, proposed);
  right_ = right_ * kKept + static_cast<double>(accepted);
  tried_ = tried_ * kKept + static_cast<double>(tried);
}

}  // namespace nibble
