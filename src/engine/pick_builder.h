#pragma once

#include <vector>

#include "ops/picks.h"
#include "ops/sampler.h"

namespace nibble {

/// Collects what a device needs to pick a step's tokens as Sampler would, row after row.
class PickBuilder final {
 public:
  void clear();
  void add(const SamplerInput& input);
  /// Whether the device takes so many edits; if not, the rows must be sampled on the host.
  [[nodiscard]] bool fits() const { return std::ssize(edits_) <= kMaxLogitEdits; }
  [[nodiscard]] PickInput input() const { return {rows_, edits_}; }

  /// What Sampler::sample() returns for a row.
  static Result<SampledToken> result(const PickedRow& row, int top_logprobs);

 private:
  void merge_edits(size_t first);

  std::vector<RowSampling> rows_;
  std::vector<LogitEdit> edits_;
};

}  // namespace nibble
