#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Which modules a flag means: an exact name ("lm_head"), a name with '*' for any text, dots
/// included ("*.mlp.experts.*"), or "re:" with a regular expression, anchored at the start only.
class ModulePattern final {
 public:
  /// kInvalidArgument for an empty pattern or an expression that does not compile.
  static Result<ModulePattern> parse(std::string_view text);

  /// kInvalidArgument when an expression needs too many steps.
  [[nodiscard]] Result<bool> matches(std::string_view module) const;
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  ModulePattern() = default;

  std::string text_;
};

/// Whether `text` is `pattern` with every '*' replaced by some text.
[[nodiscard]] bool matches_glob(std::string_view pattern, std::string_view text);

}  // namespace nibble
