#pragma once

#include <array>
#include <cstdint>

#include "layers/scratch.h"
#include "model/model.h"

namespace nibble {

/// Bytes of the memory that a Decoder's steps are computed in. The decoder allocates what this
/// says, and the engine plans by it.
struct DecoderScratch {
  int64_t hidden = 0;                           // [max_batch_tokens, hidden] f32
  int64_t logit_hidden = 0;                     // [max_logit_rows, hidden] f32
  int64_t logits = 0;                           // [max_logit_rows, vocab] f32, or none
  std::array<int64_t, kScratchNames> layers{};  // [max_batch_tokens, width] by ScratchName

  [[nodiscard]] int64_t total() const;
};

[[nodiscard]] DecoderScratch decoder_scratch(const ModelConfig& config,
                                             const ModelOptions& options,
                                             const Backend& backend);

/// The largest step of such a decoder.
[[nodiscard]] StepLimits step_limits(const ModelConfig& config, const ModelOptions& options);

}  // namespace nibble
