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

/// A macro that matches what all of `pattern` does, for patterns of our own: without "?" behind
/// groups and without empty alternatives, which xgrammar 0.2.8 gets wrong.
[[nodiscard]] std::string ebnf_regex(std::string_view pattern);
/// The definition of a rule for the characters of a JSON string, at most `most` of them:
/// GrammarText has to know the smallest such limit.
[[nodiscard]] std::string ebnf_limited(std::string_view rule, std::string_view body, int64_t most);

}  // namespace nibble
