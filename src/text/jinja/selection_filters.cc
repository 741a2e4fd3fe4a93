#include "text/jinja/filters.h"
#include "text/jinja/operators.h"

namespace nibble::jinja {
namespace {

// Arguments after the first `skipped` positional ones.
Arguments rest_of(const Arguments& args, size_t skipped) {
  return {{args.positional.begin() + static_cast<std::ptrdiff_t>(skipped), args.positional.end()},
          args.named};
}

Result<std::string> name_argument(const Value& value, std::string_view filter) {
  return value.is_string() ? Result<std::string>(value.as_string())
                           : template_error("{}: expected the name of a filter or test", filter);
}

Result<Value> map_attribute(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"map", {"attribute", "default"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  for (Value& item : items) {
    NIBBLE_ASSIGN_OR_RETURN(item, attribute_of(item, a[0], runtime));
    if (item.is_undefined() && !a[1].is_undefined()) {
      item = a[1];
    }
  }
  return runtime.list(std::move(items));
}

// map(attribute=...) or map("filter", arguments...).
Result<Value> map(Runtime& runtime, const Value& subject, const Arguments& args) {
  if (args.positional.empty()) {
    if (args.named.empty()) {
      return template_error("map requires a filter argument");
    }
    return map_attribute(runtime, subject, args);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, name_argument(args.positional[0], "map"));
  const Arguments rest = rest_of(args, 1);
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  for (Value& item : items) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(kNodeWork));
    NIBBLE_ASSIGN_OR_RETURN(item, apply_filter(name, item, rest, runtime));
  }
  return runtime.list(std::move(items));
}

enum class Keep { kMatching, kOthers };
enum class Look { kItem, kAttribute };

// select, reject, selectattr and rejectattr: keeps items that pass (fail) a test, or that are true
// (false) when no test is named.
template <Keep kKeep, Look kLook>
Result<Value> choose(Runtime& runtime, const Value& subject, const Arguments& args) {
  constexpr size_t kTestPlace = kLook == Look::kAttribute ? 1 : 0;
  if (args.positional.size() < kTestPlace) {
    return template_error("selectattr: missing attribute name");
  }
  const bool has_test = args.positional.size() > kTestPlace;
  std::string test;
  if (has_test) {
    NIBBLE_ASSIGN_OR_RETURN(test, name_argument(args.positional[kTestPlace], "select"));
  }
  const Arguments rest = rest_of(args, kTestPlace + (has_test ? 1 : 0));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(subject, runtime));
  std::vector<Value> kept;
  for (const Value& item : items) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(kNodeWork));
    Value looked_at = item;
    if (kLook == Look::kAttribute) {
      NIBBLE_ASSIGN_OR_RETURN(looked_at, attribute_of(item, args.positional[0], runtime));
    }
    bool passes = looked_at.truthy();
    if (has_test) {
      NIBBLE_ASSIGN_OR_RETURN(passes, apply_test(test, looked_at, rest, runtime));
    }
    if (passes == (kKeep == Keep::kMatching)) {
      kept.push_back(item);
    }
  }
  return runtime.list(std::move(kept));
}

}  // namespace

Filter find_selection_filter(std::string_view name) {
  constexpr std::pair<std::string_view, Filter> kFilters[] = {
      {"map", map},
      {"select", choose<Keep::kMatching, Look::kItem>},
      {"reject", choose<Keep::kOthers, Look::kItem>},
      {"selectattr", choose<Keep::kMatching, Look::kAttribute>},
      {"rejectattr", choose<Keep::kOthers, Look::kAttribute>}};
  for (const auto& [filter, function] : kFilters) {
    if (filter == name) {
      return function;
    }
  }
  return nullptr;
}

}  // namespace nibble::jinja
