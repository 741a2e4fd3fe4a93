#include "quantizer/model_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <utility>

#include "base/file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kQuantKey = "quantization_config";
constexpr std::array<std::string_view, 7> kWeightSuffixes = {
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".pt", ".gguf"};

bool is_weight_file(std::string_view name) {
  return std::any_of(kWeightSuffixes.begin(), kWeightSuffixes.end(), [&](std::string_view suffix) {
    return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
  });
}

// Of the quantization that made the source.
bool is_report(std::string_view name) {
  return name == "quantization_report.json" || name == "quantization_report.html";
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

}  // namespace

Status copy_model_files(const std::string& source, const std::string& destination) {
  std::error_code error;
  for (fs::directory_iterator it(source, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!it->is_regular_file() || name == "config.json" || name.front() == '.' ||
        is_weight_file(name) || is_report(name)) {
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(it->path().string()));
    NIBBLE_RETURN_IF_ERROR(write_file(destination + "/" + name, file.bytes()));
  }
  if (error) {
    return make_error(StatusCode::kIo, "{}: cannot list it: {}", source, error.message());
  }
  return {};
}

Status write_config(const std::string& source,
                    const std::string& destination,
                    const Json& quantization_config) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(source + "/config.json"));
  auto config = Json::parse(text);
  if (!config.ok()) {
    return config.status().with_context("config.json");
  }
  if (!config->is_object()) {
    return make_error(StatusCode::kCorrupt, "config.json: not a JSON object");
  }
  remove_nested(*config);
  if (!quantization_config.is_null()) {
    config->set(std::string(kQuantKey), quantization_config);
  }
  const std::string written = config->dump_pretty() + "\n";
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
