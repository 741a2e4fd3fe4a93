#include "text/grammar/ebnf_check.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include "text/grammar/grammar_cost.h"

namespace nibble {
namespace {

constexpr size_t kMostBytes = size_t{64} << 10;
constexpr int64_t kMostInBraces = 1000;
constexpr int64_t kMostTogether = 2000;

Status error_at(size_t at, std::string_view what) {
  return make_error(StatusCode::kInvalidArgument, "byte {} of the grammar: {}", at, what);
}

/// The end of a literal or a class that begins at `at`, past its last character.
size_t end_of_quoted(std::string_view text, size_t at) {
  const char end = text[at] == '[' ? ']' : text[at];
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == end) {
      return i + 1;
    }
  }
  return text.size();
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

size_t end_of_name(std::string_view text, size_t at) {
  while (at < text.size() && is_name(text[at])) {
    ++at;
  }
  return at;
}

/// Largest number within braces.
Result<int64_t> largest_count(std::string_view text, size_t begin, size_t end) {
  int64_t most = 1;
  for (size_t i = begin; i < end;) {
    int64_t value = 0;
    const auto [next, failed] = std::from_chars(text.data() + i, text.data() + end, value);
    if (failed == std::errc::result_out_of_range || value > kMostInBraces) {
      return error_at(i, fmt::format("more than {} repetitions", kMostInBraces));
    }
    most = std::max(most, value);
    i = failed == std::errc() ? static_cast<size_t>(next - text.data()) : i + 1;
  }
  return most;
}

/// Whether a pair of braces allows nothing: {0,3}, {,3}.
bool from_nothing(std::string_view text, size_t begin) {
  const size_t first = text.find_first_not_of(' ', begin);
  return first != std::string_view::npos && (text[first] == '0' || text[first] == ',');
}

/// Takes down what a single character says of the parts around it.
void count_character(char c, PartCosts& cost) {
  if (c == '(') {
    cost.group_begin();
  } else if (c == ')' && cost.depth() > 1) {
    cost.group_end();
  } else if (c == '?' || c == '*') {
    cost.may_be_empty();
  } else if (c == '|' || c == '=') {
    cost.end_alternative();
  }
}

}  // namespace

Status check_ebnf(std::string_view text) {
  if (text.size() > kMostBytes) {
    return make_error(StatusCode::kInvalidArgument,
                      "the grammar has {} bytes, but at most {} are allowed", text.size(),
                      kMostBytes);
  }
  int64_t together = 1;
  PartCosts cost;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '#') {
      at = std::min(text.find('\n', at), text.size());
    } else if (c == '"' || (c == '[' && (at == 0 || !is_name(text[at - 1])))) {
      const size_t end = end_of_quoted(text, at);
      const auto bytes = static_cast<int64_t>(end - at);
      cost.item(c == '[' ? kAnyCharacterCost : std::max(kLeastPartCost, kLiteralCost * bytes));
      at = end;
    } else if (c == '[') {
      return error_at(at, "options of rules are not supported; put a blank before a class");
    } else if (c == '(' && at > 0 && is_name(text[at - 1])) {
      return error_at(at, "macros are not supported; put a blank before a group");
    } else if (c == '{') {
      const size_t end = std::min(text.find('}', at), text.size());
      NIBBLE_ASSIGN_OR_RETURN(const int64_t most, largest_count(text, at + 1, end));
      together *= most;
      if (together > kMostTogether) {
        return error_at(at,
                        fmt::format("all repetitions multiplied are more than {}", kMostTogether));
      }
      cost.repeat(most);
      if (from_nothing(text, at + 1)) {
        cost.may_be_empty();
      }
      at = end;
    } else if (is_name(c)) {
      cost.item(kLeastPartCost);  // a rule, which may be empty
      cost.may_be_empty();
      at = end_of_name(text, at);
    } else {
      count_character(c, cost);
      ++at;
    }
    if (cost.too_much()) {
      return error_at(at, "the grammar is too large, with its repetitions written out");
    }
  }
  return {};
}

}  // namespace nibble
