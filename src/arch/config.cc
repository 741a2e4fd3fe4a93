#include "arch/config.h"

#include <algorithm>
#include <limits>

#include "arch/dtype_field.h"
#include "arch/family.h"
#include "arch/gguf.h"
#include "base/file.h"
#include "base/json.h"
#include "gguf/split.h"

namespace nibble {

namespace {

// Far above any model; they keep products of sizes in int64.
constexpr int64_t kMaxDimension = int64_t{1} << 31;
constexpr int64_t kMaxCount = int64_t{1} << 16;  // of layers, heads and elements of a head
constexpr int64_t kMaxWidth = int64_t{1} << 24;  // of parts of a layer
constexpr int64_t kMostFurtherLayers = 64;       // published models have one

Result<int64_t> read_dimension(const JsonReader& reader, std::string_view key, int64_t limit) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t value, reader.required_int(key));
  if (value < 1 || value >= limit) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is not between 1 and {}",
                      reader.where(), key, value, limit - 1);
  }
  return value;
}

Result<std::string> read_architecture_name(const Json& json, const JsonReader& reader) {
  const Json* names = json.find("architectures");
  if (names == nullptr || !names->is_array() || names->as_array().size() != 1 ||
      !names->as_array().front().is_string()) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field architectures: expected a list with the name of one class, as in "
                      "the model's original config.json",
                      reader.where());
  }
  return names->as_array().front().as_string();
}

Status read_shape(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(config.vocab_size, read_dimension(reader, "vocab_size", kMaxDimension));
  NIBBLE_ASSIGN_OR_RETURN(config.hidden_size, read_dimension(reader, "hidden_size", kMaxDimension));
  NIBBLE_ASSIGN_OR_RETURN(config.intermediate_size,
                          read_dimension(reader, config.family->width_field, kMaxDimension));
  NIBBLE_ASSIGN_OR_RETURN(config.num_layers,
                          read_dimension(reader, "num_hidden_layers", kMaxCount));
  NIBBLE_ASSIGN_OR_RETURN(config.num_heads,
                          read_dimension(reader, "num_attention_heads", kMaxCount));
  NIBBLE_ASSIGN_OR_RETURN(config.max_position,
                          read_dimension(reader, "max_position_embeddings", kMaxDimension));
  const Json* kv_heads = json.find("num_key_value_heads");
  const bool kv_default =
      config.family->kv_heads_may_be_absent && (kv_heads == nullptr || kv_heads->is_null());
  config.num_kv_heads = config.num_heads;
  if (!kv_default) {
    NIBBLE_ASSIGN_OR_RETURN(config.num_kv_heads,
                            read_dimension(reader, "num_key_value_heads", kMaxCount));
  }
  const int64_t derived_head_dim = config.family->default_head_dim != 0
                                       ? config.family->default_head_dim
                                       : config.hidden_size / config.num_heads;
  NIBBLE_ASSIGN_OR_RETURN(config.head_dim, reader.optional_int("head_dim", derived_head_dim));
  if (config.num_heads % config.num_kv_heads != 0) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field num_key_value_heads: {} does not divide num_attention_heads {}",
                      reader.where(), config.num_kv_heads, config.num_heads);
  }
  if (config.head_dim < 2 || config.head_dim % 2 != 0 || config.head_dim >= kMaxCount) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field head_dim: {} must be even, positive and below {}", reader.where(),
                      config.head_dim, kMaxCount);
  }
  return {};
}

Status read_shared_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_RETURN_IF_ERROR(read_shape(json, reader, config));
  NIBBLE_ASSIGN_OR_RETURN(
      const std::string activation,
      reader.optional_string("hidden_act", std::string(config.family->hidden_act)));
  if (activation != config.family->hidden_act) {
    return make_error(StatusCode::kUnsupported,
                      "{}: field hidden_act: \"{}\" is not supported, only \"{}\"", reader.where(),
                      activation, config.family->hidden_act);
  }
  const std::string_view eps_field = config.family->eps_field;
  NIBBLE_ASSIGN_OR_RETURN(config.norm_eps,
                          reader.optional_double(eps_field, config.family->default_eps));
  if (!(config.norm_eps > 0) || config.norm_eps > 1) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is out of range", reader.where(),
                      eps_field, config.norm_eps);
  }
  NIBBLE_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                          reader.optional_bool("tie_word_embeddings", false));
  NIBBLE_ASSIGN_OR_RETURN(config.num_further_layers,
                          read_count(reader, "num_nextn_predict_layers", 0));
  if (config.num_further_layers > kMostFurtherLayers) {
    return make_error(
        StatusCode::kCorrupt,
        "{}: field num_nextn_predict_layers: {} is not between 0 and {}; take it from "
        "the published config.json",
        reader.where(), config.num_further_layers, kMostFurtherLayers);
  }
  NIBBLE_ASSIGN_OR_RETURN(config.rope, read_rope_config(json, reader, config.max_position));
  if (config.rope.kind == RopeKind::kDynamicNtk && config.rope.factor > 1.0) {
    const double scaled = static_cast<double>(config.max_position) * config.rope.factor;
    config.max_position = static_cast<int64_t>(std::min(scaled, double{kMaxDimension - 1}));
  }
  config.sliding_windows.assign(static_cast<size_t>(config.num_layers), 0);
  return {};
}

/// eos_token_id is a number, a list of numbers, or absent.
Status read_token_ids(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(config.bos_token_id,
                          reader.optional_int("bos_token_id", config.bos_token_id));
  const Json* eos = json.find("eos_token_id");
  if (eos == nullptr || eos->is_null()) {
    return {};
  }
  const JsonArray ids = eos->is_array() ? eos->as_array() : JsonArray{*eos};
  config.eos_token_ids.clear();
  for (const Json& id : ids) {
    if (!id.is_int() || id.as_int() < 0 || id.as_int() >= config.vocab_size) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field eos_token_id: expected a token id below vocab_size {}, got {}",
                        reader.where(), config.vocab_size, id.dump());
    }
    config.eos_token_ids.push_back(id.as_int());
  }
  return {};
}

Result<Json> parse_object(std::string_view text, std::string_view path) {
  auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context(path);
  }
  if (!json.value().is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: expected a JSON object", path);
  }
  return json;
}

/// A sampling default; negative if the file has none. Refuses what the sampler would refuse.
Result<double> read_sampling(const JsonReader& reader,
                             std::string_view key,
                             double least,
                             double most) {
  constexpr double kAbsent = -1;
  const double none = std::numeric_limits<double>::infinity();
  NIBBLE_ASSIGN_OR_RETURN(const double value, reader.optional_double(key, none));
  if (value == none) {
    return kAbsent;
  }
  if (!(value >= least && value <= most)) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is not between {} and {}",
                      reader.where(), key, value, least, most);
  }
  return value;
}

Status read_generation_config(std::string_view text, std::string_view path, ModelConfig& config) {
  constexpr double kSmallest = 1e-6;  // where only values above 0 make sense
  NIBBLE_ASSIGN_OR_RETURN(const Json json, parse_object(text, path));
  const JsonReader reader(json, std::string(path));
  NIBBLE_RETURN_IF_ERROR(read_token_ids(json, reader, config));
  NIBBLE_ASSIGN_OR_RETURN(const bool sample, reader.optional_bool("do_sample", true));
  NIBBLE_ASSIGN_OR_RETURN(config.default_repetition_penalty,
                          read_sampling(reader, "repetition_penalty", kSmallest, 100));
  if (!sample) {  // the sampling fields have no effect then
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(config.default_temperature, read_sampling(reader, "temperature", 0, 100));
  NIBBLE_ASSIGN_OR_RETURN(config.default_top_p, read_sampling(reader, "top_p", kSmallest, 1));
  NIBBLE_ASSIGN_OR_RETURN(config.default_top_k, reader.optional_int("top_k", -1));
  if (config.default_top_k < -1) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field top_k: {} is not between 0 and the vocabulary", path,
                      config.default_top_k);
  }
  return {};
}

Result<ModelConfig> load_gguf_config(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet files, gguf::FileSet::open(path));
  NIBBLE_ASSIGN_OR_RETURN(const Json config, gguf_config(files));
  NIBBLE_ASSIGN_OR_RETURN(const Json generation, gguf_generation_config(files.metadata()));
  const std::string text = config.dump(), generation_text = generation.dump();
  return parse_model_config(
      {.text = text, .path = path, .generation_text = generation_text, .generation_path = path});
}

}  // namespace

Result<int64_t> read_count(const JsonReader& reader, std::string_view key) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t value, reader.required_int(key));
  if (value < 0 || value >= kMaxWidth) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is not between 0 and {}",
                      reader.where(), key, value, kMaxWidth - 1);
  }
  return value;
}

Result<int64_t> read_count(const JsonReader& reader, std::string_view key, int64_t fallback) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t value, reader.optional_int(key, fallback));
  return value == fallback ? Result<int64_t>(fallback) : read_count(reader, key);
}

Result<ModelConfig> parse_model_config(const ModelConfigText& files) {
  NIBBLE_ASSIGN_OR_RETURN(const Json top, parse_object(files.text, files.path));
  const JsonReader top_reader(top, std::string(files.path));
  ModelConfig config;
  NIBBLE_ASSIGN_OR_RETURN(config.architecture, read_architecture_name(top, top_reader));
  NIBBLE_ASSIGN_OR_RETURN(const std::string type, top_reader.optional_string("model_type", ""));
  NIBBLE_ASSIGN_OR_RETURN(config.family, find_family(config.architecture, type, files.path));
  const Json* nested = top.find("text_config");
  const Json& json = nested != nullptr && nested->is_object() ? *nested : top;
  const JsonReader reader(json, std::string(files.path));
  NIBBLE_ASSIGN_OR_RETURN(const auto dtype, read_dtype_field(json, reader));
  config.dtype = dtype.value_or(config.family->default_dtype);
  NIBBLE_RETURN_IF_ERROR(read_shared_fields(json, reader, config));
  NIBBLE_RETURN_IF_ERROR(config.family->read_fields(json, reader, config));
  NIBBLE_RETURN_IF_ERROR(check_experts_fields(reader, config));
  NIBBLE_RETURN_IF_ERROR(read_token_ids(json, reader, config));
  if (!files.generation_text.empty()) {
    NIBBLE_RETURN_IF_ERROR(
        read_generation_config(files.generation_text, files.generation_path, config));
  }
  return config;
}

Result<ModelConfig> load_model_config(const std::string& model_dir) {
  if (gguf::is_gguf_path(model_dir)) {
    return load_gguf_config(model_dir);
  }
  const std::string path = model_dir + "/config.json";
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const std::string generation_path = model_dir + "/generation_config.json";
  std::string generation_text;
  if (file_exists(generation_path)) {
    NIBBLE_ASSIGN_OR_RETURN(generation_text, read_file(generation_path));
    if (generation_text.empty()) {
      return make_error(StatusCode::kCorrupt, "{}: the file is empty", generation_path);
    }
  }
  return parse_model_config({.text = text,
                             .path = path,
                             .generation_text = generation_text,
                             .generation_path = generation_path});
}

}  // namespace nibble
