#pragma once

#include <string_view>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// A method of a Python type; `self` has the kind it was found for.
using Method = Result<Value> (*)(Runtime& runtime, const Value& self, const Arguments& arguments);

/// Method `name` of strings, lists, tuples or dicts; nullptr if there is none.
[[nodiscard]] Method find_method(Value::Kind kind, std::string_view name);
[[nodiscard]] Method find_string_method(std::string_view name);
[[nodiscard]] Method find_container_method(Value::Kind kind, std::string_view name);

// Shared by methods and filters of the same meaning.

/// Replaces at most `count` occurrences (negative: all).
Result<Value> replace_text(Runtime& runtime,
                           const std::string& text,
                           const std::string& old,
                           const std::string& with,
                           int64_t count);
/// Every item in order of `less`; stable. Errors: items that do not compare.
Status sort_values(Runtime& runtime, std::vector<std::pair<Value, Value>>& keyed_items);
/// Text joined from items by `separator`, items printed as str() does.
Result<Value> join_values(Runtime& runtime,
                          const std::vector<Value>& items,
                          const std::string& separator);
/// `text` without characters of `characters` (white space if undefined or none) at its ends.
enum class StripSide { kBoth, kLeft, kRight };
Result<Value> strip_text(Runtime& runtime,
                         const std::string& text,
                         const Value& characters,
                         StripSide side);
/// Key and value tuples of a dict.
Result<Value> dict_items(Runtime& runtime, const Dict& dict);

}  // namespace nibble::jinja
