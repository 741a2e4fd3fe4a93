#include "arch/model_text.h"

#include <filesystem>
#include <utility>

#include "arch/gguf.h"
#include "base/file.h"

namespace nibble {
bool has_config(const std::string& model) {
  return gguf::is_gguf_path(model) || file_exists(model + "/config.json");
}

Result<Json> read_config_json(const std::string& model) {
  if (gguf::is_gguf_path(model)) {
    NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet files, gguf::FileSet::open(model));
    return gguf_config(files);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(model + "/config.json"));
  auto config = Json::parse(text);
  if (!config.ok()) {
    return config.status().with_context("config.json");
  }
  return config->is_object() ? std::move(config)
                             : make_error(StatusCode::kCorrupt, "config.json: not a JSON object");
}

Status check_is_model(const std::string& model) {
  std::error_code ignored;
  return std::filesystem::is_directory(model, ignored) || gguf::is_gguf_path(model)
             ? Status()
             : make_error(StatusCode::kNotFound,
                          "{} is no folder; give the folder that has the model's config.json, or a "
                          "GGUF file",
                          model);
}

}  // namespace nibble
