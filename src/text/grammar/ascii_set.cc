#include "text/grammar/ascii_set.h"

#include <charconv>

#include "text/grammar/ebnf.h"

namespace nibble {

std::optional<AsciiSet> shorthand(std::string_view escape) {
  if (escape.size() != 2 || escape[0] != '\\' ||
      std::string_view("dwsDWS").find(escape[1]) == std::string_view::npos) {
    return std::nullopt;
  }
  AsciiSet out;
  for (unsigned char c = 0; c < out.size(); ++c) {
    const bool digit = c >= '0' && c <= '9';
    const bool word = digit || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    const auto kind = static_cast<char>(escape[1] | 0x20);
    const bool among = (kind == 'd' && digit) || (kind == 'w' && word) || (kind == 's' && space);
    out.set(c, among == (escape[1] == kind));
  }
  return out;
}

uint32_t character_value(std::string_view written) {
  if (written.size() < 2 || written[0] != '\\') {
    return static_cast<unsigned char>(written[0]);
  }
  constexpr std::string_view kControls = "n\nr\rt\tf\fv\v";
  if (written[1] == 'x' || written[1] == 'u') {
    uint32_t value = 0;
    std::from_chars(written.data() + 2, written.data() + written.size(), value, 16);
    return value;
  }
  for (size_t i = 0; i < kControls.size(); i += 2) {
    if (kControls[i] == written[1]) {
      return static_cast<unsigned char>(kControls[i + 1]);
    }
  }
  return static_cast<unsigned char>(written[1]);
}

AsciiSet escaped_in_json() {
  AsciiSet out;
  for (size_t c = 0; c < 0x20; ++c) {
    out.set(c);
  }
  out.set('"');
  out.set('\\');
  return out;
}

std::string ascii_ranges(const AsciiSet& set) {
  std::string out;
  for (size_t c = 0; c < set.size(); ++c) {
    if (!set[c] || (c > 0 && set[c - 1])) {
      continue;
    }
    size_t last = c;
    while (last + 1 < set.size() && set[last + 1]) {
      ++last;
    }
    out += ebnf_class_character(static_cast<uint32_t>(c)) + "-" +
           ebnf_class_character(static_cast<uint32_t>(last));
  }
  return out;
}

}  // namespace nibble
