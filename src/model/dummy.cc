#include "model/dummy.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/safetensors.h"
#include "model/dtype_field.h"
#include "model/dummy_tensors.h"
#include "model/tensor_list.h"
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
  std::string architecture;
  DType dtype = DType::kBF16;
  int64_t layers = 0;
  int64_t vocab_size = 0;
  int64_t bos_token_id = -1;
  std::vector<int64_t> eos_token_ids;
  std::vector<DummyTensor> tensors;
};

void keep_layers(Json& json, int64_t layers) {
  json.set("num_hidden_layers", layers);
  if (Json* types = json.as_object().find("layer_types"); types != nullptr && types->is_array()) {
    JsonArray& list = types->as_array();
    list.resize(std::min(list.size(), static_cast<size_t>(layers)));
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
  if (json.as_object().erase("quantization_config")) {
    NIBBLE_LOG(kInfo, "{}: quantization_config is left out, the weights are {}", options.config,
               dtype_name(dtype));
  }
}

// A model that this build runs, unquantized.
Result<DummyConfig> read_dense(const std::string& text, const DummyOptions& options) {
  DummyConfig out;
  NIBBLE_ASSIGN_OR_RETURN(ModelConfig model,
                          parse_model_config({.text = text, .path = options.config}));
  NIBBLE_ASSIGN_OR_RETURN(out.json, Json::parse(text));
  NIBBLE_RETURN_IF_ERROR(check_layers(options, model.num_layers));
  if (options.layers > 0) {
    keep_layers(out.json, options.layers);
  }
  out.dtype = options.dtype.value_or(model.dtype);
  set_dtype(out.json, out.dtype);
  drop_quantization(out.json, out.dtype, options);
  const std::string edited = out.json.dump();
  NIBBLE_ASSIGN_OR_RETURN(model, parse_model_config({.text = edited, .path = options.config}));
  out.architecture = model.architecture;
  out.layers = model.num_layers;
  out.vocab_size = model.vocab_size;
  out.bos_token_id = model.bos_token_id;
  out.eos_token_ids = model.eos_token_ids;
  for (const ModelTensor& tensor : list_tensors(model)) {
    const bool norm = tensor.kind == TensorKind::kNorm;
    out.tensors.push_back({tensor.name, out.dtype, tensor.shape,
                           norm ? DummyContent::kOnes : DummyContent::kGaussian});
  }
  return out;
}

Result<std::vector<int64_t>> token_ids(const Json& json) {
  std::vector<int64_t> ids;
  const Json* value = json.find("eos_token_id");
  if (value != nullptr && value->is_int()) {
    ids.push_back(value->as_int());
  } else if (value != nullptr && value->is_array()) {
    for (const Json& id : value->as_array()) {
      if (!id.is_int()) {
        return make_error(StatusCode::kCorrupt, "field eos_token_id holds no integer");
      }
      ids.push_back(id.as_int());
    }
  }
  return ids;
}

// A mixture of experts, stored as its config says unless a type is asked for.
Result<DummyConfig> read_moe(Json json, const std::string& name, const DummyOptions& options) {
  DummyConfig out;
  out.architecture = name;
  Json* nested = json.as_object().find("text_config");
  Json& text = nested != nullptr && nested->is_object() ? *nested : json;
  const JsonReader reader(text, options.config);
  NIBBLE_ASSIGN_OR_RETURN(out.layers, reader.required_int("num_hidden_layers"));
  NIBBLE_RETURN_IF_ERROR(check_layers(options, out.layers));
  if (options.layers > 0) {
    out.layers = options.layers;
    keep_layers(text, options.layers);
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto stored, read_dtype_field(text, reader));
  out.dtype = options.dtype.value_or(stored.value_or(DType::kBF16));
  if (options.dtype) {
    set_dtype(text, out.dtype);
    drop_quantization(text, out.dtype, options);
    drop_quantization(json, out.dtype, options);
  }
  NIBBLE_ASSIGN_OR_RETURN(out.vocab_size, reader.required_int("vocab_size"));
  NIBBLE_ASSIGN_OR_RETURN(out.bos_token_id, reader.optional_int("bos_token_id", -1));
  NIBBLE_ASSIGN_OR_RETURN(out.eos_token_ids, token_ids(text));
  NIBBLE_ASSIGN_OR_RETURN(
      out.tensors,
      list_moe_tensors(text, {.architecture = name, .where = options.config, .dtype = out.dtype}));
  out.json = std::move(json);
  return out;
}

Result<DummyConfig> read_config(const DummyOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(options.config));
  auto json = Json::parse(text);
  const Json* names = json.ok() ? json->find("architectures") : nullptr;
  if (names != nullptr && names->is_array() && names->as_array().size() == 1 &&
      names->as_array()[0].is_string()) {
    const std::string name = names->as_array()[0].as_string();
    if (is_moe_architecture(name)) {
      return read_moe(std::move(*json), name, options);
    }
  }
  return read_dense(text, options);
}

Status write_tokenizer(const DummyConfig& config, const std::string& folder) {
  ByteTokenizerTokens tokens;
  if (config.bos_token_id >= 0 && config.bos_token_id < config.vocab_size) {
    tokens.bos = static_cast<int32_t>(config.bos_token_id);
  }
  for (const int64_t id : config.eos_token_ids) {
    const bool known = std::ranges::find(tokens.eos, id) != tokens.eos.end() || tokens.bos == id;
    if (!known) {
      tokens.eos.push_back(static_cast<int32_t>(id));
    }
  }
  const int64_t least = kMinVocabulary + (tokens.bos ? 1 : 0) + std::ssize(tokens.eos);
  if (config.vocab_size < least) {
    NIBBLE_LOG(kWarning,
               "vocab_size {} holds no byte-level tokenizer, which has {} tokens: none is written",
               config.vocab_size, least);
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
  switch (tensor.content) {
    case DummyContent::kInt4Codes:
      return elements * 8;
    case DummyContent::kE2M1Codes:
      return elements * 2;
    case DummyContent::kOnes:
    case DummyContent::kGaussian:
    case DummyContent::kE4M3Codes:
      return elements;
    default:
      return 0;  // scales and shapes
  }
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
  DummyReport report{.architecture = config.architecture,
                     .dtype = config.dtype,
                     .layers = config.layers,
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
