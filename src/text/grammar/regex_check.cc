#include "text/grammar/regex_check.h"

#include <algorithm>
#include <bitset>
#include <charconv>
#include <cstdint>
#include <optional>
#include <vector>

#include <fmt/format.h>

namespace nibble {
namespace {

constexpr size_t kMostBytes = 8192;
constexpr size_t kMostGroups = 64;
constexpr int64_t kMostRepetitions = 10000;
constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kHexDigits = "0123456789abcdefABCDEF";

using AsciiSet = std::bitset<128>;

/// The set of \\d, \\w, \\s and of their opposites within ASCII.
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
    const bool among = kind == 'd' ? digit : kind == 'w' ? word : space;
    out.set(c, among == (escape[1] == kind));
  }
  return out;
}

/// The code point of a character as it is written; of those beyond ASCII, any beyond ASCII.
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

std::string ascii_class(const AsciiSet& set) {
  std::string out = "[";
  for (size_t c = 1; c < set.size(); ++c) {
    if (!set[c] || (c > 1 && set[c - 1])) {
      continue;
    }
    size_t last = c;
    while (last + 1 < set.size() && set[last + 1]) {
      ++last;
    }
    out += fmt::format("\\x{:02x}-\\x{:02x}", c, last);
  }
  return out + "]";
}

/// Goes through an expression once, from left to right.
class RegexCheck final {
 public:
  RegexCheck(std::string_view pattern, RegexPlace place) : pattern_(pattern), place_(place) {}

  Result<std::string> run();

 private:
  // Repetitions of what is within a group, of its largest alternative part so far.
  struct Group {
    int64_t inner = 1;  // the most that parts of it have
    size_t begin = 0;   // in the pattern
  };

  Status step();
  Status group_begin();
  Status group_end();
  // What a class has, as far as it is ASCII.
  struct ClassMembers {
    std::bitset<128> ascii;
    bool shorthand = false;
    bool beyond_ascii = false;
    std::optional<uint32_t> last, range_from;
  };

  Status character_class();
  Status class_member(ClassMembers& members);
  Status escape(bool in_class);
  Status quantifier();
  Result<int64_t> count();
  Status item(int64_t inner);
  Status literal();

  [[nodiscard]] std::string_view rest() const { return pattern_.substr(at_); }
  void take(size_t bytes) {
    out_ += pattern_.substr(at_, bytes);
    at_ += bytes;
  }
  [[nodiscard]] Status error(std::string_view what) const {
    return make_error(StatusCode::kInvalidArgument, "byte {} of the regular expression: {}", at_,
                      what);
  }

  std::string_view pattern_;
  RegexPlace place_;
  size_t at_ = 0;
  std::string out_;
  std::vector<Group> groups_ = {Group{}};
  int64_t last_ = 0;  // repetitions within the item before; 0: nothing to repeat
};

Result<std::string> RegexCheck::run() {
  if (pattern_.size() > kMostBytes) {
    return make_error(StatusCode::kInvalidArgument,
                      "the regular expression has {} bytes, but at most {} are allowed",
                      pattern_.size(), kMostBytes);
  }
  // An anchor at an end holds for the whole only where no alternative is beside it.
  if (pattern_.starts_with('^')) {
    ++at_;
  }
  while (at_ < pattern_.size()) {
    if (rest() == "$") {
      ++at_;
      break;
    }
    NIBBLE_RETURN_IF_ERROR(step());
  }
  if (groups_.size() > 1) {
    at_ = groups_.back().begin;
    return error("this group has no end");
  }
  return std::move(out_);
}

Status RegexCheck::step() {
  switch (pattern_[at_]) {
    case '(':
      return group_begin();
    case ')':
      return group_end();
    case '[':
      return character_class();
    case '\\':
      return escape(false);
    case '*':
    case '+':
    case '?':
    case '{':
      return quantifier();
    case '|':
      last_ = 0;
      take(1);
      return {};
    case '^':
    case '$':
      return error("anchors are allowed at both ends of the whole expression alone");
    case ']':
    case '}':
      return error("escape this bracket with a backslash");
    default:
      return literal();
  }
}

Status RegexCheck::literal() {
  const auto byte = static_cast<unsigned char>(pattern_[at_]);
  if (byte < 0x20 || byte == 0x7f || (place_ == RegexPlace::kJsonString && byte > 0x7e)) {
    return error(place_ == RegexPlace::kJsonString
                     ? "only printable ASCII is enforced in strings of JSON"
                     : "write control characters as escapes");
  }
  if (pattern_[at_] == '.') {  // but for line breaks, which strings of JSON lack anyway
    out_ += place_ == RegexPlace::kJsonString ? "." : "[^\\n\\r]";
    ++at_;
    return item(1);
  }
  take(1);
  while (at_ < pattern_.size() && (static_cast<unsigned char>(pattern_[at_]) & 0xC0U) == 0x80U) {
    take(1);
  }
  return item(1);
}

Status RegexCheck::group_begin() {
  if (groups_.size() > kMostGroups) {
    return error("too many nested groups");
  }
  groups_.push_back({.inner = 1, .begin = at_});
  last_ = 0;
  ++at_;
  out_ += '(';
  if (!rest().starts_with('?')) {
    return {};
  }
  const std::string_view name = rest().substr(1, rest().starts_with("?P<") ? 2 : 1);
  if (rest().starts_with("?:")) {
    at_ += 2;
    return {};
  }
  const size_t end = rest().find('>');
  const bool named = (name == "<" || name == "P<") && end != std::string_view::npos &&
                     end > name.size() + 1 &&
                     rest().substr(0, end).find_first_of("=!") == std::string_view::npos;
  if (!named) {
    return error("lookahead, lookbehind and flags are not enforced");
  }
  at_ += end + 1;
  return {};
}

Status RegexCheck::group_end() {
  if (groups_.size() == 1) {
    return error("this bracket ends no group; escape it with a backslash");
  }
  const int64_t inner = groups_.back().inner;
  groups_.pop_back();
  take(1);
  return item(inner);
}

Status RegexCheck::item(int64_t inner) {
  last_ = inner;
  groups_.back().inner = std::max(groups_.back().inner, inner);
  return {};
}

/// A class with \d, \w or \s, which dialects read differently beyond ASCII, becomes one of ASCII
/// alone; others stay as they are written.
Status RegexCheck::character_class() {
  const size_t begin = at_;
  const size_t out_begin = out_.size();
  take(1);
  const bool negated = rest().starts_with('^');
  if (negated) {
    take(1);
  }
  if (rest().starts_with(']')) {
    return error("an empty class, or one that begins with a bracket that is not escaped");
  }
  ClassMembers members;
  while (at_ < pattern_.size() && pattern_[at_] != ']') {
    NIBBLE_RETURN_IF_ERROR(class_member(members));
  }
  if (at_ == pattern_.size()) {
    at_ = begin;
    return error("this class has no end");
  }
  take(1);
  if (members.shorthand) {
    if (members.beyond_ascii) {
      at_ = begin;
      return error("\\d, \\w and \\s beside characters beyond ASCII are not enforced");
    }
    out_.resize(out_begin);
    out_ += ascii_class(negated ? ~members.ascii : members.ascii);
  }
  return item(1);
}

/// A character, a shorthand, or the end of a range ("a", "\d", "-z").
Status RegexCheck::class_member(ClassMembers& members) {
  const size_t begin = at_;
  if (pattern_[at_] == '\\') {
    NIBBLE_RETURN_IF_ERROR(escape(true));
  } else {
    const auto byte = static_cast<unsigned char>(pattern_[at_]);
    if (byte == '[') {  // some dialects nest classes
      return error("escape this bracket with a backslash");
    }
    if (byte < 0x20 || byte == 0x7f || (place_ == RegexPlace::kJsonString && byte > 0x7e)) {
      return error("write control characters as escapes; strings of JSON take printable ASCII");
    }
    take(1);
  }
  const std::string_view written = pattern_.substr(begin, at_ - begin);
  if (const auto set = shorthand(written)) {
    members.ascii |= *set;
    members.shorthand = true;
    members.last.reset();
    if (rest().starts_with('-') && !rest().starts_with("-]")) {
      return error("a range cannot begin with a set of characters");
    }
    return {};
  }
  const uint32_t value = character_value(written);
  if (value >= members.ascii.size()) {
    members.beyond_ascii = true;
    members.last.reset();
    return {};
  }
  if (members.range_from) {
    if (value < *members.range_from) {
      return error("the range ends before it begins");
    }
    for (uint32_t c = *members.range_from; c <= value; ++c) {
      members.ascii.set(c);
    }
    members.range_from.reset();
    members.last.reset();
    return {};
  }
  if (written == "-" && members.last && !rest().starts_with(']')) {
    members.range_from = members.last;
    return {};
  }
  members.ascii.set(value);
  members.last = value;
  return {};
}

Status RegexCheck::escape(bool in_class) {
  if (rest().size() < 2) {
    return error("a backslash at the end");
  }
  const char next = rest()[1];
  size_t length = 2;
  if (next == 'x' || next == 'u') {
    length = next == 'x' ? 4 : 6;
    const std::string_view digits = rest().substr(2, length - 2);
    if (digits.size() != length - 2 ||
        digits.find_first_not_of(kHexDigits) != std::string_view::npos) {
      return error(next == 'x' ? "expected \\xHH" : "expected \\uHHHH");
    }
    uint32_t value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (value == 0 || (value >= 0xd800 && value < 0xe000)) {
      return error("no character");
    }
  } else if (std::string_view("dwsDWSnrtfv").find(next) == std::string_view::npos &&
             std::string_view("^$\\.*+?()[]{}|/-").find(next) == std::string_view::npos) {
    return error("this escape is not enforced");
  }
  if (const auto set = shorthand(rest().substr(0, 2)); set && !in_class) {
    out_ += ascii_class(*set);
    at_ += length;
  } else {
    take(length);
  }
  return in_class ? Status() : item(1);
}

Result<int64_t> RegexCheck::count() {
  size_t digits = 0;
  while (digits < rest().size() && kDigits.find(rest()[digits]) != std::string_view::npos) {
    ++digits;
  }
  if (digits == 0 || digits > 5) {
    return error("expected a number of repetitions with at most 5 digits");
  }
  int64_t value = 0;
  std::from_chars(rest().data(), rest().data() + digits, value);
  take(digits);
  return value;
}

Status RegexCheck::quantifier() {
  if (last_ == 0) {
    return error("there is nothing to repeat");
  }
  int64_t most = 1;
  if (pattern_[at_] == '{') {
    take(1);
    NIBBLE_ASSIGN_OR_RETURN(const int64_t least, count());
    most = least;
    if (rest().starts_with(',')) {
      take(1);
      if (!rest().starts_with('}')) {
        NIBBLE_ASSIGN_OR_RETURN(most, count());
      }
    }
    if (!rest().starts_with('}') || most < least) {
      return error("expected {n}, {n,} or {n,m} with n not above m");
    }
  }
  take(1);
  if (rest().starts_with('?')) {  // lazy: the same texts match
    ++at_;
  }
  const int64_t inner = last_ * std::max<int64_t>(most, 1);
  if (inner > kMostRepetitions) {
    return error(fmt::format("more than {} repetitions within each other", kMostRepetitions));
  }
  NIBBLE_RETURN_IF_ERROR(item(inner));
  last_ = 0;
  return {};
}

}  // namespace

Result<std::string> check_regex(std::string_view pattern, RegexPlace place) {
  return RegexCheck(pattern, place).run();
}

}  // namespace nibble
