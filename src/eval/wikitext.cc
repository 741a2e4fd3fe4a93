#include "eval/wikitext.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/utf8.h"

namespace nibble {
namespace {

// What `\s` matches in Python's regular expressions of text.
constexpr bool is_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

struct Character {
  size_t bytes = 1;
  bool space = false;
};

Character character_at(std::string_view text, size_t at) {
  const size_t length = utf8_length(text, at);
  if (length == 0) {
    return {};
  }
  const auto first = static_cast<uint8_t>(text[at]);
  uint32_t code = length == 1 ? first : first & (0x7fU >> length);
  for (size_t i = 1; i < length; ++i) {
    code = (code << 6) | (static_cast<uint8_t>(text[at + i]) & 0x3fU);
  }
  return {.bytes = length, .space = is_space(code)};
}

std::string_view trimmed(std::string_view text) {
  size_t begin = 0;
  size_t end = 0;  // of the last character that is no space
  for (size_t at = 0; at < text.size();) {
    const Character c = character_at(text, at);
    at += c.bytes;
    if (!c.space) {
      begin = end == 0 ? at - c.bytes : begin;
      end = at;
    }
  }
  return text.substr(begin, end - begin);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, done)) {
    out.append(text, done, at - done);
    out += to;
    done = at + from.size();
  }
  out.append(text, done);
  text = std::move(out);
}

// Takes white space away behind each opening mark and in front of the closing one that follows.
void close_up(std::string& text, char open, char close) {
  std::string out;
  size_t done = 0;
  while (true) {
    const size_t begin = text.find(open, done);
    const size_t end = begin == std::string::npos ? begin : text.find(close, begin + 1);
    if (end == std::string::npos) {
      break;
    }
    out.append(text, done, begin + 1 - done);
    out += trimmed(std::string_view(text).substr(begin + 1, end - begin - 1));
    out += close;
    done = end + 1;
  }
  out.append(text, done);
  text = std::move(out);
}

bool is_title(std::string_view line) {
  constexpr std::string_view kBefore = " = ";
  constexpr std::string_view kAfter = " = ";
  if (line.size() <= kBefore.size() + kAfter.size() || !line.starts_with(kBefore) ||
      !line.ends_with(kAfter)) {
    return false;
  }
  const std::string_view name =
      line.substr(kBefore.size(), line.size() - kBefore.size() - kAfter.size());
  return name.front() != '=' && name.back() != '=';
}

}  // namespace

std::vector<std::string_view> wikitext_pages(std::string_view text) {
  std::vector<std::string_view> pages;
  size_t begin = 0;
  bool titled = false;
  const auto add = [&](size_t end) {
    const std::string_view page = text.substr(begin, end - begin);
    if (!trimmed(page).empty()) {
      pages.push_back(page);
    }
    begin = end;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (is_title(text.substr(at, end - at))) {
      if (titled) {
        add(at);
      }
      titled = true;
    }
    at = end + 1;
  }
  add(text.size());
  return pages;
}

std::string detokenized_wikitext(std::string_view page) {
  using Rule = std::pair<std::string_view, std::string_view>;
  constexpr std::array<Rule, 10> kPunctuation = {{{"s '", "s'"},
                                                  {" @-@ ", "-"},
                                                  {" @,@ ", ","},
                                                  {" @.@ ", "."},
                                                  {" : ", ": "},
                                                  {" ; ", "; "},
                                                  {" . ", ". "},
                                                  {" ! ", "! "},
                                                  {" ? ", "? "},
                                                  {" , ", ", "}}};
  constexpr std::array<Rule, 8> kRest = {{{"= = = =", "===="},
                                          {"= = =", "==="},
                                          {"= =", "=="},
                                          {" \u00b0 ", "\u00b0"},
                                          {" \n", "\n"},
                                          {"\n ", "\n"},
                                          {" N ", " 1 "},
                                          {" 's", "'s"}}};
  std::string text(page);
  for (const auto& [from, to] : kPunctuation) {
    replace_all(text, from, to);
  }
  close_up(text, '(', ')');
  close_up(text, '[', ']');
  close_up(text, '{', '}');
  close_up(text, '"', '"');
  close_up(text, '\'', '\'');
  for (const auto& [from, to] : kRest) {
    replace_all(text, from, to);
  }
  return text;
}

int64_t words_of(std::string_view page) {
  int64_t words = 1;
  bool in_space = false;
  for (size_t at = 0; at < page.size();) {
    const Character c = character_at(page, at);
    words += c.space && !in_space ? 1 : 0;
    in_space = c.space;
    at += c.bytes;
  }
  return words;
}

}  // namespace nibble
