#include "text/jinja/filters.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"

namespace nibble::jinja {

Result<Value> apply_filter(std::string_view name,
                           const Value& subject,
                           const Arguments& arguments,
                           Runtime& runtime) {
  for (const auto find : {find_text_filter, find_sequence_filter, find_selection_filter}) {
    if (const Filter filter = find(name); filter != nullptr) {
      return filter(runtime, subject, arguments);
    }
  }
  return template_error("no filter named '{}'", name);
}

Result<Value> attribute_of(const Value& item, const Value& attribute, Runtime& runtime) {
  if (!attribute.is_string()) {
    return get_item(item, attribute, runtime);
  }
  Value value = item;
  std::string_view path = attribute.as_string();
  while (true) {
    const size_t dot = path.find('.');
    const std::string_view part = path.substr(0, dot);
    int64_t number = 0;
    const auto parsed = std::from_chars(part.data(), part.data() + part.size(), number);
    const bool is_number = !part.empty() && part[0] != '-' && parsed.ec == std::errc() &&
                           parsed.ptr == part.data() + part.size();
    const Value index = is_number ? Value::integer(number) : Value::string(std::string(part));
    NIBBLE_ASSIGN_OR_RETURN(value, get_item(value, index, runtime));
    if (dot == std::string_view::npos) {
      return value;
    }
    path = path.substr(dot + 1);
  }
}

Value comparison_key(const Value& value, const Value& case_sensitive) {
  return value.is_string() && !case_sensitive.truthy() ? Value::string(lower(value.as_string()))
                                                       : value;
}

}  // namespace nibble::jinja
