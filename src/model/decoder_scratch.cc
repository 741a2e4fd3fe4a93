#include "model/decoder_scratch.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "arch/kv_specs.h"
#include "kvcache/kv_cache_shape.h"
#include "layers/attention.h"
#include "layers/latent_attention.h"
#include "layers/mlp.h"
#include "layers/moe.h"

namespace nibble {

int64_t DecoderScratch::total() const {
  return std::accumulate(layers.begin(), layers.end(), hidden + logit_hidden + logits);
}

DecoderScratch decoder_scratch(const ModelConfig& config,
                               const ModelOptions& options,
                               const Backend& backend) {
  constexpr auto kF32Bytes = static_cast<int64_t>(sizeof(float));
  DecoderScratch scratch;
  scratch.hidden = options.max_batch_tokens * config.hidden_size * kF32Bytes;
  scratch.logit_hidden = options.max_logit_rows * config.hidden_size * kF32Bytes;
  if (!backend.host_memory()) {  // else the logits go where the caller wants them
    scratch.logits = options.max_logit_rows * config.vocab_size * kF32Bytes;
  }
  const int64_t bits = dtype_bits(backend.activation_type(config.dtype));
  const auto add = [&](const auto& needs) {
    for (const ScratchNeed& need : needs) {
      int64_t& bytes = scratch.layers.at(static_cast<size_t>(need.name));
      bytes = std::max(bytes, options.max_batch_tokens * need.width * bits / 8);
    }
  };
  if (config.latent.kv_rank > 0) {
    add(LatentAttention::scratch(config));
  } else {
    add(Attention::scratch(config));
  }
  if (!has_experts_everywhere(config)) {
    add(Mlp::scratch(config));
  }
  if (has_experts_somewhere(config)) {
    add(Moe::scratch(config));
  }
  return scratch;
}

StepLimits step_limits(const ModelConfig& config, const ModelOptions& options) {
  const bool scaled = config.rope.kind == RopeKind::kDynamicNtk;
  return {.rows = options.max_batch_tokens,
          .sequences = options.max_sequences > 0 ? options.max_sequences : options.max_logit_rows,
          .logit_rows = options.max_logit_rows,
          .positions = config.max_position,
          .pools = std::ssize(kv_pools(kv_specs(config, options.kv_code))),
          .input_width = config.hidden_size + config.intermediate_size,
          .top_k = has_experts_somewhere(config) ? config.moe.experts_per_token : 0,
          .hidden = config.hidden_size,
          .expert_width = config.moe.width,
          .shared_width = config.moe.shared_width,
          .scaled_pairs = scaled ? config.head_dim / 2 : 0,
          .latent_heads = config.latent.kv_rank > 0 ? config.num_heads : 0,
          .latent_row = config.latent.kv_rank > 0 ? config.latent.row_dim() : 0,
          .latent_key = config.latent.kv_rank > 0 ? config.latent.nope_dim : 0,
          .latent_value = config.latent.kv_rank > 0 ? config.latent.value_dim : 0};
}

}  // namespace nibble
