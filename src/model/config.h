#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/dtype.h"

namespace nibble {

enum class RopeKind : uint8_t { kDefault, kLinear, kDynamicNtk, kLlama3, kYarn };

struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0;        // yarn
  double beta_slow = 1.0;         // yarn
  double attention_factor = 0.0;  // yarn; 0: derived from factor
  int64_t original_max_position = 0;
};

/// Facts from config.json and generation_config.json, checked; no behaviour.
struct ModelConfig {
  std::string architecture;   // "LlamaForCausalLM"
  DType dtype = DType::kF32;  // kF32, kF16 or kBF16; BF16 models compute linear
                              // layers from BF16 inputs, hand BF16 from part to
                              // part of a layer and give BF16 logits
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position = 0;  // of a context, in tokens; positions_name() says what it is
  double rms_norm_eps = 1e-6;
  RopeConfig rope;
  bool tie_word_embeddings = false;
  int64_t num_further_layers = 0;  // stored after the others, to predict further tokens; not run
  bool qkv_bias = false;           // Qwen2, or attention_bias
  bool output_bias = false;        // o_proj, with attention_bias of Llama
  bool mlp_bias = false;
  bool qk_norm = false;                  // Qwen3: RMSNorm over each head of q and k before RoPE
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

/// Reads model_dir/config.json (and generation_config.json if present). kUnsupported names an
/// architecture, rope type or field that this build cannot honour.
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
