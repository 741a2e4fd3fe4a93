#include "text/grammar/ebnf.h"

#include <fmt/format.h>

namespace nibble {
namespace {

/// Between double quotes; what is no printable ASCII byte of its own is a code point already.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04x}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

std::string ebnf_literal(std::string_view text) { return quoted(text); }

std::string ebnf_token(int32_t id) { return fmt::format("Token({})", id); }

std::string ebnf_class_character(uint32_t code_point) {
  return fmt::format("\\U{:08x}", code_point);
}

std::string ebnf_regex(std::string_view pattern) {
  return fmt::format("Regex({})", quoted(pattern));
}

std::string ebnf_limited(std::string_view rule, std::string_view body, int64_t most) {
  return fmt::format("{}[temperature={}] ::= {}\n", rule, most, body);
}

}  // namespace nibble
