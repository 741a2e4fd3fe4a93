#include "arch/model_text.h"

#include <utility>

#include "arch/gguf.h"
#include "base/file.h"

namespace nibble {
namespace {

Result<GgufConfigFiles> files_of(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet model, gguf::FileSet::open(path));
  return gguf_config_files(model);
}

}  // namespace

bool has_config(const std::string& model) {
  return gguf::is_gguf_path(model) || file_exists(model + "/config.json");
}

Result<Json> read_config_json(const std::string& model) {
  if (gguf::is_gguf_path(model)) {
    NIBBLE_ASSIGN_OR_RETURN(GgufConfigFiles files, files_of(model));
    return std::move(files.config);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(model + "/config.json"));
  auto config = Json::parse(text);
  if (!config.ok()) {
    return config.status().with_context("config.json");
  }
  return config->is_object() ? std::move(config)
                             : make_error(StatusCode::kCorrupt, "config.json: not a JSON object");
}

Result<std::string> read_generation_text(const std::string& model) {
  if (gguf::is_gguf_path(model)) {
    NIBBLE_ASSIGN_OR_RETURN(const GgufConfigFiles files, files_of(model));
    return files.generation.dump_pretty() + "\n";
  }
  const std::string path = model + "/generation_config.json";
  if (!file_exists(path)) {
    return std::string();
  }
  NIBBLE_ASSIGN_OR_RETURN(std::string text, read_file(path));
  return text.empty() ? make_error(StatusCode::kCorrupt, "{}: the file is empty", path)
                      : Result<std::string>(std::move(text));
}

}  // namespace nibble
