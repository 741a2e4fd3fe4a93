#include "base/glob.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/utf8.h"

namespace nibble {
namespace {

using Text = std::u32string;

/// By code points; a byte that begins no character is one.
Text decoded(std::string_view text) {
  Text out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    auto point = static_cast<char32_t>(static_cast<unsigned char>(text[i]));
    if (length > 1) {
      point &= 0xFFU >> (length + 1);
    }
    for (size_t next = 1; next < length; ++next) {
      point = point << 6U | (static_cast<unsigned char>(text[i + next]) & 0x3FU);
    }
    out.push_back(point);
    i += std::max<size_t>(length, 1);
  }
  return out;
}

/// What stands between brackets.
struct Class {
  size_t end = 0;  // behind the closing bracket
  bool negated = false;
  std::vector<std::pair<char32_t, char32_t>> ranges;

  [[nodiscard]] bool contains(char32_t c) const {
    const bool named = std::ranges::any_of(
        ranges, [c](const auto& range) { return range.first <= c && c <= range.second; });
    return named != negated;
  }
};

/// The parts of a class between the hyphens that make ranges of what is on either side; of ranges
/// that hold nothing both ends are gone, as Python has it.
std::vector<Text> parts_of(const Text& content) {
  std::vector<Text> parts;
  size_t begin = 0;
  size_t hyphen = content.find(U'-', content[0] == U'!' ? 2 : 1);
  while (hyphen != Text::npos) {
    parts.push_back(content.substr(begin, hyphen - begin));
    begin = hyphen + 1;
    hyphen = content.find(U'-', hyphen + 3);
  }
  if (begin < content.size() || parts.empty()) {
    parts.push_back(content.substr(begin));
  } else {
    parts.back() += U'-';
  }
  for (size_t i = parts.size() - 1; i > 0; --i) {
    if (parts[i - 1].back() > parts[i].front()) {
      parts[i - 1] = parts[i - 1].substr(0, parts[i - 1].size() - 1) + parts[i].substr(1);
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return parts;
}

/// The class that begins at a '['; empty where it is not closed.
std::optional<Class> parse_class(const Text& pattern, size_t at) {
  const size_t begin = at + 1;
  size_t end = begin;
  end += end < pattern.size() && pattern[end] == U'!' ? 1 : 0;
  end += end < pattern.size() && pattern[end] == U']' ? 1 : 0;
  end = pattern.find(U']', end);
  if (end == Text::npos) {
    return std::nullopt;
  }
  Class out{.end = end + 1, .negated = false, .ranges = {}};
  std::vector<Text> parts = parts_of(pattern.substr(begin, end - begin));
  if (parts.front().starts_with(U'!')) {
    out.negated = true;
    parts.front().erase(0, 1);
    if (parts.front().empty() && parts.size() > 1) {  // "[!-a]": no range
      parts.front() = U"-" + parts[1];
      parts.erase(parts.begin() + 1);
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const char32_t c : parts[i]) {
      out.ranges.emplace_back(c, c);
    }
    if (i > 0) {
      out.ranges.emplace_back(parts[i - 1].back(), parts[i].front());
    }
  }
  return out;
}

/// Where the pattern goes on behind what matches `c` at `at`; empty: nothing does.
std::optional<size_t> match_one(const Text& pattern, size_t at, char32_t c) {
  if (at == pattern.size()) {
    return std::nullopt;
  }
  if (pattern[at] == U'[') {
    if (const auto found = parse_class(pattern, at)) {
      return found->contains(c) ? std::optional(found->end) : std::nullopt;
    }
  }
  return pattern[at] == U'?' || pattern[at] == c ? std::optional(at + 1) : std::nullopt;
}

}  // namespace

bool matches_glob(std::string_view pattern_text, std::string_view text_text) {
  const Text pattern = decoded(pattern_text);
  const Text text = decoded(text_text);
  size_t p = 0;
  size_t t = 0;
  size_t star = Text::npos;  // behind the last '*' that was met, and what it covers up to
  size_t covered = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == U'*') {
      star = ++p;
      covered = t;
    } else if (const auto next = match_one(pattern, p, text[t])) {
      p = *next;
      ++t;
    } else if (star != Text::npos) {
      p = star;
      t = ++covered;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of(U'*', p) == Text::npos;
}

}  // namespace nibble
