#include "checkpoint/embedding_form.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/file.h"
#include "base/json.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy = "; use another model, or --pooling";

/// The file's JSON; null where there is no such file.
Result<Json> read_optional(const std::string& path) {
  if (!file_exists(path)) {
    return Json();
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context(path);
  }
  return std::move(json).value();
}

std::string_view text_of(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && value->is_string() ? std::string_view(value->as_string()) : "";
}

/// A folder within the model's.
bool is_inside(std::string_view folder) {
  const fs::path path(folder);
  return !folder.empty() && path.is_relative() &&
         std::ranges::none_of(path, [](const fs::path& part) { return part == ".."; });
}

/// The folder of the module that pools; "" where none is named.
Result<std::string> pooling_folder(const std::string& model) {
  const std::string path = model + "/modules.json";
  NIBBLE_ASSIGN_OR_RETURN(const Json modules, read_optional(path));
  if (modules.is_null()) {
    return std::string("1_Pooling");
  }
  if (!modules.is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: expected an array of modules", path);
  }
  std::string folder;
  for (const Json& module : modules.as_array()) {
    const std::string_view type = text_of(module, "type");
    const std::string_view kind = type.substr(type.rfind('.') + 1);
    if (kind == "Pooling") {
      folder = text_of(module, "path");
      if (!is_inside(folder)) {
        return make_error(StatusCode::kCorrupt,
                          "{}: the path of module Pooling is no folder of the "
                          "model",
                          path);
      }
    } else if (kind != "Transformer" && kind != "Normalize") {
      return make_error(StatusCode::kUnsupported,
                        "{}: embeddings need the module \"{}\", which is not computed here", path,
                        type.substr(0, 80));
    }
  }
  return folder;
}

/// The modes that are on: in newer files one has its name, in older ones each has a flag.
std::vector<std::string> pooling_modes(const Json& config) {
  std::vector<std::string> modes;
  if (const std::string_view mode = text_of(config, "pooling_mode"); !mode.empty()) {
    modes.emplace_back(mode);
    return modes;
  }
  constexpr std::string_view kPrefix = "pooling_mode_";
  for (const auto& [key, value] : config.as_object()) {
    if (key.starts_with(kPrefix) && value.is_bool() && value.as_bool()) {
      modes.push_back(key.substr(kPrefix.size()));
    }
  }
  return modes;
}

Result<Pooling> read_pooling(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const Json config, read_optional(path));
  if (config.is_null()) {
    return Pooling::kLast;
  }
  if (!config.is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: expected an object", path);
  }
  const std::vector<std::string> modes = pooling_modes(config);
  if (modes.size() == 1 && modes[0] == "lasttoken") {
    return Pooling::kLast;
  }
  if (modes.size() == 1 && (modes[0] == "mean" || modes[0] == "mean_tokens")) {
    return Pooling::kMean;
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: pooling \"{}\" is not computed here, only lasttoken and mean{}", path,
                    fmt::format("{}", fmt::join(modes, "+")).substr(0, 80), kRemedy);
}

Status read_dimensions(const std::string& path, EmbeddingForm& form) {
  NIBBLE_ASSIGN_OR_RETURN(const Json config, read_optional(path));
  const Json* flag = config.find("is_matryoshka");
  const Json* listed = config.find("matryoshka_dimensions");
  form.can_be_cut = flag != nullptr && flag->is_bool() && flag->as_bool();
  if (listed == nullptr || listed->is_null()) {
    return {};
  }
  if (!listed->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: field matryoshka_dimensions: expected an array",
                      path);
  }
  for (const Json& each : listed->as_array()) {
    if (!each.is_int() || each.as_int() < 1) {
      return make_error(StatusCode::kCorrupt,
                        "{}: field matryoshka_dimensions: expected positive integers", path);
    }
    form.dimensions.push_back(each.as_int());
  }
  form.can_be_cut = form.can_be_cut || !form.dimensions.empty();
  return {};
}

}  // namespace

Result<EmbeddingForm> read_embedding_form(const std::string& model, std::optional<Pooling> asked) {
  EmbeddingForm form;
  std::error_code ignored;
  if (fs::is_directory(model, ignored)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string folder, pooling_folder(model));
    if (!asked && !folder.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(form.pooling,
                              read_pooling(fmt::format("{}/{}/config.json", model, folder)));
    }
    NIBBLE_RETURN_IF_ERROR(read_dimensions(model + "/config.json", form));
  }
  form.pooling = asked.value_or(form.pooling);
  return form;
}

std::string pooling_name(Pooling pooling) { return pooling == Pooling::kMean ? "mean" : "last"; }

}  // namespace nibble
