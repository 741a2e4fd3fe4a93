#include <array>

#include "arch/families/families.h"

namespace nibble {

namespace {

constexpr double kEpsilon = 1e-5;       // of torch's LayerNorm, which config.json does not name
constexpr int64_t kRowOfPosition0 = 2;  // two rows of the table are for padding
constexpr std::string_view kModel = "model.";  // which some files leave out

/// A field whose other value no block computes.
struct FixedField {
  std::string_view name;
  bool value;  // also where it is absent
  std::string_view why;
};

// OPT-350M has its norms elsewhere; models of before transformers 4.20 lack the last one.
constexpr FixedField kFixed[] = {
    {"do_layer_norm_before", true, "norms stand in front of the parts of a layer"},
    {"_remove_final_layer_norm", false, "a norm follows the last layer"},
    {"layer_norm_elementwise_affine", true, "norms have weights and biases"},
};

Status check_parts(const JsonReader& reader, const ModelConfig& config) {
  for (const FixedField& field : kFixed) {
    NIBBLE_ASSIGN_OR_RETURN(const bool value, reader.optional_bool(field.name, field.value));
    if (value != field.value) {
      return make_error(StatusCode::kUnsupported, "{}: field {}: {} is not supported: {} here",
                        reader.where(), field.name, value, field.why);
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t width,
                          reader.optional_int("word_embed_proj_dim", config.hidden_size));
  if (width != config.hidden_size) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field word_embed_proj_dim: {} is not supported, as in OPT-350M: "
                      "embeddings are as wide as hidden_size, {}, here",
                      reader.where(), width, config.hidden_size);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string activation,
                          reader.optional_string("activation_function", "relu"));
  return activation == "relu"
             ? Status()
             : make_error(StatusCode::kUnsupported,
                          "{}: field activation_function: \"{}\" is not supported, only \"relu\"",
                          reader.where(), activation);
}

// OPT 125M to 66B: LayerNorm, learned positions, an MLP without a gate, biases everywhere, a head
// that is the embedding.
Status read_fields(const Json&, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_RETURN_IF_ERROR(check_parts(reader, config));
  if (config.hidden_size % config.num_heads != 0) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field num_attention_heads: {} does not divide hidden_size {}",
                      reader.where(), config.num_heads, config.hidden_size);
  }
  NIBBLE_ASSIGN_OR_RETURN(const bool biases, reader.optional_bool("enable_bias", true));
  config.qkv_bias = biases;
  config.output_bias = biases;
  config.mlp_bias = biases;
  NIBBLE_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                          reader.optional_bool("tie_word_embeddings", true));
  config.norm = NormKind::kLayer;
  config.norm_eps = kEpsilon;
  config.activation = GemmInput::Kind::kRelu;
  config.rope.kind = RopeKind::kNone;
  config.learned_positions = true;
  config.first_position = kRowOfPosition0;
  return {};
}

constexpr std::array kNames = {
    RoleName{Role::kEmbedding, "model.decoder.embed_tokens"},
    RoleName{Role::kPositions, "model.decoder.embed_positions"},
    RoleName{Role::kFinalNorm, "model.decoder.final_layer_norm"},
    RoleName{Role::kAttentionNorm, "model.decoder.layers.{}.self_attn_layer_norm"},
    RoleName{Role::kQuery, "model.decoder.layers.{}.self_attn.q_proj"},
    RoleName{Role::kKey, "model.decoder.layers.{}.self_attn.k_proj"},
    RoleName{Role::kValue, "model.decoder.layers.{}.self_attn.v_proj"},
    RoleName{Role::kAttentionOutput, "model.decoder.layers.{}.self_attn.out_proj"},
    RoleName{Role::kMlpNorm, "model.decoder.layers.{}.final_layer_norm"},
    RoleName{Role::kUp, "model.decoder.layers.{}.fc1"},
    RoleName{Role::kDown, "model.decoder.layers.{}.fc2"},
};

// Of files that were saved from the decoder alone.
constexpr auto kShortNames = [] {
  auto names = kNames;
  for (RoleName& name : names) {
    name.module.remove_prefix(kModel.size());
  }
  return names;
}();

constexpr Family family_with(std::span<const RoleName> names, const Family* renamed) {
  return {.name = "opt",
          .architecture = "OPTForCausalLM",
          .model_type = "opt",
          .read_fields = read_fields,
          .names = names,
          .renamed = renamed,
          .width_field = "ffn_dim",
          .kv_heads_may_be_absent = true};
}

constexpr Family kShort = family_with(kShortNames, nullptr);

}  // namespace

const Family kOpt = family_with(kNames, &kShort);

}  // namespace nibble
