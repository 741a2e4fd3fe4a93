#pragma once

#include <string_view>

namespace nibble {

/// Whether `text` matches a pattern of file names as Python's fnmatch.fnmatchcase() has them: '*'
/// any text, '?' one character (of UTF-8), "[a-cx]" one of some, "[!a-cx]" one of the others; a '['
/// that is not closed is itself, and nothing is escaped but by brackets: "[*]".
[[nodiscard]] bool matches_glob(std::string_view pattern, std::string_view text);

}  // namespace nibble
