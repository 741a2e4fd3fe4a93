#include <cmath>

#include "arch/families/families.h"

namespace nibble {

namespace {

// Experts are chosen by corrected sigmoids, within the best groups of them.
Status read_router(const JsonReader& reader, RouterForm& router) {
  router.scores = RouterScores::kSigmoid;
  router.epsilon = 1e-20F;
  NIBBLE_ASSIGN_OR_RETURN(const std::string scores,
                          reader.optional_string("scoring_func", "sigmoid"));
  if (scores != "sigmoid") {
    return make_error(StatusCode::kUnsupported,
                      "{}: field scoring_func: \"{}\" is not supported, only \"sigmoid\"",
                      reader.where(), scores);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string method,
                          reader.optional_string("topk_method", "noaux_tc"));
  if (method != "noaux_tc") {
    return make_error(StatusCode::kUnsupported,
                      "{}: field topk_method: \"{}\" is not supported, only \"noaux_tc\"",
                      reader.where(), method);
  }
  NIBBLE_ASSIGN_OR_RETURN(router.renormalise, reader.optional_bool("norm_topk_prob", true));
  constexpr double kLargestFactor = 1e4;  // published models have up to 3
  NIBBLE_ASSIGN_OR_RETURN(const double factor,
                          reader.optional_double("routed_scaling_factor", 1.0));
  if (!(factor > 0.0 && factor <= kLargestFactor)) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field routed_scaling_factor: {} is not above 0 and at most {}; take it "
                      "from the published config.json",
                      reader.where(), factor, kLargestFactor);
  }
  router.factor = static_cast<float>(factor);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t groups, read_count(reader, "n_group", 1));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t kept, read_count(reader, "topk_group", 1));
  router.groups = static_cast<int32_t>(groups);
  router.kept_groups = static_cast<int32_t>(kept);
  return {};
}

// The square of YaRN's factor on all numbers of queries and keys, of which cos and sin do not show
// what both share (mscale / mscale_all_dim). The field was checked with the others of the rotation.
Result<double> read_score_factor(const Json& json,
                                 const JsonReader& reader,
                                 const RopeConfig& rope) {
  if (rope.kind != RopeKind::kYarn || rope.factor <= 1.0) {
    return 1.0;
  }
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (const Json* fields = json.find(key); fields != nullptr && fields->is_object()) {
      const JsonReader nested(*fields, reader.where() + ": field " + key);
      NIBBLE_ASSIGN_OR_RETURN(const double all, nested.optional_double("mscale_all_dim", 0.0));
      const double factor = all == 0.0 ? 1.0 : 0.1 * all * std::log(rope.factor) + 1.0;
      return factor * factor;
    }
  }
  return 1.0;
}

Status read_latent(const Json& json, const JsonReader& reader, ModelConfig& config) {
  LatentConfig& latent = config.latent;
  NIBBLE_ASSIGN_OR_RETURN(latent.q_rank, read_count(reader, "q_lora_rank", 0));
  NIBBLE_ASSIGN_OR_RETURN(latent.kv_rank, read_count(reader, "kv_lora_rank"));
  NIBBLE_ASSIGN_OR_RETURN(latent.nope_dim, read_count(reader, "qk_nope_head_dim"));
  NIBBLE_ASSIGN_OR_RETURN(latent.rope_dim, read_count(reader, "qk_rope_head_dim"));
  NIBBLE_ASSIGN_OR_RETURN(latent.value_dim, read_count(reader, "v_head_dim"));
  NIBBLE_ASSIGN_OR_RETURN(latent.interleaved, reader.optional_bool("rope_interleave", true));
  NIBBLE_ASSIGN_OR_RETURN(latent.score_factor, read_score_factor(json, reader, config.rope));
  const bool even = latent.rope_dim % 2 == 0 && latent.rope_dim > 0;
  if (latent.kv_rank == 0 || latent.nope_dim == 0 || latent.value_dim == 0 || !even) {
    return make_error(StatusCode::kCorrupt,
                      "{}: fields kv_lora_rank {}, qk_nope_head_dim {}, qk_rope_head_dim {} and "
                      "v_head_dim {}: all must be above 0, and the rotated part even",
                      reader.where(), latent.kv_rank, latent.nope_dim, latent.rope_dim,
                      latent.value_dim);
  }
  if (latent.value_dim > latent.kv_rank) {
    return make_error(
        StatusCode::kCorrupt,
        "{}: field v_head_dim: {} is above kv_lora_rank {}, the numbers that a head's "
        "values are made of; take both from the published config.json",
        reader.where(), latent.value_dim, latent.kv_rank);
  }
  NIBBLE_ASSIGN_OR_RETURN(const bool bias, reader.optional_bool("attention_bias", false));
  if (bias) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field attention_bias: biases of latent attention are not known to this "
                      "build",
                      reader.where());
  }
  return {};
}

// DeepSeek V3 and R1, and what is built like them: latent attention, some dense layers first, then
// experts with scores corrected by a bias.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_RETURN_IF_ERROR(read_latent(json, reader, config));
  MoeConfig& moe = config.moe;
  NIBBLE_ASSIGN_OR_RETURN(moe.experts, read_count(reader, "n_routed_experts"));
  NIBBLE_ASSIGN_OR_RETURN(moe.experts_per_token, read_count(reader, "num_experts_per_tok", 8));
  NIBBLE_ASSIGN_OR_RETURN(moe.width, read_count(reader, "moe_intermediate_size"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t shared, read_count(reader, "n_shared_experts", 0));
  moe.shared_width = shared * moe.width;
  moe.correction = true;
  NIBBLE_RETURN_IF_ERROR(read_router(reader, moe.router));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t dense, read_count(reader, "first_k_dense_replace", 0));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t every, read_count(reader, "moe_layer_freq", 1));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    moe.layers.push_back(layer >= dense && (every < 2 || layer % every == 0));
  }
  return {};
}

}  // namespace

const Family kDeepseekV3 = {.name = "deepseek_v3",
                            .architecture = "DeepseekV3ForCausalLM",
                            .model_type = "deepseek_v3",
                            .read_fields = read_fields,
                            .kv_heads_may_be_absent = true,
                            .fused = FusedExperts{},
                            .worth = WorthQuantizing::kRoutedExpertsUnlessFp8};

// Kimi K2 was published in FP8, but is quantized by its experts alone, as its makers do.
const Family kKimiK2 = {.name = "kimi_k2",
                        .architecture = "DeepseekV3ForCausalLM",
                        .model_type = "kimi_k2",
                        .read_fields = read_fields,
                        .kv_heads_may_be_absent = true,
                        .worth = WorthQuantizing::kRoutedExperts};

namespace {
constexpr std::string_view kVision[] = {"vision_tower.", "mm_projector."};
}  // namespace

// The language model of Kimi K2.5, under text_config; what reads images is left out.
const Family kKimiK25 = {.name = "kimi_k25",
                         .architecture = "KimiK25ForConditionalGeneration",
                         .model_type = "kimi_k25",
                         .read_fields = read_fields,
                         .prefix = "language_model.",
                         .others = kVision,
                         .kv_heads_may_be_absent = true,
                         .worth = WorthQuantizing::kRoutedExperts};

}  // namespace nibble
