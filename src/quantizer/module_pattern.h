#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Which modules a flag means: an exact name ("lm_head"), a pattern of matches_glob(), whose '*'
/// covers dots, too ("*.mlp.experts.*", "*.layers.[0-3].*"), or "re:" with a regular expression,
/// anchored at the start only.
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

}  // namespace nibble
