#include "text/jinja/value.h"

#include "text/jinja/dict.h"

namespace nibble::jinja {

Value Value::undefined(std::string why) {
  return Value(Undefined{std::make_shared<const std::string>(std::move(why))});
}

Value Value::string(std::string text) {
  return Value(Text(std::make_shared<const std::string>(std::move(text))));
}

Integer Value::as_integer() const {
  return is(Kind::kBool) ? Integer{as_bool()} : std::get<Integer>(data_);
}

double Value::as_double() const {
  return is(Kind::kFloat) ? std::get<double>(data_) : static_cast<double>(as_integer());
}

std::vector<Value>* Value::items() const {
  if (is(Kind::kList)) {
    return &std::get<List*>(data_)->items;
  }
  return is(Kind::kTuple) ? &std::get<Tuple*>(data_)->items : nullptr;
}

std::string Value::why_undefined() const {
  const Text& why = std::get<Undefined>(data_).why;
  return why == nullptr ? "the value is undefined" : *why;
}

bool Value::same_as(const Value& other) const { return data_ == other.data_; }

std::string_view Value::type_name() const {
  constexpr std::string_view kNames[] = {"Undefined", "NoneType",  "bool",        "int",
                                         "float",     "str",       "list",        "tuple",
                                         "dict",      "Namespace", "LoopContext", "function"};
  return kNames[data_.index()];
}

bool Value::truthy() const {
  switch (kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return as_integer() != 0;
    case Kind::kFloat:
      return as_double() != 0;
    case Kind::kString:
      return !as_string().empty();
    case Kind::kList:
    case Kind::kTuple:
      return !items()->empty();
    case Kind::kDict:
      return as_dict()->size() != 0;
    default:
      return true;
  }
}

}  // namespace nibble::jinja
