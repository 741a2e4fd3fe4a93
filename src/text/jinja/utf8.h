#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nibble::jinja {

/// Code point at byte `offset`, advancing it. Bytes that are no UTF-8 count as one code point each
/// (their own value plus 0xdc00, as Python's surrogateescape does), so nothing is lost.
[[nodiscard]] uint32_t next_code_point(std::string_view text, size_t& offset);
/// Appends the UTF-8 form; values made by next_code_point from stray bytes become that byte again.
void append_code_point(std::string& out, uint32_t code_point);
/// All code points of `text`.
[[nodiscard]] std::vector<uint32_t> code_points(std::string_view text);
[[nodiscard]] std::string from_code_points(const std::vector<uint32_t>& points);
/// Number of code points: Python's len().
[[nodiscard]] size_t count_code_points(std::string_view text);
/// Byte offset of code point number `index`, or text.size() if there are fewer.
[[nodiscard]] size_t byte_offset(std::string_view text, size_t index);

/// Python's str.isspace for one code point.
[[nodiscard]] bool is_space(uint32_t code_point);
/// False for what Python's repr escapes: controls, blanks other than space, format characters.
[[nodiscard]] bool is_printable(uint32_t code_point);
/// Letters of ASCII, Latin-1, Latin Extended-A, Greek and Cyrillic; other code points are letters
/// without case when they are above U+02FF and not punctuation.
[[nodiscard]] bool is_letter(uint32_t code_point);
/// Simple case mapping of the alphabets named above; others are returned unchanged.
[[nodiscard]] uint32_t to_upper(uint32_t code_point);
[[nodiscard]] uint32_t to_lower(uint32_t code_point);
[[nodiscard]] std::string upper(std::string_view text);
[[nodiscard]] std::string lower(std::string_view text);
/// First letter of the text upper, the rest lower.
[[nodiscard]] std::string capitalize(std::string_view text);

/// `text` without leading (trailing) white space.
[[nodiscard]] std::string_view strip_left(std::string_view text);
[[nodiscard]] std::string_view strip_right(std::string_view text);
/// Python's splitlines without the line ends.
[[nodiscard]] std::vector<std::string_view> split_lines(std::string_view text);

}  // namespace nibble::jinja
