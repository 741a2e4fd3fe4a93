#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nibble {

/// U+FFFD in UTF-8.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// What starts at one position of a byte string.
enum class Utf8Unit {
  kCharacter,   // a complete character
  kInvalid,     // bytes that no continuation can make valid
  kIncomplete,  // the text ends inside a character that is valid so far
};

struct Utf8Step {
  Utf8Unit unit;
  size_t length;  // bytes of it, at least 1
};

/// Classifies the bytes at `position` (< text.size()). Invalid bytes are grouped as Unicode's
/// "maximal subparts" (chapter 3.9), so one replacement character stands for one group. Overlong
/// forms, surrogates and values above U+10FFFF are invalid.
[[nodiscard]] Utf8Step utf8_step(std::string_view text, size_t position);

/// True if all of `text` is well-formed UTF-8.
[[nodiscard]] bool utf8_valid(std::string_view text);

/// Characters of valid UTF-8.
[[nodiscard]] int64_t utf8_length(std::string_view text);

/// `text` with each invalid group replaced by U+FFFD.
[[nodiscard]] std::string utf8_repaired(std::string_view text);

/// Code point at the start of `character`, which is one complete character.
[[nodiscard]] char32_t utf8_decode(std::string_view character);

/// Appends the UTF-8 form of `code_point` (a Unicode scalar value).
void append_utf8(std::string& out, char32_t code_point);

}  // namespace nibble
