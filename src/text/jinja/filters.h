#pragma once

#include <string_view>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// subject | name(arguments). Errors: kInvalidArgument for an unknown filter and what it refuses.
Result<Value> apply_filter(std::string_view name,
                           const Value& subject,
                           const Arguments& arguments,
                           Runtime& runtime);
/// subject is name(arguments). Errors as above.
Result<bool> apply_test(std::string_view name,
                        const Value& subject,
                        const Arguments& arguments,
                        Runtime& runtime);

using Filter = Result<Value> (*)(Runtime& runtime,
                                 const Value& subject,
                                 const Arguments& arguments);
[[nodiscard]] Filter find_text_filter(std::string_view name);
[[nodiscard]] Filter find_sequence_filter(std::string_view name);
[[nodiscard]] Filter find_selection_filter(std::string_view name);

/// item.a.0.b as filters write it ("a.0.b"), or item[3] for an integer attribute.
Result<Value> attribute_of(const Value& item, const Value& attribute, Runtime& runtime);
/// The value by which filters compare: lower case unless `case_sensitive`.
[[nodiscard]] Value comparison_key(const Value& value, const Value& case_sensitive);

}  // namespace nibble::jinja
