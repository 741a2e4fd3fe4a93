#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "arch/config.h"
#include "arch/model_text.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/quant_config.h"
#include "command.h"
#include "flag_checks.h"
#include "model/tensor_check.h"
#include "output.h"
#include "quant/kv_formats.h"

namespace nibble {

void add_inspect_command(CLI::App& app, CommandContext& context);

namespace {

constexpr double kMega = 1e6;

struct Flags {
  std::string path;
  std::vector<int64_t> contexts = {2048, 8192, 32768};
  std::vector<int64_t> concurrencies = {1, 8, 32};
  bool json = false;
};

/// What decides the size of the KV cache; zeros when config.json does not say.
struct CacheFacts {
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t latent_rank = 0;  // of latent attention, with what is rotated beside it; 0: none
  int64_t rope_dim = 0;
  int64_t max_context = 0;
  std::vector<int64_t> windows;  // by layer, 0: none; empty when config.json does not say
};

struct Summary {
  std::string architecture = "unknown";
  std::string scheme;
  int64_t parameters = 0;
  int64_t bytes = 0;
  std::map<std::string, int64_t> bytes_by_kind;
  CacheFacts cache;
};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

std::string_view kind_of(std::string_view name) {
  if (contains(name, "embed") || contains(name, "lm_head")) {
    return "embeddings and head";
  }
  if (contains(name, "norm")) {
    return "norms";
  }
  if (contains(name, "experts")) {
    return "experts";
  }
  if (contains(name, "attn") || contains(name, "attention")) {
    return "attention";
  }
  const bool mlp = contains(name, "mlp") || contains(name, ".fc1.") || contains(name, ".fc2.");
  return mlp ? "mlp" : "other";
}

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

// Weights that a tensor stands for: words hold eight, packed bytes two, companions of codes none.
int64_t parameters_of(const CheckpointReader& reader, const TensorInfo& tensor) {
  for (const std::string_view companion : {"weight_scale", "weight_scale_2", "weight_scale_inv",
                                           "weight_zero_point", "weight_shape", "_proj_scales"}) {
    if (ends_with(tensor.name, companion)) {
      return 0;
    }
  }
  constexpr std::string_view kPacked = "_packed";
  if (ends_with(tensor.name, "_proj_blocks")) {  // of MXFP4, as gpt-oss has them
    return tensor.elements() * 2;
  }
  const int64_t per_element = tensor.dtype == DType::kI32 ? 8 : 2;
  if (!ends_with(tensor.name, kPacked)) {
    const bool words =
        tensor.dtype == DType::kI32 && reader.find(tensor.name + "_scale") != nullptr;
    return tensor.elements() * (words ? per_element : 1);
  }
  const std::string base = tensor.name.substr(0, tensor.name.size() - kPacked.size());
  const TensorInfo* shape = reader.find(base + "_shape");
  const int64_t stored = tensor.elements() * per_element;  // with what fills up the last word
  if (shape == nullptr || shape->dtype != DType::kI64 || shape->elements() != 2) {
    return stored;
  }
  std::array<int64_t, 2> dims{};
  std::memcpy(dims.data(), shape->data.data(), sizeof(dims));
  int64_t product = 0;
  const bool fits = dims[0] >= 0 && dims[1] >= 0 &&
                    !__builtin_mul_overflow(dims[0], dims[1], &product) && product <= stored;
  return fits ? product : stored;
}

std::string describe_scheme(const CheckpointReader& reader, const QuantConfig& config) {
  std::string text;
  for (const QuantGroup& group : config.groups) {
    const std::string_view name = scheme_of(group).name;
    text += text.empty() ? "" : ", ";
    text += name.empty() ? "(a combination without a name)" : name;
  }
  if (!text.empty()) {
    return text;
  }
  std::map<std::string_view, int64_t> bytes;
  for (const TensorInfo* tensor : reader.tensors()) {
    bytes[tensor->type_name()] += static_cast<int64_t>(tensor->data.size());
  }
  const auto largest = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string type(largest == bytes.end() ? "none" : largest->first);
  if (dtype_from_name(type).has_value()) {  // types of GGUF are called as there: "Q4_1"
    std::transform(type.begin(), type.end(), type.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  }
  return type;
}

constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;  // of a width or a context
constexpr int64_t kMostCount = (1 << 16) - 1;          // of layers, heads and elements of a head

Result<int64_t> read_size(const JsonReader& reader,
                          std::string_view key,
                          int64_t fallback,
                          int64_t most) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t value, reader.optional_int(key, fallback));
  if (value < 0 || value > most) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: {} is not between 0 and {}",
                      reader.where(), key, value, most);
  }
  return value;
}

Status read_config(const std::string& path, Summary& summary) {
  if (!has_config(path)) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Json parsed, read_config_json(path));
  if (const Json* names = parsed.find("architectures"); names != nullptr && names->is_array() &&
                                                        !names->as_array().empty() &&
                                                        names->as_array()[0].is_string()) {
    summary.architecture = names->as_array()[0].as_string();
  }
  const Json* nested = parsed.find("text_config");
  const JsonReader reader(nested != nullptr ? *nested : parsed, "config.json");
  CacheFacts& cache = summary.cache;
  NIBBLE_ASSIGN_OR_RETURN(cache.layers, read_size(reader, "num_hidden_layers", 0, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t heads,
                          read_size(reader, "num_attention_heads", 0, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(cache.kv_heads,
                          read_size(reader, "num_key_value_heads", heads, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t hidden, read_size(reader, "hidden_size", 0, kMostSize));
  NIBBLE_ASSIGN_OR_RETURN(
      cache.head_dim, read_size(reader, "head_dim", heads > 0 ? hidden / heads : 0, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(cache.latent_rank, read_size(reader, "kv_lora_rank", 0, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(cache.rope_dim, read_size(reader, "qk_rope_head_dim", 0, kMostCount));
  NIBBLE_ASSIGN_OR_RETURN(cache.max_context,
                          read_size(reader, "max_position_embeddings", 0, kMostSize));
  if (const auto known = load_model_config(path); known.ok()) {
    cache.max_context = known->max_position;  // scaling may reach further
    cache.windows = known->sliding_windows;
  }
  return {};
}

Result<Summary> summarize(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(path));
  NIBBLE_ASSIGN_OR_RETURN(const QuantConfig config, load_quant_config(reader));
  Summary summary;
  NIBBLE_RETURN_IF_ERROR(read_config(path, summary));
  NIBBLE_RETURN_IF_ERROR(check_model_tensors(path));
  summary.scheme = describe_scheme(reader, config);
  summary.bytes = reader.total_bytes();
  for (const TensorInfo* tensor : reader.tensors()) {
    summary.parameters += parameters_of(reader, *tensor);
    summary.bytes_by_kind[std::string(kind_of(tensor->name))] +=
        static_cast<int64_t>(tensor->data.size());
  }
  return summary;
}

/// Bytes of a token in a layer.
int64_t layer_bytes(const CacheFacts& cache, KvCode code) {
  KvSpec layer{.code = code,
               .kv_heads = cache.kv_heads,
               .key_dim = cache.head_dim,
               .value_dim = cache.head_dim};
  if (cache.latent_rank > 0) {
    layer = {.code = code,
             .kv_heads = 1,
             .key_dim = cache.latent_rank + cache.rope_dim,
             .value_dim = cache.latent_rank,
             .latent = true};
  }
  return static_cast<int64_t>(kv_token_bytes(layer));
}

/// Formats that keep the model's keys and values.
std::vector<KvCode> codes_of(const CacheFacts& cache) {
  std::vector<KvCode> codes;
  std::ranges::copy_if(kKvCodes, std::back_inserter(codes), [&](KvCode code) {
    return cache.latent_rank == 0 || kv_format(code).latent.kept;
  });
  return codes;
}

/// Tokens that all layers keep together of a sequence.
int64_t kept_tokens(const CacheFacts& cache, int64_t context) {
  int64_t tokens = 0;
  for (int64_t layer = 0; layer < cache.layers; ++layer) {
    const auto index = static_cast<size_t>(layer);
    const int64_t window = index < cache.windows.size() ? cache.windows[index] : 0;
    tokens += window > 0 ? std::min(window, context) : context;
  }
  return tokens;
}

/// One line of the table of memory.
struct MemoryRow {
  int64_t context = 0;
  int64_t concurrency = 0;
  std::vector<int64_t> kv_bytes;  // of each of codes_of()
};

// Contexts of the table: those asked for, none beyond the model's own.
std::vector<int64_t> contexts_of(const Flags& flags, const Summary& summary) {
  std::vector<int64_t> contexts;
  for (const int64_t context : flags.contexts) {
    const int64_t most = summary.cache.max_context;
    const int64_t fitting = most > 0 ? std::min(context, most) : context;
    if (contexts.empty() || contexts.back() != fitting) {
      contexts.push_back(fitting);
    }
  }
  return contexts;
}

Result<std::vector<MemoryRow>> memory_rows(const Summary& summary, const Flags& flags) {
  std::vector<MemoryRow> rows;
  const std::vector<KvCode> codes = codes_of(summary.cache);
  for (const int64_t context : contexts_of(flags, summary)) {
    for (const int64_t concurrency : flags.concurrencies) {
      MemoryRow row{context, concurrency, {}};
      for (const KvCode code : codes) {
        int64_t& bytes = row.kv_bytes.emplace_back();
        int64_t total = 0;
        if (__builtin_mul_overflow(layer_bytes(summary.cache, code),
                                   kept_tokens(summary.cache, row.context), &bytes) ||
            __builtin_mul_overflow(bytes, concurrency, &bytes) ||
            __builtin_add_overflow(bytes, summary.bytes, &total)) {
          return make_error(StatusCode::kInvalidArgument,
                            "--context {} with --concurrency {} needs more bytes than can be "
                            "counted; give smaller numbers",
                            context, concurrency);
        }
      }
      rows.push_back(row);
    }
  }
  return rows;
}

void print_json(const Summary& summary, const std::vector<MemoryRow>& rows) {
  JsonObject kinds;
  for (const auto& [kind, bytes] : summary.bytes_by_kind) {
    kinds.set(kind, bytes);
  }
  JsonArray memory;
  const std::vector<KvCode> codes = codes_of(summary.cache);
  for (size_t i = 0; i < codes.size(); ++i) {
    for (const MemoryRow& row : rows) {
      memory.push_back(Json::object({{"kv", kv_code_name(codes.at(i))},
                                     {"context", row.context},
                                     {"concurrency", row.concurrency},
                                     {"kv_bytes", row.kv_bytes.at(i)},
                                     {"total_bytes", summary.bytes + row.kv_bytes.at(i)}}));
    }
  }
  print_out(Json::object({{"architecture", summary.architecture},
                          {"scheme", summary.scheme},
                          {"parameters", summary.parameters},
                          {"bytes", summary.bytes},
                          {"bytes_by_kind", std::move(kinds)},
                          {"max_context", summary.cache.max_context},
                          {"memory", std::move(memory)}})
                .dump() +
            "\n");
}

void print_table(const Summary& summary, const std::vector<MemoryRow>& rows) {
  const auto mega = [](int64_t bytes) { return static_cast<double>(bytes) / kMega; };
  const double bits = 8.0 * static_cast<double>(summary.bytes) /
                      static_cast<double>(std::max<int64_t>(summary.parameters, 1));
  print_out(fmt::format(
      "architecture  {}\nscheme        {}\nparameters    {:.3f} million\n"
      "weights       {:.1f} MB, {:.2f} bits per parameter\n",
      summary.architecture, summary.scheme, mega(summary.parameters), mega(summary.bytes), bits));
  for (const auto& [kind, bytes] : summary.bytes_by_kind) {
    print_out(fmt::format("  {:<22}{:>10.1f} MB\n", kind, mega(bytes)));
  }
  if (summary.cache.layers == 0 || layer_bytes(summary.cache, KvCode::kF32) == 0) {
    return;
  }
  std::string text =
      fmt::format("memory for weights and KV cache, MB\n  {:>8}{:>12}", "context", "concurrency");
  for (const KvCode code : codes_of(summary.cache)) {
    text += fmt::format("{:>12}", kv_code_name(code));
  }
  for (const MemoryRow& row : rows) {
    text += fmt::format("\n  {:>8}{:>12}", row.context, row.concurrency);
    for (const int64_t bytes : row.kv_bytes) {
      text += fmt::format("{:>12.1f}", mega(summary.bytes + bytes));
    }
  }
  print_out(text + "\n");
}

Status run(const Flags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const Summary summary, summarize(flags.path));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<MemoryRow> rows, memory_rows(summary, flags));
  if (flags.json) {
    print_json(summary, rows);
  } else {
    print_table(summary, rows);
  }
  return {};
}

}  // namespace

void add_inspect_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("inspect", "Describe a checkpoint and the memory it needs");
  command->add_option("PATH", flags->path, "Model folder or .safetensors file")->required();
  command->add_option("--context", flags->contexts, "Tokens per sequence, comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--concurrency", flags->concurrencies, "Sequences at once, comma-separated")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_flag(
      "--json", flags->json,
      "Print one JSON object: architecture, scheme, parameters, bytes, bytes_by_kind, memory, ...");
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
