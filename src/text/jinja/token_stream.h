#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/lexer.h"

namespace nibble::jinja {

/// Tokens with a position; never runs past the final kEnd.
class TokenStream final {
 public:
  explicit TokenStream(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  [[nodiscard]] const Token& current() const { return tokens_[position_]; }
  [[nodiscard]] const Token& next() const {
    return tokens_[std::min(position_ + 1, tokens_.size() - 1)];
  }
  [[nodiscard]] int line() const { return current().line; }

  Token take() {
    Token token = current();
    position_ += position_ + 1 < tokens_.size() ? 1 : 0;
    return token;
  }
  bool take_operator(std::string_view op) { return take_if(current().is_operator(op)); }
  bool take_name(std::string_view name) { return take_if(current().is_name(name)); }

  Status expect_operator(std::string_view op) {
    return take_operator(op) ? Status() : unexpected(fmt::format("'{}'", op));
  }
  Status expect_name(std::string_view name) {
    return take_name(name) ? Status() : unexpected(fmt::format("'{}'", name));
  }
  Status expect(TokenKind kind, std::string_view what) {
    return take_if(current().kind == kind) ? Status() : unexpected(what);
  }
  Result<std::string> expect_identifier() {
    if (current().kind != TokenKind::kName) {
      return unexpected("a name");
    }
    return take().text;
  }

  [[nodiscard]] Status unexpected(std::string_view wanted) const {
    const bool ends = current().kind == TokenKind::kEnd;
    return error(fmt::format("expected {}, got {}", wanted,
                             ends                     ? "the end of the template"
                             : current().text.empty() ? "a tag end"
                                                      : "'" + current().text + "'"));
  }
  [[nodiscard]] Status error(std::string_view what) const {
    return make_error(StatusCode::kInvalidArgument, "line {}: {}", line(), what);
  }

 private:
  bool take_if(bool matches) {
    if (matches) {
      take();
    }
    return matches;
  }

  std::vector<Token> tokens_;
  size_t position_ = 0;
};

}  // namespace nibble::jinja
