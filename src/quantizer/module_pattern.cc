#include "quantizer/module_pattern.h"

#include "base/glob.h"
#include "checkpoint/quant_config.h"

namespace nibble {
namespace {

bool is_expression(std::string_view text) { return text.substr(0, 3) == "re:"; }

}  // namespace

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
