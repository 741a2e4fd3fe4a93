#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Where the text of a regular expression stands.
enum class RegexPlace : uint8_t { kText, kJsonString };  // kJsonString: between quotes

/// What check_regex() says of an expression.
struct CheckedRegex {
  std::string ebnf;
  int64_t cost = 0;  // as in grammar_cost.h, with its repetitions written out
};

/// Checks that a regular expression is one that a grammar enforces: characters, ".", classes, the
/// escapes \d \w \s \D \W \S \n \r \t \f \v \xHH \uHHHH and those of punctuation, groups, "|",
/// the quantifiers * + ? {n} {n,} {n,m}, lazy or not, and the anchors ^ and $ at both ends. All of
/// a text has to match. Returns the expression in EBNF: xgrammar 0.2.8 makes automata of regular
/// expressions that match too much (x(ab*)?y matches "xby").
/// Errors: kInvalidArgument, with the byte, for anything else (assertions, back references, \b,
/// flags), above 8192 bytes or 64 nested groups, for a group that is repeated more than 128 times
/// and above kMostGrammarCost.
[[nodiscard]] Result<CheckedRegex> check_regex(std::string_view pattern, RegexPlace place);

}  // namespace nibble
