#include "quantizer/model_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <utility>

#include "arch/gguf.h"
#include "arch/model_text.h"
#include "base/file.h"
#include "checkpoint/fmpq_sidecar.h"
#include "checkpoint/kv_sidecar.h"
#include "gguf/split.h"
#include "quantizer/own_head.h"
#include "quantizer/recipe.h"
#include "text/gguf_tokenizer.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kQuantKey = "quantization_config";
constexpr std::array<std::string_view, 7> kWeightSuffixes = {
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".pt", ".gguf"};

// What says how the source was quantized: no longer true of the result.
constexpr std::array<std::string_view, 7> kStaleFiles = {"quantize_config.json",
                                                         "hf_quant_config.json",
                                                         "quantization_report.json",
                                                         "quantization_report.html",
                                                         kRecipeName,
                                                         kKvSidecarName,
                                                         kFmpqSidecarName};

bool is_weight_file(std::string_view name) {
  return std::any_of(kWeightSuffixes.begin(), kWeightSuffixes.end(), [&](std::string_view suffix) {
    return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
  });
}

// Not folders, nor links to nothing. What else is no regular file is refused by whoever opens it.
bool is_copied(const fs::directory_entry& entry) {
  std::error_code error;
  const fs::file_status status = entry.status(error);
  return fs::exists(status) && !fs::is_directory(status);
}

// A file that an interrupted run left is replaced.
Status write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::error_code ignored;
  fs::remove(path, ignored);
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(bytes));
  return file.finish();
}

void remove_nested(Json& value) {
  if (!value.is_object()) {
    return;
  }
  value.as_object().erase(kQuantKey);
  value.as_object().erase(kFmpqConfigField);
  JsonObject copy;
  for (const auto& [key, member] : value.as_object()) {
    Json child = member;
    remove_nested(child);
    copy.append(key, std::move(child));
  }
  value = Json(std::move(copy));
}

int64_t tensor_bytes_of(const QuantizePlan& plan) {
  int64_t total = 0;
  for (const PlannedShard& shard : plan.shards) {
    total += shard.file_bytes - shard.data_begin;
  }
  return total;
}

// Names of the small files of a folder, sorted.
Result<std::vector<std::string>> list_files(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    const bool stale = std::find(kStaleFiles.begin(), kStaleFiles.end(), name) != kStaleFiles.end();
    if (name != "config.json" && name.front() != '.' && !stale && !is_weight_file(name) &&
        is_copied(*it)) {
      names.push_back(std::move(name));
    }
  }
  if (error) {
    return make_error(StatusCode::kIo, "{}: cannot list it: {}", folder, error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Status visit_gguf_files(const std::string& path, const ModelFileVisitor& visit) {
  NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet files, gguf::FileSet::open(path));
  NIBBLE_ASSIGN_OR_RETURN(const Json generation, gguf_generation_config(files.metadata()));
  NIBBLE_ASSIGN_OR_RETURN(const GgufTokenizerFiles text, gguf_tokenizer_files(files.metadata()));
  for (const auto& [name, json] : {std::pair("generation_config.json", &generation),
                                   {"tokenizer.json", &text.tokenizer},
                                   {"tokenizer_config.json", &text.config}}) {
    const std::string written = json->dump_pretty() + "\n";
    NIBBLE_RETURN_IF_ERROR(visit(name, std::as_bytes(std::span(written))));
  }
  return {};
}

}  // namespace

Status visit_model_files(const std::string& model, const ModelFileVisitor& visit) {
  if (gguf::is_gguf_path(model)) {
    return visit_gguf_files(model, visit);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> names, list_files(model));
  for (const std::string& name : names) {
    NIBBLE_ASSIGN_OR_RETURN(const MappedFile file,
                            MappedFile::open(fmt::format("{}/{}", model, name)));
    NIBBLE_RETURN_IF_ERROR(visit(name, file.bytes()));
  }
  return {};
}

Status check_model_files(const std::string& model) {
  return visit_model_files(model,
                           [](const std::string&, std::span<const std::byte>) { return Status(); });
}

Status copy_model_files(const std::string& source, const std::string& destination) {
  return visit_model_files(source, [&](const std::string& name, std::span<const std::byte> bytes) {
    return write_file(fmt::format("{}/{}", destination, name), bytes);
  });
}

Result<Json> read_config(const std::string& folder) {
  NIBBLE_RETURN_IF_ERROR(check_is_model(folder));
  return read_config_json(folder);
}

Status write_config(const std::string& source,
                    const std::string& destination,
                    const QuantizePlan& plan) {
  NIBBLE_ASSIGN_OR_RETURN(Json config, read_config(source));
  remove_nested(config);
  if (plan.own_head) {
    config = with_own_head(std::move(config));
  }
  if (!plan.quantization_config.is_null()) {
    config.set(std::string(kQuantKey), plan.quantization_config);
  }
  const std::string written = config.dump_pretty() + "\n";
  return write_file(destination + "/config.json",
                    std::as_bytes(std::span(written.data(), written.size())));
}

Status write_weight_index(const QuantizePlan& plan, const std::string& folder) {
  if (plan.shards.size() < 2) {
    return {};
  }
  constexpr size_t kPiece = size_t{1} << 20;  // models have 200,000 tensors: no tree of them
  const std::string path = folder + "/model.safetensors.index.json";
  std::error_code ignored;
  fs::remove(path, ignored);
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  std::string text =
      fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{",
                  tensor_bytes_of(plan));
  std::string_view separator = "\n    ";
  for (const PlannedShard& shard : plan.shards) {
    for (const size_t job : shard.jobs) {
      for (const PlannedTensor& output : plan.jobs[job].outputs) {
        text += separator;
        append_json_string(text, output.tensor.name);
        text += ": ";
        append_json_string(text, shard.name);
        separator = ",\n    ";
      }
    }
    if (text.size() > kPiece) {
      NIBBLE_RETURN_IF_ERROR(file.write(text));
      text.clear();
    }
  }
  NIBBLE_RETURN_IF_ERROR(file.write(text + "\n  }\n}\n"));
  return file.finish();
}

}  // namespace nibble
