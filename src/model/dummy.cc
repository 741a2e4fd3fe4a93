#include "model/dummy.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/f16.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/safetensors.h"
#include "core/buffer.h"
#include "model/tensor_list.h"
#include "text/byte_tokenizer.h"

namespace nibble {

namespace {

constexpr double kDeviation = 0.02;            // transformers' initializer_range
constexpr int64_t kQuantiles = 65536;          // a random word of 64 bits picks four
constexpr int64_t kBlock = int64_t{8} << 20;   // elements generated at once
constexpr int64_t kChunk = int64_t{64} << 10;  // elements of a thread's turn
constexpr int64_t kMinVocabulary = 256;

/// x with P(X < x) = p for the standard normal distribution, by Newton's method.
double normal_quantile(double p) {
  double x = 0;
  for (int step = 0; step < 100; ++step) {
    const double error = 0.5 * std::erfc(-x / std::sqrt(2.0)) - p;
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
    const double delta = std::clamp(error / density, -0.5, 0.5);
    x -= delta;
    if (std::abs(delta) < 1e-12) {
      break;
    }
  }
  return x;
}

/// The finalizer of splitmix64: a bijection whose outputs for 0, 1, 2... look independent.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t tensor_seed(uint64_t seed, std::string_view name) {
  uint64_t hash = mix(seed + 0x9e3779b97f4a7c15ULL);
  for (const char c : name) {
    hash = mix(hash ^ static_cast<uint8_t>(c));
  }
  return hash;
}

/// Elements of one dtype (T is its storage), drawn or constant.
template <typename T>
class Generator final {
 public:
  explicit Generator(T (*convert)(float)) : one_(convert(1)) {
    for (int64_t i = 0; i < kQuantiles / 2; ++i) {
      const double p = (static_cast<double>(i) + 0.5) / static_cast<double>(kQuantiles);
      const auto value = static_cast<float>(kDeviation * normal_quantile(p));
      values_[static_cast<size_t>(i)] = convert(value);
      values_[static_cast<size_t>(kQuantiles - 1 - i)] = convert(-value);
    }
  }

  void fill_ones(std::span<T> out) const { std::ranges::fill(out, one_); }

  /// Elements [begin, begin + out.size()) of a tensor; begin is a multiple of 4.
  void fill_random(uint64_t seed, int64_t begin, std::span<T> out) const {
    uint64_t counter = static_cast<uint64_t>(begin) / 4;
    for (size_t i = 0; i < out.size(); i += 4, ++counter) {
      uint64_t word = mix(seed + counter * 0x9e3779b97f4a7c15ULL);
      for (size_t j = i; j < std::min(i + 4, out.size()); ++j, word >>= 16) {
        out[j] = values_[word & 0xffff];
      }
    }
  }

 private:
  std::vector<T> values_ = std::vector<T>(kQuantiles);
  T one_;
};

/// Generates tensors block by block and hands them to the writer.
template <typename T>
class WeightWriter final {
 public:
  WeightWriter(const DummyOptions& options, CheckpointWriter& writer, T (*convert)(float))
      : options_(options), writer_(writer), generator_(convert), pool_(options.threads) {}

  Status write(const ModelTensor& tensor, int64_t elements) {
    if (block_.size() == 0) {
      NIBBLE_ASSIGN_OR_RETURN(block_, Buffer::allocate(kBlock * sizeof(T)));
    }
    const uint64_t seed = tensor_seed(options_.seed, tensor.name);
    for (int64_t begin = 0; begin < elements; begin += kBlock) {
      const int64_t count = std::min(kBlock, elements - begin);
      const std::span<T> block = block_.as<T>().first(static_cast<size_t>(count));
      pool_.parallel_for((count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
        const int64_t at = chunk * kChunk;
        const auto part = block.subspan(static_cast<size_t>(at),
                                        static_cast<size_t>(std::min(kChunk, count - at)));
        if (tensor.kind == TensorKind::kNorm) {
          generator_.fill_ones(part);
        } else {
          generator_.fill_random(seed, begin + at, part);
        }
      });
      NIBBLE_RETURN_IF_ERROR(writer_.write_part(tensor.name, std::as_bytes(block)));
    }
    return {};
  }

 private:
  const DummyOptions& options_;
  CheckpointWriter& writer_;
  Generator<T> generator_;
  ThreadPool pool_;
  Buffer block_;
};

int64_t elements_of(const ModelTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) {
    elements *= size;
  }
  return elements;
}

template <typename T>
Status write_tensors(const std::vector<ModelTensor>& tensors,
                     const DummyOptions& options,
                     CheckpointWriter& writer,
                     T (*convert)(float)) {
  WeightWriter<T> weights(options, writer, convert);
  int64_t total = 0;
  for (const ModelTensor& tensor : tensors) {
    total += elements_of(tensor);
  }
  int64_t done = 0;
  for (const ModelTensor& tensor : tensors) {
    const int64_t elements = elements_of(tensor);
    NIBBLE_RETURN_IF_ERROR(weights.write(tensor, elements));
    done += elements;
    if (options.progress) {
      const auto size = static_cast<int64_t>(sizeof(T));
      options.progress(done * size, total * size);
    }
  }
  return writer.finish();
}

Status write_weights(const std::vector<ModelTensor>& tensors,
                     DType dtype,
                     const DummyOptions& options,
                     CheckpointWriter& writer) {
  if (dtype == DType::kF32) {
    return write_tensors<float>(tensors, options, writer, [](float value) { return value; });
  }
  return write_tensors<uint16_t>(tensors, options, writer,
                                 dtype == DType::kBF16 ? f32_to_bf16 : f32_to_f16);
}

Status write_json(const std::string& path, const Json& json) {
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(json.dump_pretty() + "\n"));
  return file.finish();
}

std::string_view torch_name(DType dtype) {
  return dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32";
}

/// config.json as the checkpoint gets it, with what was read from it.
struct DummyConfig {
  Json json;
  ModelConfig model;
};

void keep_layers(Json& json, int64_t layers) {
  json.set("num_hidden_layers", layers);
  if (Json* types = json.as_object().find("layer_types"); types != nullptr && types->is_array()) {
    JsonArray& list = types->as_array();
    list.resize(std::min(list.size(), static_cast<size_t>(layers)));
  }
}

Result<DummyConfig> read_config(const DummyOptions& options) {
  DummyConfig out;
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(options.config));
  NIBBLE_ASSIGN_OR_RETURN(out.model, parse_model_config({.text = text, .path = options.config}));
  NIBBLE_ASSIGN_OR_RETURN(out.json, Json::parse(text));
  if (options.layers > out.model.num_layers) {
    return make_error(StatusCode::kInvalidArgument, "--layers {}: {} has num_hidden_layers {}",
                      options.layers, options.config, out.model.num_layers);
  }
  if (options.layers > 0) {
    keep_layers(out.json, options.layers);
  }
  const DType dtype = options.dtype.value_or(out.model.dtype);
  out.json.as_object().erase("torch_dtype");  // the older name of the same field
  out.json.set("dtype", torch_name(dtype));
  if (out.json.as_object().erase("quantization_config")) {
    NIBBLE_LOG(kInfo, "{}: quantization_config is left out, the weights are {}", options.config,
               dtype_name(dtype));
  }
  const std::string edited = out.json.dump();
  NIBBLE_ASSIGN_OR_RETURN(out.model, parse_model_config({.text = edited, .path = options.config}));
  return out;
}

Status write_tokenizer(const ModelConfig& config, const std::string& folder) {
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

Status write_small_files(const DummyConfig& config, const std::string& folder) {
  NIBBLE_RETURN_IF_ERROR(write_json(folder + "/config.json", config.json));
  Json generation = Json::object({{"do_sample", false}});
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (const Json* ids = config.json.find(key); ids != nullptr && !ids->is_null()) {
      generation.set(key, *ids);
    }
  }
  NIBBLE_RETURN_IF_ERROR(write_json(folder + "/generation_config.json", generation));
  return write_tokenizer(config.model, folder);
}

}  // namespace

Result<DummyReport> make_dummy_checkpoint(const DummyOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(const DummyConfig config, read_config(options));
  const std::vector<ModelTensor> tensors = list_tensors(config.model);
  DummyReport report{.architecture = config.model.architecture,
                     .dtype = config.model.dtype,
                     .layers = config.model.num_layers,
                     .tensors = std::ssize(tensors)};
  std::vector<TensorPlan> plan;
  for (const ModelTensor& tensor : tensors) {
    NIBBLE_RETURN_IF_ERROR(
        tensor_bytes(report.dtype, tensor.shape).status().with_context(tensor.name));
    plan.push_back({tensor.name, report.dtype, tensor.shape, 0});
    report.parameters += elements_of(tensor);
  }
  NIBBLE_ASSIGN_OR_RETURN(OutputFolder folder,
                          OutputFolder::create(options.destination, options.existing));
  NIBBLE_ASSIGN_OR_RETURN(
      CheckpointWriter writer,
      CheckpointWriter::create(folder.path(), std::move(plan), options.shard_bytes));
  NIBBLE_RETURN_IF_ERROR(write_weights(tensors, report.dtype, options, writer));
  NIBBLE_RETURN_IF_ERROR(write_small_files(config, folder.path()));
  NIBBLE_RETURN_IF_ERROR(folder.commit());
  report.bytes = writer.bytes_written();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  report.peak_rss_bytes = peak_rss_bytes();
  return report;
}

}  // namespace nibble
