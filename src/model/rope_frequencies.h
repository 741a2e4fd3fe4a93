#pragma once

#include <cstdint>
#include <vector>

#include "arch/config.h"
#include "ops/dynamic_rope.h"

namespace nibble {

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [head_dim / 2], radians per position
  float attention_factor = 1.0F;
  DynamicRope dynamic;
};

/// Angles per position of each pair of channels. Of dynamic NTK scaling they are those of sequences
/// up to config.original_max_position tokens, and `dynamic` says what becomes of them in longer
/// ones. Sources: RoFormer (default), kaiokendev's and Llama 3.1's scaling, YaRN (arXiv
/// 2309.00071).
RopeFrequencies compute_rope_frequencies(const RopeConfig& config, int64_t head_dim);

}  // namespace nibble
