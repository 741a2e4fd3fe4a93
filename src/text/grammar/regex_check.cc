#include "text/grammar/regex_check.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "text/grammar/ascii_set.h"
#include "text/grammar/ebnf.h"
#include "text/grammar/grammar_cost.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

constexpr size_t kMostBytes = 8192;
constexpr size_t kMostGroups = 64;
// Measured with 128,000 tokens: with 128 repetitions of a group with alternatives a mask takes 1
// ms, with far more of them seconds.
constexpr int64_t kMostGroupTimes = 128;
constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kHexDigits = "0123456789abcdefABCDEF";

/// Goes through an expression once, from left to right.
class RegexCheck final {
 public:
  RegexCheck(std::string_view pattern, RegexPlace place) : pattern_(pattern), place_(place) {}

  Result<CheckedRegex> run();

 private:
  struct Group {
    int64_t times = 1;  // repetitions of a part, the most
    size_t begin = 0;   // in the pattern
    bool empty = true;  // the alternative so far
  };
  // What a quantifier repeats.
  struct Item {
    bool there = false;  // false: there is nothing to repeat
    int64_t times = 1;
    bool group = false;
  };

  Status step();
  Status group_begin();
  Status group_end();
  // What a class has, as far as it is ASCII.
  struct ClassMembers {
    AsciiSet ascii;
    bool shorthand = false;
    bool beyond_ascii = false;
    std::optional<uint32_t> last, range_from;
  };

  Status character_class();
  Status class_member(ClassMembers& members);
  Status escape(bool in_class);
  Status quantifier();
  Result<int64_t> count();
  Status item(int64_t cost);
  [[nodiscard]] Status check_cost() const;
  Status literal();
  void end_alternative();
  Status write_class(const AsciiSet& set);
  Status write_character(std::string_view text);

  [[nodiscard]] std::string_view rest() const { return pattern_.substr(at_); }
  [[nodiscard]] Status error(std::string_view what) const {
    return make_error(StatusCode::kInvalidArgument, "byte {} of the regular expression: {}", at_,
                      what);
  }

  std::string_view pattern_;
  RegexPlace place_;
  size_t at_ = 0;
  std::string out_;
  std::vector<Group> groups_ = {Group{}};
  PartCosts costs_;
  Item last_;
};

Result<CheckedRegex> RegexCheck::run() {
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
  end_alternative();
  return CheckedRegex{"(" + out_ + ")", costs_.total()};
}

void RegexCheck::end_alternative() {
  if (groups_.back().empty) {
    out_ += "\"\"";
  }
  groups_.back().empty = true;
  last_ = {};
}

/// One of some ASCII characters, as far as the place has them.
Status RegexCheck::write_class(const AsciiSet& set) {
  const AsciiSet kept = place_ == RegexPlace::kJsonString ? set & ~escaped_in_json() : set;
  if (kept.none()) {
    return error("no character is left that may come here");
  }
  out_ += fmt::format(" [{}]", ascii_ranges(kept));
  return {};
}

/// One character; in a string of JSON a quote and a backslash are escapes.
Status RegexCheck::write_character(std::string_view text) {
  const bool json = place_ == RegexPlace::kJsonString;
  const auto byte = static_cast<unsigned char>(text[0]);
  if (json && text.size() == 1 && byte < 0x20) {
    return error("control characters do not stand in strings of JSON");
  }
  const bool escaped = json && (text == "\"" || text == "\\");
  out_ += " " + ebnf_literal(escaped ? "\\" + std::string(text) : std::string(text));
  return {};
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
      end_alternative();
      costs_.end_alternative();
      out_ += " |";
      ++at_;
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
  if (byte < 0x20 || byte == 0x7f) {
    return error("write control characters as escapes");
  }
  if (pattern_[at_] == '.') {
    out_ += place_ == RegexPlace::kJsonString ? R"( [^\"\\\x00-\x1f])" : R"( [^\n\r])";
    ++at_;
    return item(kAnyCharacterCost);
  }
  const size_t length = utf8_step(pattern_, at_).length;
  NIBBLE_RETURN_IF_ERROR(write_character(pattern_.substr(at_, length)));
  at_ += length;
  return item(kLeastPartCost);
}

Status RegexCheck::group_begin() {
  if (groups_.size() > kMostGroups) {
    return error("too many nested groups");
  }
  groups_.push_back({.begin = at_});
  costs_.group_begin();
  last_ = {};
  ++at_;
  out_ += " (";
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
  end_alternative();
  const Group group = groups_.back();
  groups_.pop_back();
  out_ += ")";
  ++at_;
  costs_.group_end();
  groups_.back().empty = false;
  groups_.back().times = std::max(groups_.back().times, group.times);
  last_ = {.there = true, .times = group.times, .group = true};
  return check_cost();
}

Status RegexCheck::item(int64_t cost) {
  last_ = {.there = true};
  groups_.back().empty = false;
  costs_.item(cost);
  return check_cost();
}

Status RegexCheck::check_cost() const {
  return costs_.too_much() ? error(
                                 "the expression takes too long to prepare, with its repetitions "
                                 "written out and its parts that may be left out")
                           : Status();
}

/// A class with \d, \w or \s, which dialects read differently beyond ASCII, is one of ASCII alone.
Status RegexCheck::character_class() {
  const size_t begin = at_++;
  const bool negated = rest().starts_with('^');
  at_ += negated ? 1 : 0;
  if (rest().starts_with(']')) {
    return error("an empty class, or one that begins with a bracket that is not escaped");
  }
  const size_t first = at_;
  ClassMembers members;
  while (at_ < pattern_.size() && pattern_[at_] != ']') {
    NIBBLE_RETURN_IF_ERROR(class_member(members));
  }
  if (at_ == pattern_.size()) {
    at_ = begin;
    return error("this class has no end");
  }
  const std::string_view written = pattern_.substr(first, at_ - first);
  ++at_;
  const bool json = place_ == RegexPlace::kJsonString;
  if (members.beyond_ascii && members.shorthand) {
    at_ = begin;
    return error("\\d, \\w and \\s beside characters beyond ASCII are not enforced");
  }
  if (members.beyond_ascii) {
    if (!negated && json && (members.ascii & escaped_in_json()).any()) {
      at_ = begin;
      return error("characters that JSON escapes beside those beyond ASCII are not enforced");
    }
    out_ += fmt::format(" [{}{}{}]", negated ? "^" : "",
                        negated && json ? ascii_ranges(escaped_in_json()) : "", written);
  } else if (negated && !members.shorthand) {
    out_ += fmt::format(" [^{}]",
                        ascii_ranges(json ? members.ascii | escaped_in_json() : members.ascii));
  } else {
    NIBBLE_RETURN_IF_ERROR(write_class(negated ? ~members.ascii : members.ascii));
  }
  const AsciiSet set = negated ? ~members.ascii : members.ascii;
  return item(members.beyond_ascii ? kAnyCharacterCost : class_cost(set));
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
    if (byte < 0x20 || byte == 0x7f) {
      return error("write control characters as escapes");
    }
    at_ += utf8_step(pattern_, at_).length;
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
  const std::string_view written = rest().substr(0, length);
  if (in_class) {
    at_ += length;
    return {};
  }
  if (const auto set = shorthand(written)) {
    NIBBLE_RETURN_IF_ERROR(write_class(*set));
  } else {
    std::string text;
    append_utf8(text, character_value(written));
    NIBBLE_RETURN_IF_ERROR(write_character(text));
  }
  at_ += length;
  const auto set = shorthand(written);
  return item(set ? class_cost(*set) : kLeastPartCost);
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
  at_ += digits;
  return value;
}

Status RegexCheck::quantifier() {
  if (!last_.there) {
    return error("there is nothing to repeat");
  }
  const size_t begin = at_;
  int64_t least = pattern_[at_] == '+' ? 1 : 0;
  int64_t most = 1;
  if (pattern_[at_] == '{') {
    ++at_;
    NIBBLE_ASSIGN_OR_RETURN(least, count());
    most = least;
    if (rest().starts_with(',')) {
      ++at_;
      if (!rest().starts_with('}')) {
        NIBBLE_ASSIGN_OR_RETURN(most, count());
      }
    }
    if (!rest().starts_with('}') || most < least) {
      return error("expected {n}, {n,} or {n,m} with n not above m");
    }
  }
  ++at_;
  out_ += pattern_.substr(begin, at_ - begin);
  if (rest().starts_with('?')) {  // lazy: the same texts match
    ++at_;
  }
  most = std::max<int64_t>(most, 1);
  const int64_t times = last_.times * most;
  if (last_.group && most > 1 && times > kMostGroupTimes) {
    return error(fmt::format("more than {} repetitions of a group", kMostGroupTimes));
  }
  groups_.back().times = std::max(groups_.back().times, times);
  last_ = {};
  costs_.repeat(most);
  if (least == 0) {
    costs_.may_be_empty();
  }
  return check_cost();
}

}  // namespace

Result<CheckedRegex> check_regex(std::string_view pattern, RegexPlace place) {
  return RegexCheck(pattern, place).run();
}

}  // namespace nibble
