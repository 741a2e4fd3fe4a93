#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nibble {

/// Some of the ASCII characters, by their codes.
using AsciiSet = std::bitset<128>;

/// The set of an escape \d, \w, \s, \D, \W or \S within ASCII; nothing for other texts.
[[nodiscard]] std::optional<AsciiSet> shorthand(std::string_view escape);
/// The code point of a character as a regular expression writes it; of UTF-8, its first byte, which
/// is beyond ASCII.
[[nodiscard]] uint32_t character_value(std::string_view written);
/// What a string of JSON cannot have but as an escape.
[[nodiscard]] AsciiSet escaped_in_json();
/// The members as they stand within [ ] of EBNF, as ranges.
[[nodiscard]] std::string ascii_ranges(const AsciiSet& set);

}  // namespace nibble
