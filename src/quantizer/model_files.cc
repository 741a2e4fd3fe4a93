#include "quantizer/model_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
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

Status write_text(const std::string& path, std::string_view text) {
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(text));
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

}  // namespace

Status copy_model_files(const std::string& source, const std::string& destination) {
  std::error_code error;
  for (fs::directory_iterator it(source, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!it->is_regular_file() || name == "config.json" || name.front() == '.' ||
        is_weight_file(name)) {
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(it->path().string()));
    NIBBLE_ASSIGN_OR_RETURN(OutputFile copy, OutputFile::create(destination + "/" + name));
    NIBBLE_RETURN_IF_ERROR(copy.write(file.bytes()));
    NIBBLE_RETURN_IF_ERROR(copy.finish());
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
  config->set(std::string(kQuantKey), quantization_config);
  return write_text(destination + "/config.json", config->dump_pretty() + "\n");
}

}  // namespace nibble
