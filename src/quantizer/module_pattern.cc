#include "quantizer/module_pattern.h"

#include "checkpoint/quant_config.h"

namespace nibble {
namespace {

bool is_expression(std::string_view text) { return text.substr(0, 3) == "re:"; }

}  // namespace

bool matches_glob(std::string_view pattern, std::string_view text) {
  size_t p = 0;
  size_t t = 0;
  size_t star = std::string_view::npos;  // the last '*' that was met, and what it covers up to
  size_t covered = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      covered = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++covered;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') {
    ++p;
  }
  return p == pattern.size();
}

Result<ModulePattern> ModulePattern::parse(std::string_view text) {
  if (text.empty()) {
    return make_error(StatusCode::kInvalidArgument, "an empty pattern matches nothing");
  }
  ModulePattern pattern;
  pattern.text_ = text;
  if (is_expression(text)) {
    const auto compiles = matches_module(text, "");
    NIBBLE_RETURN_IF_ERROR(compiles.status());
  }
  return pattern;
}

Result<bool> ModulePattern::matches(std::string_view module) const {
  return is_expression(text_) ? matches_module(text_, module) : matches_glob(text_, module);
}

}  // namespace nibble
