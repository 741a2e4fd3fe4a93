#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/dtype.h"
#include "core/gemm_input.h"
#include "core/router_form.h"

namespace nibble {

/// kNone: queries and keys are not rotated.
enum class RopeKind : uint8_t { kDefault, kLinear, kDynamicNtk, kLlama3, kYarn, kNone };
/// kLayer takes the mean of a row away first and adds a bias in the end.
enum class NormKind : uint8_t { kRms, kLayer };

struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0;        // yarn
  double beta_slow = 1.0;         // yarn
  double attention_factor = 0.0;  // yarn; 0: derived from factor
  bool truncate = true;           // yarn: the ramp runs between whole pairs
  int64_t original_max_position = 0;
};

/// Mixture of experts.
struct MoeConfig {
  int64_t experts = 0;  // routed; 0: none
  int64_t experts_per_token = 0;
  int64_t width = 0;         // of one expert
  int64_t shared_width = 0;  // of the expert that every token takes; 0: none
  bool shared_gate = false;  // which weighs that expert
  bool correction = false;   // a bias that chooses experts and does not weigh them
  bool biases = false;       // of router and experts
  RouterForm router;
  float limit = 0.0F;        // of activation kClampedSwiglu
  std::vector<bool> layers;  // which have experts instead of an MLP
};

/// Latent attention: keys and values of all heads are made from one row per token.
struct LatentConfig {
  int64_t kv_rank = 0;  // of that row, without its rotated part; 0: attention is not of this kind
  int64_t q_rank = 0;   // 0: queries are made at once
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
  bool interleaved = true;    // numbers 2i and 2i + 1 are rotated together, not i and i + half
  double score_factor = 1.0;  // multiplies all scores: YaRN's mscale_all_dim, squared

  /// Numbers of a head of q, and of a token's row in the cache.
  [[nodiscard]] constexpr int64_t query_dim() const { return nope_dim + rope_dim; }
  [[nodiscard]] constexpr int64_t row_dim() const { return kv_rank + rope_dim; }
};

struct Family;

/// Facts from config.json and generation_config.json, checked; no behaviour.
struct ModelConfig {
  const Family* family = nullptr;
  std::string architecture;   // "LlamaForCausalLM"
  DType dtype = DType::kF32;  // kF32, kF16 or kBF16; BF16 models compute linear
                              // layers from BF16 inputs, hand BF16 from part to
                              // part of a layer and give BF16 logits
  NormKind norm = NormKind::kRms;
  // Of an MLP: down(activation(up(x))), with a gate where its rows have one.
  GemmInput::Kind activation = GemmInput::Kind::kSiluMul;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position = 0;  // of a context, in tokens; positions_name() says what it is
  double norm_eps = 1e-6;
  RopeConfig rope;
  // Learned positions: a row of a table of max_position + first_position rows is added to each
  // token's, that of position 0 being first_position.
  int64_t first_position = 0;
  int64_t num_further_layers = 0;  // stored after the others, to predict further tokens; not run
  bool learned_positions = false;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm over each head of q and k before the rotation
  bool sinks = false;    // each head has a logit without a value
  MoeConfig moe;
  LatentConfig latent;
  std::vector<int64_t> sliding_windows;  // per layer; 0: full attention
  int64_t bos_token_id = -1;
  std::vector<int64_t> eos_token_ids;  // generation_config.json first, else config.json
  // Sampling defaults of generation_config.json; negative: not given.
  double default_temperature = -1;
  double default_top_p = -1;
  int64_t default_top_k = -1;
  double default_repetition_penalty = -1;
};

/// What of config.json max_position is, for messages: max_position_embeddings, which the factor of
/// dynamic NTK scaling multiplies.
[[nodiscard]] constexpr std::string_view positions_name(const ModelConfig& config) {
  return config.rope.kind == RopeKind::kDynamicNtk ? "max_position_embeddings times the factor of "
                                                     "rope_type dynamic"
                                                   : "max_position_embeddings";
}

/// Whether a layer has experts instead of an MLP.
[[nodiscard]] inline bool has_experts(const ModelConfig& config, int64_t layer) {
  return static_cast<size_t>(layer) < config.moe.layers.size() &&
         config.moe.layers[static_cast<size_t>(layer)];
}

[[nodiscard]] inline bool has_experts_somewhere(const ModelConfig& config) {
  return std::ranges::find(config.moe.layers, true) != config.moe.layers.end();
}
[[nodiscard]] inline bool has_experts_everywhere(const ModelConfig& config) {
  return std::ranges::count(config.moe.layers, true) == config.num_layers;
}

/// Reads model_dir/config.json (and generation_config.json if present), or what a GGUF file says
/// instead; fields of the model itself under text_config where there is one. kUnsupported names an
/// architecture, rope type or field that this build does not know.
Result<ModelConfig> load_model_config(const std::string& model_dir);

/// The same from the two files' text; `path` and `generation_path` are for messages. An empty
/// `generation_text` stands for a checkpoint without generation_config.json.
struct ModelConfigText {
  std::string_view text;
  std::string_view path = "config.json";
  std::string_view generation_text = {};
  std::string_view generation_path = "generation_config.json";
};
Result<ModelConfig> parse_model_config(const ModelConfigText& files);

}  // namespace nibble
