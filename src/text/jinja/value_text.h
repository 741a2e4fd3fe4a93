#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// What {{ value }} prints: Python's str().
Result<std::string> to_text(const Value& value, Runtime& runtime);
/// Python's repr().
Result<std::string> to_repr(const Value& value, Runtime& runtime);

/// Options of Python's json.dumps.
struct JsonStyle {
  std::optional<std::string> indent;  // text of one level; absent: one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool escapes_non_ascii = false;
  bool sorts_keys = false;
};
/// Python's json.dumps. Errors: kInvalidArgument for undefined values, callables and nesting that
/// is too deep or endless.
Result<std::string> to_json(const Value& value, const JsonStyle& style, Runtime& runtime);

/// Python's `format % arguments` for %s %r %d %i %f %e %g %x %o and %%, with flags, width,
/// precision and %(name)s.
Result<std::string> percent_format(const std::string& format,
                                   const Value& arguments,
                                   Runtime& runtime);

}  // namespace nibble::jinja
