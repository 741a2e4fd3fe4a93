#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace nibble {

/// Parts of grammars in xgrammar's EBNF, which is that of llama.cpp with more.

/// A literal that matches exactly `text` (UTF-8).
[[nodiscard]] std::string ebnf_literal(std::string_view text);
/// One token by its id, whatever its text: how special tokens are asked for.
[[nodiscard]] std::string ebnf_token(int32_t id);
/// A code point as it stands within [ ].
[[nodiscard]] std::string ebnf_class_character(uint32_t code_point);

/// Where the text of a regular expression stands.
enum class RegexPlace : uint8_t { kText, kJsonString };  // kJsonString: no quote, escape or control
/// A macro that matches what all of `pattern` does; check_regex() has accepted it.
[[nodiscard]] std::string ebnf_regex(std::string_view pattern, RegexPlace place);

/// The definition of a rule for the characters of a JSON string, at most `most` of them:
/// GrammarText has to know the smallest such limit.
[[nodiscard]] std::string ebnf_limited(std::string_view rule, std::string_view body, int64_t most);

}  // namespace nibble
