#include "checkpoint/turned_inputs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

constexpr std::array<std::string_view, 6> kGroupFields = {"type",          "apply",    "randomize",
                                                          "requires_grad", "head_dim", "precision"};
constexpr std::array<std::string_view, 4> kApplyFields = {"targets", "location", "inverse",
                                                          "ignore"};

bool names(const std::vector<std::string>& patterns, std::string_view module) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    const auto matches = matches_module(pattern, module);
    return pattern == "Linear" || (matches.ok() && *matches);
  });
}

/// A list of texts, or one alone.
Result<std::vector<std::string>> texts_of(const Json& apply,
                                          std::string_view key,
                                          const std::string& where) {
  std::vector<std::string> texts;
  const Json* value = apply.find(key);
  const JsonArray one = value != nullptr && value->is_string() ? JsonArray{*value} : JsonArray();
  const JsonArray* list = value != nullptr && value->is_array() ? &value->as_array() : &one;
  if (!is_absent(value) && !value->is_array() && !value->is_string()) {
    return corrupt_at(where, fmt::format("field {} is neither text nor a list", key));
  }
  for (const Json& text : *list) {
    if (!text.is_string()) {
      return corrupt_at(where, fmt::format("field {} holds something other than text", key));
    }
    NIBBLE_RETURN_IF_ERROR(matches_module(text.as_string(), "").status().with_context(where));
    texts.push_back(text.as_string());
  }
  return texts;
}

/// One group of transforms that are made alike.
class GroupReader final {
 public:
  GroupReader(const Json& group, std::string where) : group_(group), where_(std::move(where)) {}

  Status read(std::vector<TurnedInputs>& out) const {
    NIBBLE_RETURN_IF_ERROR(check_fields(group_, kGroupFields, where_));
    const Json* apply = group_.find("apply");
    NIBBLE_RETURN_IF_ERROR(JsonReader(group_, where_).required_string("type").status());
    if (apply == nullptr || !apply->is_array()) {
      return corrupt_at(where_, "field apply is missing or no list");
    }
    for (size_t i = 0; i < apply->as_array().size(); ++i) {
      NIBBLE_RETURN_IF_ERROR(
          read_apply(apply->as_array()[i], fmt::format("{}.apply[{}]", where_, i), out));
    }
    return {};
  }

 private:
  Status read_apply(const Json& apply,
                    const std::string& where,
                    std::vector<TurnedInputs>& out) const {
    NIBBLE_RETURN_IF_ERROR(check_fields(apply, kApplyFields, where));
    const JsonReader reader(apply, where);
    NIBBLE_ASSIGN_OR_RETURN(const std::string location, reader.required_string("location"));
    if (location == "weight_input" || location == "weight_output") {
      return {};
    }
    if (location != "input") {
      return unsupported_at(
          where,
          fmt::format("field location: transforms of \"{}\" are not computed while the model "
                      "runs, only of \"input\"",
                      location));
    }
    NIBBLE_RETURN_IF_ERROR(check_matrix());
    TurnedInputs turned{.where = where};
    NIBBLE_RETURN_IF_ERROR(reader.optional_bool("inverse", false).status());  // H is its own
    NIBBLE_ASSIGN_OR_RETURN(turned.targets, texts_of(apply, "targets", where));
    NIBBLE_ASSIGN_OR_RETURN(turned.ignore, texts_of(apply, "ignore", where));
    NIBBLE_ASSIGN_OR_RETURN(turned.block, JsonReader(group_, where_).optional_int("head_dim", 0));
    out.push_back(std::move(turned));
    return {};
  }

  [[nodiscard]] Status check_matrix() const {
    const JsonReader reader(group_, where_);
    NIBBLE_ASSIGN_OR_RETURN(const std::string type, reader.required_string("type"));
    NIBBLE_ASSIGN_OR_RETURN(const bool randomize, reader.optional_bool("randomize", false));
    if (type != "hadamard") {
      return unsupported_at(where_, fmt::format("field type: matrices of type \"{}\" are not "
                                                "computed while the model runs, only \"hadamard\"",
                                                type));
    }
    return randomize ? unsupported_at(where_,
                                      "field randomize: permuted Hadamard matrices are not "
                                      "computed while the model runs")
                     : Status();
  }

  const Json& group_;
  std::string where_;
};

Json apply_json(const TurnedInputs& turned, std::string_view location, bool inverse) {
  return Json::object({{"targets", JsonArray(turned.targets.begin(), turned.targets.end())},
                       {"location", location},
                       {"inverse", inverse},
                       {"ignore", JsonArray(turned.ignore.begin(), turned.ignore.end())}});
}

}  // namespace

Result<std::vector<TurnedInputs>> read_transform_config(const Json& config,
                                                        const std::string& where) {
  constexpr std::array<std::string_view, 1> kFields = {"config_groups"};
  std::vector<TurnedInputs> turned;
  if (is_absent(&config)) {
    return turned;
  }
  NIBBLE_RETURN_IF_ERROR(check_fields(config, kFields, where));
  const Json* groups = config.find("config_groups");
  if (is_absent(groups)) {
    return turned;
  }
  if (!groups->is_object()) {
    return corrupt_at(where, "field config_groups is no object");
  }
  for (const auto& [name, group] : groups->as_object()) {
    NIBBLE_RETURN_IF_ERROR(
        GroupReader(group, fmt::format("{}.config_groups.{}", where, name)).read(turned));
  }
  return turned;
}

Result<int64_t> turn_of(const std::vector<TurnedInputs>& turned,
                        std::string_view module,
                        int64_t k) {
  const TurnedInputs* found = nullptr;
  for (const TurnedInputs& one : turned) {
    if (!names(one.targets, module) || names(one.ignore, module)) {
      continue;
    }
    if (found != nullptr) {
      return unsupported_at(one.where, fmt::format("turns the input of {} once more, after {}",
                                                   module, found->where));
    }
    found = &one;
  }
  if (found == nullptr) {
    return 0;
  }
  const int64_t block = found->block != 0 ? found->block : k;
  if (block < 2 || !std::has_single_bit(static_cast<uint64_t>(block)) || k % block != 0) {
    return unsupported_at(found->where,
                          fmt::format("field head_dim: blocks of {} of the {} inputs of {}: only "
                                      "powers of two that divide them are computed",
                                      block, k, module));
  }
  return block;
}

Json transform_config_json(const std::vector<TurnedInputs>& turned) {
  std::vector<JsonObject::Member> groups;
  for (const TurnedInputs& one : turned) {
    groups.emplace_back(groups.empty() ? "R4" : fmt::format("R4_{}", groups.size()),
                        Json::object({{"type", "hadamard"},
                                      {"apply", JsonArray{apply_json(one, "input", false),
                                                          apply_json(one, "weight_input", true)}},
                                      {"randomize", false},
                                      {"requires_grad", false},
                                      {"head_dim", one.block == 0 ? Json() : Json(one.block)},
                                      {"precision", "torch.float32"}}));
  }
  return Json::object({{"config_groups", Json::object(std::move(groups))}});
}

}  // namespace nibble
