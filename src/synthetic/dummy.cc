#include "synthetic/dummy.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "arch/dtype_field.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/safetensors.h"
#include "synthetic/dummy_tensors.h"
#include "text/byte_tokenizer.h"

namespace nibble {
namespace {

constexpr int64_t kMinVocabulary = 256;

Status write_json(const std::string& path, const Json& json) {
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(json.dump_pretty() + "\n"));
  return file.finish();
}

std::string_view torch_name(DType dtype) {
  return dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32";
}

/// config.json as the checkpoint gets it, and what was read from it.
struct DummyConfig {
  Json json;
  ModelConfig model;
  DType dtype = DType::kBF16;
  std::vector<DummyTensor> tensors;
};

// Where the fields of the language model are.
Json& text_config(Json& json) {
  Json* nested = json.as_object().find("text_config");
  return nested != nullptr && nested->is_object() ? *nested : json;
}

void keep_layers(Json& json, int64_t layers) {
  json.set("num_hidden_layers", layers);
  if (Json* types = json.as_object().find("layer_types"); types != nullptr && types->is_array()) {
    JsonArray& list = types->as_array();
    list.resize(std::min(list.size(), static_cast<size_t>(layers)));
  }
}

/// Fields of widths, and what they are at most in a narrow model. All fit groups of 32, and
/// products of schemes have 64 inputs, the fewest that GPUs take.
void make_narrow(Json& json) {
  static constexpr std::pair<std::string_view, int64_t> kWidths[] = {
      {"hidden_size", 64},
      {"intermediate_size", 64},
      {"moe_intermediate_size", 64},
      {"shared_expert_intermediate_size", 64},
      {"num_attention_heads", 2},
      {"num_key_value_heads", 2},
      {"head_dim", 32},
      {"q_lora_rank", 64},
      {"kv_lora_rank", 32},
      {"qk_nope_head_dim", 16},
      {"qk_rope_head_dim", 8},
      {"v_head_dim", 32}};
  for (const auto& [field, most] : kWidths) {
    const Json* value = json.find(field);
    if (value != nullptr && value->is_int()) {
      json.set(std::string(field), std::min(value->as_int(), most));
    }
  }
}

Status check_layers(const DummyOptions& options, int64_t layers) {
  return options.layers <= layers
             ? Status()
             : make_error(StatusCode::kInvalidArgument, "--layers {}: {} has num_hidden_layers {}",
                          options.layers, options.config, layers);
}

void set_dtype(Json& json, DType dtype) {
  json.as_object().erase("torch_dtype");  // the older name of the same field
  json.set("dtype", torch_name(dtype));
}

void drop_quantization(Json& json, DType dtype, const DummyOptions& options) {
  const bool again = options.scheme || options.others;  // another one is written
  if (json.as_object().erase("quantization_config") && !again) {
    NIBBLE_LOG(kInfo, "{}: quantization_config is left out, the weights are {}", options.config,
               dtype_name(dtype));
  }
}

bool is_coded(const DummyTensor& tensor) {
  return tensor.content != DummyContent::kGaussian && weights_of_element(tensor.content) > 0 &&
         tensor.content != DummyContent::kOnes;
}

/// What is written in rules: nothing, where all is as the config says.
Result<std::optional<QuantScheme>> ruled_scheme(const DummyOptions& options,
                                                const Json& fields,
                                                const ModelConfig& model) {
  if (!options.others) {
    return options.scheme;
  }
  if (model.moe.experts == 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "--attention-scheme {}: {} has no experts; give --scheme alone",
                      options.others->name, options.config);
  }
  if (options.scheme) {
    return options.scheme;
  }
  NIBBLE_ASSIGN_OR_RETURN(
      const QuantScheme experts,
      options.dtype ? find_scheme("bf16") : scheme_of_experts(fields, options.config));
  return std::optional(experts);
}

// Dense models are written unquantized; mixtures of experts as their config says, unless a type or
// a scheme is asked for.
Result<DummyConfig> read_config(const DummyOptions& options) {
  DummyConfig out;
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(options.config));
  NIBBLE_ASSIGN_OR_RETURN(out.model, parse_model_config({.text = text, .path = options.config}));
  NIBBLE_ASSIGN_OR_RETURN(out.json, Json::parse(text));
  NIBBLE_RETURN_IF_ERROR(check_layers(options, out.model.num_layers));
  Json& fields = text_config(out.json);
  if (options.layers > 0) {
    keep_layers(fields, options.layers);
  }
  if (options.widths == DummyWidths::kTiny) {
    make_narrow(fields);
  }
  const bool experts = out.model.moe.experts > 0;
  NIBBLE_ASSIGN_OR_RETURN(const auto stored,
                          read_dtype_field(fields, JsonReader(fields, options.config)));
  out.dtype = options.dtype.value_or(stored.value_or(experts ? DType::kBF16 : DType::kF32));
  NIBBLE_ASSIGN_OR_RETURN(const auto scheme, ruled_scheme(options, fields, out.model));
  if (options.dtype || scheme || !experts) {
    set_dtype(fields, out.dtype);
    drop_quantization(fields, out.dtype, options);
    drop_quantization(out.json, out.dtype, options);
  }
  const std::string edited = out.json.dump();
  NIBBLE_ASSIGN_OR_RETURN(out.model, parse_model_config({.text = edited, .path = options.config}));
  NIBBLE_ASSIGN_OR_RETURN(DummyList list,
                          list_dummy_tensors(out.model, {.config = out.json,
                                                         .fields = fields,
                                                         .where = options.config,
                                                         .dtype = out.dtype,
                                                         .scheme = scheme,
                                                         .others = options.others}));
  out.tensors = std::move(list.tensors);
  if (std::ranges::none_of(out.tensors, is_coded)) {  // dense layers of a model with coded experts
    drop_quantization(fields, out.dtype, options);
  }
  if (!list.quantization_config.is_null()) {  // at the top, as quantize writes it
    out.json.set("quantization_config", std::move(list.quantization_config));
  }
  return out;
}

Status write_tokenizer(const DummyConfig& config, const std::string& folder) {
  ByteTokenizerTokens tokens;
  const ModelConfig& model = config.model;
  if (model.bos_token_id >= 0 && model.bos_token_id < model.vocab_size) {
    tokens.bos = static_cast<int32_t>(model.bos_token_id);
  }
  for (const int64_t id : model.eos_token_ids) {
    const bool known = std::ranges::find(tokens.eos, id) != tokens.eos.end() || tokens.bos == id;
    if (!known) {
      tokens.eos.push_back(static_cast<int32_t>(id));
    }
  }
  const int64_t least = kMinVocabulary + (tokens.bos ? 1 : 0) + std::ssize(tokens.eos);
  if (model.vocab_size < least) {
    NIBBLE_LOG(kWarning,
               "vocab_size {} holds no byte-level tokenizer, which has {} tokens: none is written",
               model.vocab_size, least);
    return {};
  }
  const ByteTokenizerFiles files = make_byte_tokenizer(tokens);
  NIBBLE_RETURN_IF_ERROR(write_json(folder + "/tokenizer.json", files.tokenizer));
  return write_json(folder + "/tokenizer_config.json", files.tokenizer_config);
}

int64_t parameters_of(const DummyTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) {
    elements *= size;
  }
  return elements * weights_of_element(tensor.content);
}

Status write_small_files(const DummyConfig& config, const std::string& folder) {
  NIBBLE_RETURN_IF_ERROR(write_json(folder + "/config.json", config.json));
  Json generation = Json::object({{"do_sample", false}});
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (const Json* ids = config.json.find(key); ids != nullptr && !ids->is_null()) {
      generation.set(key, *ids);
    }
  }
  NIBBLE_RETURN_IF_ERROR(write_json(folder + "/generation_config.json", generation));
  return write_tokenizer(config, folder);
}

}  // namespace

Result<DummyReport> make_dummy_checkpoint(const DummyOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(const DummyConfig config, read_config(options));
  DummyReport report{.architecture = config.model.architecture,
                     .dtype = config.dtype,
                     .layers = config.model.num_layers,
                     .tensors = std::ssize(config.tensors)};
  std::vector<TensorPlan> plan;
  for (const DummyTensor& tensor : config.tensors) {
    NIBBLE_RETURN_IF_ERROR(
        tensor_bytes(tensor.dtype, tensor.shape).status().with_context(tensor.name));
    plan.push_back({tensor.name, tensor.dtype, tensor.shape, 0});
    report.parameters += parameters_of(tensor);
  }
  NIBBLE_ASSIGN_OR_RETURN(OutputFolder folder,
                          OutputFolder::create(options.destination, options.existing));
  NIBBLE_ASSIGN_OR_RETURN(
      CheckpointWriter writer,
      CheckpointWriter::create(folder.path(), std::move(plan), options.shard_bytes));
  NIBBLE_RETURN_IF_ERROR(write_dummy_tensors(
      config.tensors,
      {.seed = options.seed, .threads = options.threads, .progress = options.progress}, writer));
  NIBBLE_RETURN_IF_ERROR(write_small_files(config, folder.path()));
  NIBBLE_RETURN_IF_ERROR(folder.commit());
  report.bytes = writer.bytes_written();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  report.peak_rss_bytes = peak_rss_bytes();
  return report;
}

}  // namespace nibble
