#include "text/jinja/runtime.h"

#include <algorithm>

namespace nibble::jinja {

Status Runtime::charge(uint64_t units) {
  work_ += units;
  if (units > limits_.work || work_ > limits_.work) {
    return template_error("the template does more work than a render may ({} units)", limits_.work);
  }
  return {};
}

Result<Value> Runtime::string(std::string text) {
  NIBBLE_RETURN_IF_ERROR(charge(text.size() + 1));
  return Value::string(std::move(text));
}

Result<Value> Runtime::list(std::vector<Value> items) {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork + kItemWork * items.size()));
  return Value::list(&lists_.emplace_back(List{std::move(items)}));
}

Result<Value> Runtime::tuple(std::vector<Value> items) {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork + kItemWork * items.size()));
  return Value::tuple(&tuples_.emplace_back(Tuple{std::move(items)}));
}

Result<Value> Runtime::dict() {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork));
  return Value::dict(&dicts_.emplace_back());
}

Result<Value> Runtime::space() {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork));
  return Value::space(&spaces_.emplace_back(Namespace{&dicts_.emplace_back()}));
}

Result<Value> Runtime::callable(std::string name,
                                std::function<Result<Value>(Runtime&, Arguments&)> invoke) {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork));
  return Value::callable(&callables_.emplace_back(Callable{std::move(name), std::move(invoke)}));
}

Result<Loop*> Runtime::loop() {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork));
  return &loops_.emplace_back();
}

Result<Scope*> Runtime::scope(Scope* parent) {
  NIBBLE_RETURN_IF_ERROR(charge(kObjectWork));
  return &scopes_.emplace_back(Scope{parent, {}});
}

Result<Value> Runtime::from_json(const Json& json) {
  switch (json.type()) {
    case Json::Type::kNull:
      return Value::none();
    case Json::Type::kBool:
      return Value::boolean(json.as_bool());
    case Json::Type::kInt:
      return Value::integer(json.as_int());
    case Json::Type::kUint:
      return Value::integer(json.as_uint());
    case Json::Type::kDouble:
      return Value::real(json.as_double());
    case Json::Type::kString:
      return string(json.as_string());
    case Json::Type::kArray: {
      std::vector<Value> items;
      for (const Json& element : json.as_array()) {
        NIBBLE_ASSIGN_OR_RETURN(Value item, from_json(element));
        items.push_back(std::move(item));
      }
      return list(std::move(items));
    }
    case Json::Type::kObject:
      break;
  }
  NIBBLE_ASSIGN_OR_RETURN(Value object, dict());
  for (const auto& [name, member] : json.as_object()) {
    NIBBLE_ASSIGN_OR_RETURN(Value item, from_json(member));
    NIBBLE_RETURN_IF_ERROR(charge(kItemWork));
    object.as_dict()->set(name, std::move(item));
  }
  return object;
}

Result<std::vector<Value>> bind(const Signature& signature, const Arguments& arguments) {
  const std::vector<std::string_view>& names = signature.parameters;
  if (arguments.positional.size() > names.size()) {
    return template_error("{}() takes at most {} arguments, {} were given", signature.function,
                          names.size(), arguments.positional.size());
  }
  std::vector<Value> values = arguments.positional;
  values.resize(names.size());
  std::vector<bool> given(names.size(), false);
  std::fill_n(given.begin(), arguments.positional.size(), true);
  for (const auto& [name, value] : arguments.named) {
    const auto place = std::find(names.begin(), names.end(), name);
    if (place == names.end()) {
      return template_error("{}() got an unexpected keyword argument '{}'", signature.function,
                            name);
    }
    const auto index = static_cast<size_t>(place - names.begin());
    if (given[index]) {
      return template_error("{}() got multiple values for argument '{}'", signature.function, name);
    }
    given[index] = true;
    values[index] = value;
  }
  for (size_t i = 0; i < signature.required; ++i) {
    if (!given[i]) {
      return template_error("{}() misses its argument '{}'", signature.function, names[i]);
    }
  }
  return values;
}

Result<int64_t> integer_argument(const Value& value, int64_t fallback, std::string_view what) {
  if (value.is_undefined() || value.is_none()) {
    return fallback;
  }
  if (!value.is_integral()) {
    return template_error("{}: expected an integer, got {}", what, value.type_name());
  }
  constexpr Integer kMax = INT64_MAX;
  constexpr Integer kMin = INT64_MIN;
  return static_cast<int64_t>(std::clamp(value.as_integer(), kMin, kMax));
}

}  // namespace nibble::jinja
