#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace nibble {

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [head_dim / 2], radians per position
  float attention_factor = 1.0F;
};

/// Angles per position of each pair of channels, for positions below config.max_position.
/// Dynamic NTK gives the unscaled angles: it only departs from them in sequences longer than
/// max_position, which the model refuses because cached keys would have to be rotated again.
/// Sources: RoFormer (default), kaiokendev's and Llama 3.1's scaling, YaRN (arXiv 2309.00071).
RopeFrequencies compute_rope_frequencies(const RopeConfig& config, int64_t head_dim);

}  // namespace nibble
