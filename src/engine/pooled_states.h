#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "engine/sequence.h"

namespace nibble {

/// Adds final hidden states [rows, width] to their sum [width], which is empty at first.
/// kCorrupt where one is not finite.
Status add_states(std::span<const float> states, size_t width, std::vector<double>& sum);

/// What a sequence's request wants pooled of its prompt, [hidden_size]; empty where it wants
/// nothing, or not all of the prompt was computed.
[[nodiscard]] std::vector<float> pooled_prompt(const Sequence& sequence);

}  // namespace nibble
