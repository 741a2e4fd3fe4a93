#pragma once

#include <cstdint>
#include <vector>

#include "arch/config.h"
#include "engine/sequence.h"
#include "ops/sampler.h"

namespace nibble {

/// Says what the tokens of sequences are sampled by.
class SamplerInputs final {
 public:
  /// `config` must outlive it.
  explicit SamplerInputs(const ModelConfig& config) : config_(config) {}

  /// For the sequence's next token, or the one `ahead` tokens later. Valid until the next call, and
  /// as long as the sequence is.
  [[nodiscard]] SamplerInput next(const Sequence& sequence, int64_t ahead);

 private:
  const ModelConfig& config_;
  std::vector<int32_t> banned_;  // scratch
};

}  // namespace nibble
