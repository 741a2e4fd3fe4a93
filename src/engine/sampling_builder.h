#pragma once

#include <vector>

#include "ops/sampler.h"
#include "ops/sampling.h"

namespace nibble {

/// Collects what a device needs to sample a step's tokens as Sampler would, row after row.
class SamplingBuilder final {
 public:
  void clear();
  /// A row; its mask comes later.
  void add(const SamplerInput& input);
  /// The masks of all rows, one after another; an empty one: any token may come.
  void clear_masks();
  void add_mask(std::span<const uint32_t> mask);
  /// Whether the device takes so many edits, and no row has a list of allowed tokens; if not, the
  /// rows must be sampled on the host.
  [[nodiscard]] bool fits() const { return !limited_ && std::ssize(edits_) <= kMaxLogitEdits; }
  [[nodiscard]] SamplingInput input() const { return {rows_, edits_, mask_of(), masks_}; }

  /// What Sampler::sample() returns for a row.
  static Result<SampledToken> result(const SampledRow& row, int top_logprobs);

 private:
  void merge_edits(size_t first);
  /// None where no row has a mask, so that devices need not look for any.
  [[nodiscard]] std::span<const int32_t> mask_of() const {
    return masks_.empty() ? std::span<const int32_t>() : mask_of_;
  }

  std::vector<RowSampling> rows_;
  std::vector<LogitEdit> edits_;
  bool limited_ = false;          // a row may have only some tokens
  std::vector<int32_t> mask_of_;  // [rows]
  std::vector<uint32_t> masks_;   // one after another
  int32_t mask_count_ = 0;
};

}  // namespace nibble
