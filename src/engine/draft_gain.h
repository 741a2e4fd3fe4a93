#pragma once

#include <array>
#include <cstdint>

#include "engine/speculation.h"

namespace nibble {

/// Seconds that the parts of a step take with proposals.
struct DraftCosts {
  double step = 0;  // without proposals
  double row = 0;   // more for each proposal that it verifies
  double pass = 0;  // of the draft model, for one token of every sequence; 0 without one
};

/// Measures them, for each number of sequences that decode together: means in which the last eight
/// or so count most. What takes far longer than they say moves them little: a step may have made
/// something that is kept, or the machine have done something else.
class DraftClock final {
 public:
  /// A step of so many sequences that verified so many proposals.
  void note_step(int64_t sequences, int64_t drafted, double seconds);
  /// So many passes of the draft model.
  void note_passes(int64_t sequences, int64_t passes, double seconds);
  /// Whether the next step is to be one without proposals, whose time is not known or long ago.
  /// Counts the steps by its calls.
  [[nodiscard]] bool wants_plain_step(int64_t sequences);
  [[nodiscard]] DraftCosts costs(int64_t sequences) const;

 private:
  struct Means {
    DraftCosts costs;
    int64_t plain_steps = 0, verified_steps = 0, passes = 0;  // that were measured
    int64_t since_plain = 0;
  };

  static void update(double& mean, int64_t& count, double seconds);
  [[nodiscard]] Means* of(int64_t sequences);

  std::array<Means, kMostSpeculatedRows + 1> means_;
};

/// How many tokens are proposed for one sequence, learnt from what became of those
/// before: as many as give most tokens per second, seldom any where none do, and the more seldom,
/// the more sequences there are.
class DraftGain final {
 public:
  /// Tokens to propose now, at most `most`, where so many sequences decode together; counts the
  /// tokens of the sequence by its calls.
  [[nodiscard]] int64_t next(const DraftCosts& costs, int64_t sequences, int64_t most);
  void learn(int64_t proposed, int64_t accepted);
  /// The part of proposals that are right where those in front of them are.
  [[nodiscard]] double acceptance() const { return right_ / tried_; }

 private:
  static constexpr int64_t kFirstPause = 4;
  static constexpr int64_t kLongestPause = 128;

  // What is not known counts as a few proposals of a usual model.
  double right_ = 3, tried_ = 4;
  int64_t pause_ = 0;  // tokens left without a proposal
  int64_t next_pause_ = kFirstPause;
};

/// The number of proposals, at most `most`, with which most tokens come in a second: sequences *
/// (1 + a + a^2 + ... + a^n) of them in step + n * (sequences * row + pass); 0 where that is not
/// clearly more than without.
[[nodiscard]] int64_t best_draft(const DraftCosts& costs,
                                 double acceptance,
                                 int64_t sequences,
                                 int64_t most);

}  // namespace nibble
