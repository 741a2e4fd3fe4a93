#include "kept_choice.h"

#include <utility>

#include "base/file.h"
#include "output.h"
#include "quantizer/recipe.h"
#include "quantizer/work_folder.h"

namespace nibble {
namespace {

constexpr int64_t kVersion = 1;

Json figures_of(const BudgetChoice& choice) {
  return Json::object({{"bits_per_weight", choice.bits},
                       {"bytes", choice.bytes},
                       {"predicted", choice.loss},
                       {"bound", choice.bound},
                       {"measured_tokens", choice.measured_tokens}});
}

/// asked and figures of a member "budget".
Result<KeptChoice> parse_budget_member(const Json& json, const std::string& path) {
  KeptChoice kept;
  const Json* asked = json.find("asked");
  const Json* chosen = json.find("chosen");
  if (asked == nullptr || !asked->is_object() || chosen == nullptr) {
    return make_error(StatusCode::kCorrupt, "{}: field budget: expected asked and chosen", path);
  }
  kept.asked = *asked;
  const JsonReader reader(*chosen, path);
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.bits, reader.required_double("bits_per_weight"));
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.bytes, reader.required_int("bytes"));
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.loss, reader.required_double("predicted"));
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.bound, reader.required_double("bound"));
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.measured_tokens, reader.required_int("measured_tokens"));
  return kept;
}

Result<KeptChoice> parse_kept(const Json& json, const std::string& path) {
  const JsonReader reader(json, path);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t version, reader.required_int("nibble_choice"));
  const Json* budget = json.find("budget");
  const Json* rules = json.find("rules");
  if (version != kVersion || budget == nullptr || rules == nullptr || !rules->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: is no choice of this version; delete it", path);
  }
  NIBBLE_ASSIGN_OR_RETURN(KeptChoice kept, parse_budget_member(*budget, path));
  NIBBLE_ASSIGN_OR_RETURN(kept.source, reader.required_string("source"));
  NIBBLE_ASSIGN_OR_RETURN(kept.choice.main_scheme, reader.required_string("scheme"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string format, reader.required_string("format"));
  NIBBLE_ASSIGN_OR_RETURN(kept.dialect, parse_dialect(format));
  for (const Json& rule : rules->as_array()) {
    if (!rule.is_string()) {
      return make_error(StatusCode::kCorrupt, "{}: field rules: expected strings", path);
    }
    kept.choice.rules.push_back(rule.as_string());
  }
  return kept;
}

Result<std::string> kept_path(const std::string& destination) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, WorkFolder::destination_of(destination));
  return fmt::format("{}/{}", WorkFolder::path_of(name), kChoiceName);
}

}  // namespace

Json KeptChoice::recipe() const {
  return Json::object({{"asked", asked}, {"chosen", figures_of(choice)}});
}

Result<std::optional<KeptChoice>> read_kept_choice(const std::string& destination) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, kept_path(destination));
  if (!file_exists(path)) {
    return std::optional<KeptChoice>();
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const auto json = Json::parse(text);
  NIBBLE_RETURN_IF_ERROR(json.status().with_context(path));
  NIBBLE_ASSIGN_OR_RETURN(KeptChoice kept, parse_kept(*json, path));
  return std::optional(std::move(kept));
}

Result<std::optional<KeptChoice>> read_recipe_choice(const std::string& output) {
  const std::string path = fmt::format("{}/{}", output, kRecipeName);
  if (!file_exists(path)) {
    return std::optional<KeptChoice>();
  }
  NIBBLE_ASSIGN_OR_RETURN(PlanOptions recipe, read_recipe(path));
  if (recipe.budget.is_null() || !recipe.dialect) {
    return std::optional<KeptChoice>();
  }
  NIBBLE_ASSIGN_OR_RETURN(KeptChoice kept, parse_budget_member(recipe.budget, path));
  kept.choice.main_scheme = recipe.rules.scheme.name;
  kept.choice.rules = std::move(recipe.rules.rules);
  kept.dialect = *recipe.dialect;
  return std::optional(std::move(kept));
}

Status keep_choice(const KeptChoice& kept, const std::string& destination) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, WorkFolder::destination_of(destination));
  NIBBLE_ASSIGN_OR_RETURN(WorkFolder folder, WorkFolder::open(name, WorkFolder::Sharing::kAlone));
  NIBBLE_RETURN_IF_ERROR(folder.clear());
  JsonArray rules;
  for (const std::string& rule : kept.choice.rules) {
    rules.emplace_back(rule);
  }
  const Json json = Json::object({{"nibble_choice", kVersion},
                                  {"source", kept.source},
                                  {"budget", kept.recipe()},
                                  {"scheme", kept.choice.main_scheme},
                                  {"format", dialect_name(kept.dialect)},
                                  {"rules", std::move(rules)}});
  return write_text_file(fmt::format("{}/{}", folder.path(), kChoiceName),
                         json.dump_pretty() + "\n");
}

}  // namespace nibble
