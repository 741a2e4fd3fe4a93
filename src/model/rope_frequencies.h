#pragma once

#include <cstdint>

#include "layers/attention.h"
#include "model/config.h"

namespace nibble {

/// Angles per position of each pair of channels, for positions below config.max_position.
/// Dynamic NTK gives the unscaled angles: it only departs from them in sequences longer than
/// max_position, which the model refuses because cached keys would have to be rotated again.
/// Sources: RoFormer (default), kaiokendev's and Llama 3.1's scaling, YaRN (arXiv 2309.00071).
RopeTable compute_rope_table(const RopeConfig& config, int64_t head_dim);

}  // namespace nibble
