#pragma once

#include <cstddef>
#include <string_view>

namespace nibble {

/// Bytes of the valid UTF-8 sequence at byte `i` of `text`, 1 to 4; 0 if none starts there
/// (overlong forms, surrogates and values above U+10FFFF are not valid).
[[nodiscard]] size_t utf8_length(std::string_view text, size_t i);
[[nodiscard]] bool is_utf8(std::string_view text);

}  // namespace nibble
