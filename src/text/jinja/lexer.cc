#include "text/jinja/lexer.h"

#include <array>

#include "text/jinja/utf8.h"

namespace nibble::jinja {
namespace {

// One "\n" for every line end, and no line end at the very end.
std::string normalize_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      i += i + 1 < source.size() && source[i + 1] == '\n' ? 1 : 0;
    } else {
      out.push_back(source[i]);
    }
  }
  if (!out.empty() && out.back() == '\n') {
    out.pop_back();
  }
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Resolves the escapes of a Python string literal.
Result<std::string> unescape(std::string_view text, int line) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out.push_back(text[i]);
      continue;
    }
    const char c = text[++i];
    constexpr std::string_view kSimple = "\\'\"abfnrtv";
    constexpr std::string_view kMeaning = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t place = kSimple.find(c); place != std::string_view::npos) {
      out.push_back(kMeaning[place]);
    } else if (c == '\n') {
      continue;
    } else if (c >= '0' && c <= '7') {
      uint32_t value = 0;
      const size_t end = std::min(i + 3, text.size());
      for (; i < end && text[i] >= '0' && text[i] <= '7'; ++i) {
        value = value * 8 + static_cast<uint32_t>(text[i] - '0');
      }
      --i;
      append_code_point(out, value);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      uint32_t value = 0;
      for (size_t k = 0; k < digits; ++k) {
        if (i + 1 >= text.size() || !is_hex(text[i + 1])) {
          return make_error(StatusCode::kInvalidArgument, "line {}: truncated \\{} escape", line,
                            c);
        }
        const char h = text[++i];
        value = value * 16 + static_cast<uint32_t>(is_digit(h) ? h - '0' : (h | 0x20) - 'a' + 10);
      }
      if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) {
        return make_error(StatusCode::kInvalidArgument, "line {}: \\{} escape is no character",
                          line, c);
      }
      append_code_point(out, value);
    } else {
      out.push_back('\\');
      out.push_back(c);
    }
  }
  return out;
}

class Lexer final {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  Result<std::vector<Token>> run() {
    while (position_ < source_.size()) {
      NIBBLE_RETURN_IF_ERROR(lex_text());
    }
    tokens_.push_back({TokenKind::kEnd, "", line_at(source_.size())});
    return std::move(tokens_);
  }

 private:
  Status lex_text();
  Status lex_comment(size_t tag);
  Status lex_raw(size_t body);
  Status lex_tag(TokenKind begin, TokenKind end, std::string_view closer);
  Status lex_token();
  Status lex_number();
  Status lex_string();
  Status track_bracket(char bracket);
  void emit_text(size_t tag, char sign, bool can_strip_line);
  [[nodiscard]] size_t raw_begin(size_t after_sign) const;
  void skip_space();
  void skip_newline();
  // Eats a tag end ("-" strips what follows, "+" keeps it); false if there is none here.
  bool eat_end(std::string_view closer, bool trims_newline);

  [[nodiscard]] bool at(std::string_view text) const { return at(position_, text); }
  [[nodiscard]] bool at(size_t position, std::string_view text) const {
    return source_.compare(position, text.size(), text) == 0;
  }
  int line_at(size_t position) {
    for (; counted_ < position; ++counted_) {
      line_ += source_[counted_] == '\n' ? 1 : 0;
    }
    return line_;
  }
  void emit(TokenKind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), line_at(position_)});
  }
  Status error(std::string_view what) {
    return make_error(StatusCode::kInvalidArgument, "line {}: {}", line_at(position_), what);
  }

  std::string source_;
  size_t position_ = 0;
  size_t counted_ = 0;  // line_ is right for this position
  int line_ = 1;
  std::string brackets_;  // open ones
  std::vector<Token> tokens_;
};

void Lexer::skip_space() {
  position_ = source_.size() - strip_left(std::string_view(source_).substr(position_)).size();
}

void Lexer::skip_newline() { position_ += at("\n") ? 1 : 0; }

bool Lexer::eat_end(std::string_view closer, bool trims_newline) {
  const size_t sign = at("-") || (trims_newline && at("+")) ? 1 : 0;
  if (!at(position_ + sign, closer)) {
    return false;
  }
  const char mark = sign == 0 ? ' ' : source_[position_];
  position_ += sign + closer.size();
  if (mark == '-') {
    skip_space();
  } else if (mark == ' ' && trims_newline) {
    skip_newline();
  }
  return true;
}

// Text from position_ up to `tag`, without the blanks that the tag asks to drop.
void Lexer::emit_text(size_t tag, char sign, bool can_strip_line) {
  const bool at_line_start = position_ == 0 || source_[position_ - 1] == '\n';
  std::string_view text = std::string_view(source_).substr(position_, tag - position_);
  if (sign == '-') {
    text = strip_right(text);
  } else if (sign != '+' && can_strip_line) {
    const size_t newline = text.rfind('\n');
    const size_t start = newline == std::string_view::npos ? 0 : newline + 1;
    if ((start > 0 || at_line_start) && strip_left(text.substr(start)).empty()) {
      text = text.substr(0, start);
    }
  }
  if (!text.empty()) {
    emit(TokenKind::kText, std::string(text));
  }
}

// Position after "raw %}" that starts at `after_sign`, or npos if this is no raw block.
size_t Lexer::raw_begin(size_t after_sign) const {
  const std::string_view rest = std::string_view(source_).substr(after_sign);
  std::string_view inner = strip_left(rest);
  if (!inner.starts_with("raw")) {
    return std::string::npos;
  }
  inner = strip_left(inner.substr(3));
  const bool strips = inner.starts_with("-%}");
  if (!strips && !inner.starts_with("%}")) {
    return std::string::npos;
  }
  inner = strips ? strip_left(inner.substr(3)) : inner.substr(2);
  return source_.size() - inner.size();
}

Status Lexer::lex_text() {
  size_t tag = position_;
  for (;; ++tag) {
    tag = source_.find('{', tag);
    if (tag == std::string::npos || tag + 1 >= source_.size()) {
      emit_text(source_.size(), '+', false);
      position_ = source_.size();
      return {};
    }
    const char next = source_[tag + 1];
    if (next == '{' || next == '%' || next == '#') {
      break;
    }
  }
  const char type = source_[tag + 1];
  const char after = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
  const char sign = after == '-' || after == '+' ? after : ' ';
  emit_text(tag, sign, type != '{');
  position_ = tag + (sign == ' ' ? 2 : 3);
  if (type == '#') {
    return lex_comment(tag);
  }
  if (type == '{') {
    return lex_tag(TokenKind::kPrintBegin, TokenKind::kPrintEnd, "}}");
  }
  if (const size_t body = raw_begin(position_); body != std::string::npos) {
    return lex_raw(body);
  }
  return lex_tag(TokenKind::kBlockBegin, TokenKind::kBlockEnd, "%}");
}

Status Lexer::lex_comment(size_t tag) {
  const size_t end = source_.find("#}", tag + 2);
  if (end == std::string::npos) {
    return error("a comment is not closed; end it with #}");
  }
  const char before = source_[end - 1];
  const bool has_sign = end > position_ && (before == '-' || before == '+');
  position_ = end - (has_sign ? 1 : 0);
  eat_end("#}", true);
  return {};
}

Status Lexer::lex_raw(size_t body) {
  position_ = body;
  for (size_t tag = source_.find("{%", body); tag != std::string::npos;
       tag = source_.find("{%", tag + 1)) {
    const char after = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    const char sign = after == '-' || after == '+' ? after : ' ';
    const size_t inner = tag + (sign == ' ' ? 2 : 3);
    const std::string_view rest = strip_left(std::string_view(source_).substr(inner));
    if (!rest.starts_with("endraw")) {
      continue;
    }
    const size_t end = source_.size() - strip_left(rest.substr(6)).size();
    const bool signed_end = at(end, "-%}") || at(end, "+%}");
    if (!signed_end && !at(end, "%}")) {
      continue;
    }
    emit_text(tag, sign, true);
    position_ = end;
    eat_end("%}", true);
    return {};
  }
  return error("a raw block is not closed; end it with {% endraw %}");
}

Status Lexer::lex_tag(TokenKind begin, TokenKind end, std::string_view closer) {
  emit(begin, "");
  while (true) {
    skip_space();
    if (position_ >= source_.size()) {
      return error(fmt::format("a tag is not closed; end it with {}", closer));
    }
    if (brackets_.empty()) {
      const int line = line_at(position_);
      if (eat_end(closer, end == TokenKind::kBlockEnd)) {
        tokens_.push_back({end, "", line});
        return {};
      }
    }
    NIBBLE_RETURN_IF_ERROR(lex_token());
  }
}

Status Lexer::track_bracket(char bracket) {
  constexpr std::string_view kOpen = "([{";
  constexpr std::string_view kClose = ")]}";
  if (kOpen.find(bracket) != std::string_view::npos) {
    brackets_.push_back(bracket);
  } else if (const size_t type = kClose.find(bracket); type != std::string_view::npos) {
    if (brackets_.empty() || brackets_.back() != kOpen[type]) {
      return error(fmt::format("unexpected '{}'", bracket));
    }
    brackets_.pop_back();
  }
  return {};
}

Status Lexer::lex_token() {
  const char c = source_[position_];
  if (is_digit(c)) {
    return lex_number();
  }
  if (c == '"' || c == '\'') {
    return lex_string();
  }
  if (is_word(c)) {
    size_t end = position_;
    while (end < source_.size() && is_word(source_[end])) {
      ++end;
    }
    emit(TokenKind::kName, source_.substr(position_, end - position_));
    position_ = end;
    return {};
  }
  constexpr std::array<std::string_view, 6> kTwo = {"==", "!=", "<=", ">=", "//", "**"};
  for (const std::string_view op : kTwo) {
    if (at(op)) {
      emit(TokenKind::kOperator, std::string(op));
      position_ += 2;
      return {};
    }
  }
  constexpr std::string_view kOne = "+-*/%~<>=()[]{}.,:|";
  if (kOne.find(c) == std::string_view::npos) {
    return error(fmt::format("unexpected character '{}'", c));
  }
  NIBBLE_RETURN_IF_ERROR(track_bracket(c));
  emit(TokenKind::kOperator, std::string(1, c));
  ++position_;
  return {};
}

Status Lexer::lex_number() {
  const auto digit_at = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
  size_t end = position_;
  const auto eat_digits = [&] {
    while (digit_at(end) || (end < source_.size() && source_[end] == '_' && digit_at(end + 1))) {
      ++end;
    }
  };
  const char prefix = position_ + 1 < source_.size() ? source_[position_ + 1] : ' ';
  constexpr std::string_view kPrefixes = "xXoObB";
  if (source_[position_] == '0' && kPrefixes.find(prefix) != std::string_view::npos) {
    end += 2;
    while (end < source_.size() && (is_hex(source_[end]) || source_[end] == '_')) {
      ++end;
    }
    emit(TokenKind::kInteger, source_.substr(position_, end - position_));
    position_ = end;
    return {};
  }
  eat_digits();
  bool is_float = false;
  const bool after_dot = position_ > 0 && source_[position_ - 1] == '.';  // x.0.1 is two indices
  if (!after_dot && end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
    ++end;
    eat_digits();
    is_float = true;
  }
  if (!after_dot && end < source_.size() && (source_[end] | 0x20) == 'e') {
    const bool has_sign = at(end + 1, "+") || at(end + 1, "-");
    if (digit_at(end + (has_sign ? 2 : 1))) {
      end += has_sign ? 2 : 1;
      eat_digits();
      is_float = true;
    }
  }
  emit(is_float ? TokenKind::kFloat : TokenKind::kInteger,
       source_.substr(position_, end - position_));
  position_ = end;
  return {};
}

Status Lexer::lex_string() {
  const char quote = source_[position_];
  size_t end = position_ + 1;
  while (end < source_.size() && source_[end] != quote) {
    end += source_[end] == '\\' ? 2 : 1;
  }
  if (end >= source_.size()) {
    return error("a string is not closed");
  }
  NIBBLE_ASSIGN_OR_RETURN(std::string value, unescape(std::string_view(source_).substr(
                                                          position_ + 1, end - position_ - 1),
                                                      line_at(position_)));
  emit(TokenKind::kString, std::move(value));
  position_ = end + 1;
  return {};
}

}  // namespace

Result<std::vector<Token>> tokenize(std::string_view source) {
  return Lexer(normalize_newlines(source)).run();
}

}  // namespace nibble::jinja
