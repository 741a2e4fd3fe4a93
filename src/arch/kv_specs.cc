#include "arch/kv_specs.h"

#include <algorithm>

namespace nibble {

std::vector<KvSpec> kv_specs(const ModelConfig& config, KvCode code) {
  std::vector<KvSpec> specs(static_cast<size_t>(config.num_layers),
                            KvSpec{.code = code,
                                   .kv_heads = config.num_kv_heads,
                                   .key_dim = config.head_dim,
                                   .value_dim = config.head_dim});
  if (const LatentConfig& latent = config.latent; latent.kv_rank > 0) {
    std::ranges::fill(specs, KvSpec{.code = code,
                                    .kv_heads = 1,
                                    .key_dim = latent.row_dim(),
                                    .value_dim = latent.kv_rank,
                                    .latent = true});
  }
  for (size_t layer = 0; layer < config.sliding_windows.size(); ++layer) {
    const int64_t window = config.sliding_windows[layer];
    specs[layer].window = window < config.max_position ? window : 0;
  }
  return specs;
}

}  // namespace nibble
