#include "calibration/split_parts.h"

#include <algorithm>

#include "quantizer/algorithms/block_choice.h"

namespace nibble {

int64_t split_parts(const ModelConfig& config, int64_t block) {
  const int64_t values = config.latent.kv_rank > 0 ? config.latent.value_dim : config.head_dim;
  int64_t parts = equal_parts(config.num_heads * values, block);
  while (config.num_heads % parts != 0) {
    parts /= 2;
  }
  for (const int64_t width : {config.intermediate_size, config.moe.shared_width}) {
    parts = width > 0 ? std::min(parts, equal_parts(width, block)) : parts;
  }
  return parts;
}

}  // namespace nibble
