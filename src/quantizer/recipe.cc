#include "quantizer/recipe.h"

#include <filesystem>

#include "base/file.h"

namespace nibble {
namespace {

constexpr int64_t kVersion = 1;

Json list_of(const std::vector<std::string>& texts) {
  JsonArray list;
  for (const std::string& text : texts) {
    list.emplace_back(text);
  }
  return list;
}

Result<std::vector<std::string>> texts_of(const Json& recipe,
                                          std::string_view key,
                                          const std::string& path) {
  std::vector<std::string> texts;
  const Json* list = recipe.find(key);
  if (list == nullptr) {
    return texts;
  }
  const auto wrong = [&] {
    return make_error(StatusCode::kCorrupt, "{}: field {}: expected a list of strings", path, key);
  };
  if (!list->is_array()) {
    return wrong();
  }
  for (const Json& text : list->as_array()) {
    if (!text.is_string()) {
      return wrong();
    }
    texts.push_back(text.as_string());
  }
  return texts;
}

/// The text of a member; empty where it is absent or null.
Result<std::string> text_of(const Json& recipe, std::string_view key, const std::string& path) {
  const Json* text = recipe.find(key);
  if (text == nullptr || text->is_null()) {
    return std::string();
  }
  if (!text->is_string()) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: expected a string, got {}", path, key,
                      json_type_name(*text));
  }
  return text->as_string();
}

Result<RuleOptions> rules_of(const Json& recipe, const std::string& path) {
  RuleOptions rules;
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme,
                          JsonReader(recipe, path).required_string("scheme"));
  NIBBLE_ASSIGN_OR_RETURN(rules.scheme, find_scheme(scheme));
  NIBBLE_ASSIGN_OR_RETURN(const std::string head, text_of(recipe, "lm_head", path));
  if (!head.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(rules.head, find_scheme(head));
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string others, text_of(recipe, "others", path));
  rules.others = others == "bf16" ? OtherMatrices::kDecode : OtherMatrices::kKeep;
  NIBBLE_ASSIGN_OR_RETURN(rules.rules, texts_of(recipe, "rules", path));
  NIBBLE_ASSIGN_OR_RETURN(rules.ignore, texts_of(recipe, "ignore", path));
  NIBBLE_ASSIGN_OR_RETURN(rules.include, texts_of(recipe, "include", path));
  return rules;
}

}  // namespace

Result<Json> recipe_of(const PlanOptions& options) {
  const RuleOptions& rules = options.rules;
  std::vector<std::string> lines = rules.rules;
  if (!rules.rules_file.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<RuleLine> more, read_rules_file(rules.rules_file));
    for (const RuleLine& line : more) {
      lines.push_back(line.text);
    }
  }
  Json recipe =
      Json::object({{"nibble_recipe", kVersion},
                    {"scheme", rules.scheme.name},
                    {"scale_rule", scale_rule_name(options.scale_rule)},
                    {"format", options.dialect ? Json(dialect_name(*options.dialect)) : Json()},
                    {"lm_head", rules.head ? Json(rules.head->name) : Json()},
                    {"others", rules.others == OtherMatrices::kDecode ? "bf16" : "keep"},
                    {"rules", list_of(lines)},
                    {"ignore", list_of(rules.ignore)},
                    {"include", list_of(rules.include)},
                    {"calibration", options.calibration}});
  if (!options.budget.is_null()) {
    recipe.set("budget", options.budget);
  }
  return recipe;
}

Status write_recipe(const Json& recipe, const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kRecipeName);
  std::error_code ignored;
  std::filesystem::remove(path, ignored);  // an earlier run may have left it
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(recipe.dump_pretty() + "\n"));
  return file.finish();
}

Result<PlanOptions> read_recipe(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const auto parsed = Json::parse(text);
  NIBBLE_RETURN_IF_ERROR(parsed.status().with_context(path));
  const JsonReader reader(*parsed, path);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t version, reader.required_int("nibble_recipe"));
  if (version != kVersion) {
    return make_error(StatusCode::kUnsupported, "{}: field nibble_recipe: {} is not known, only {}",
                      path, version, kVersion);
  }
  PlanOptions options;
  NIBBLE_ASSIGN_OR_RETURN(options.rules, rules_of(*parsed, path));
  NIBBLE_ASSIGN_OR_RETURN(const std::string rule, reader.required_string("scale_rule"));
  NIBBLE_ASSIGN_OR_RETURN(options.scale_rule, parse_scale_rule(rule));
  NIBBLE_ASSIGN_OR_RETURN(const std::string format, text_of(*parsed, "format", path));
  if (!format.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(options.dialect, parse_dialect(format));
  }
  if (const Json* calibration = parsed->find("calibration"); calibration != nullptr) {
    options.calibration = *calibration;
  }
  if (const Json* budget = parsed->find("budget"); budget != nullptr) {
    options.budget = *budget;
  }
  return options;
}

}  // namespace nibble
