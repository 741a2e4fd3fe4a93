#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble::jinja {

enum class TokenKind {
  kText,        // template data, ready to print
  kPrintBegin,  // {{
  kPrintEnd,    // }}
  kBlockBegin,  // {%
  kBlockEnd,    // %}
  kName,
  kString,   // text holds the value, escapes resolved
  kInteger,  // digits, also with a 0x, 0o or 0b prefix
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;
  int line = 1;

  [[nodiscard]] bool is(TokenKind wanted, std::string_view wanted_text) const {
    return kind == wanted && text == wanted_text;
  }
  [[nodiscard]] bool is_operator(std::string_view op) const { return is(TokenKind::kOperator, op); }
  [[nodiscard]] bool is_name(std::string_view name) const { return is(TokenKind::kName, name); }
};

/// Splits a template into tokens, ending with kEnd. White space control follows Jinja2 with
/// trim_blocks and lstrip_blocks on and keep_trailing_newline off; comments and raw blocks are
/// resolved here. Errors: kInvalidArgument with the line.
Result<std::vector<Token>> tokenize(std::string_view source);

}  // namespace nibble::jinja
