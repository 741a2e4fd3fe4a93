#include "text/jinja/utf8.h"

namespace nibble::jinja {
namespace {

constexpr uint32_t kStrayByte = 0xdc00;

// Length of the well-formed sequence at `offset`, or 0.
size_t sequence_length(std::string_view text, size_t offset) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[offset + k]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) {
    return 1;
  }
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || offset + length > text.size()) {
    return 0;
  }
  for (size_t k = 1; k < length; ++k) {
    if ((byte(k) & 0xc0) != 0x80) {
      return 0;
    }
  }
  const unsigned char second = byte(1);
  const bool wrong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90) ||
                     (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
  return wrong ? 0 : length;
}

bool in_range(uint32_t c, uint32_t first, uint32_t last) { return c >= first && c <= last; }

}  // namespace

uint32_t next_code_point(std::string_view text, size_t& offset) {
  const size_t length = sequence_length(text, offset);
  const auto lead = static_cast<unsigned char>(text[offset]);
  if (length == 0) {
    ++offset;
    return kStrayByte + lead;
  }
  constexpr uint32_t kLeadMask[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t point = lead & kLeadMask[length];
  for (size_t k = 1; k < length; ++k) {
    point = (point << 6) | (static_cast<unsigned char>(text[offset + k]) & 0x3f);
  }
  offset += length;
  return point;
}

void append_code_point(std::string& out, uint32_t c) {
  const auto push = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (in_range(c, kStrayByte + 0x80, kStrayByte + 0xff)) {
    push(c - kStrayByte);
  } else if (c < 0x80) {
    push(c);
  } else if (c < 0x800) {
    push(0xc0 | (c >> 6));
    push(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    push(0xe0 | (c >> 12));
    push(0x80 | ((c >> 6) & 0x3f));
    push(0x80 | (c & 0x3f));
  } else {
    push(0xf0 | (c >> 18));
    push(0x80 | ((c >> 12) & 0x3f));
    push(0x80 | ((c >> 6) & 0x3f));
    push(0x80 | (c & 0x3f));
  }
}

std::vector<uint32_t> code_points(std::string_view text) {
  std::vector<uint32_t> points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    points.push_back(next_code_point(text, i));
  }
  return points;
}

std::string from_code_points(const std::vector<uint32_t>& points) {
  std::string out;
  out.reserve(points.size());
  for (const uint32_t point : points) {
    append_code_point(out, point);
  }
  return out;
}

size_t count_code_points(std::string_view text) {
  size_t count = 0;
  for (size_t i = 0; i < text.size(); ++count) {
    const size_t length = sequence_length(text, i);
    i += length == 0 ? 1 : length;
  }
  return count;
}

size_t byte_offset(std::string_view text, size_t index) {
  size_t offset = 0;
  for (; index > 0 && offset < text.size(); --index) {
    const size_t length = sequence_length(text, offset);
    offset += length == 0 ? 1 : length;
  }
  return offset;
}

bool is_space(uint32_t c) {
  return in_range(c, 0x09, 0x0d) || in_range(c, 0x1c, 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || in_range(c, 0x2000, 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

bool is_printable(uint32_t c) {
  if (c == ' ') {
    return true;
  }
  const bool format = c == 0xad || in_range(c, 0x600, 0x605) || c == 0x61c || c == 0x6dd ||
                      c == 0x70f || c == 0x180e || in_range(c, 0x200b, 0x200f) ||
                      in_range(c, 0x202a, 0x202e) || in_range(c, 0x2060, 0x206f) || c == 0xfeff ||
                      in_range(c, 0xfff9, 0xfffb) || in_range(c, 0xe0000, 0xe0fff);
  const bool unassigned_or_private = in_range(c, 0xd800, 0xf8ff) || c >= 0xf0000 ||
                                     (c & 0xfffe) == 0xfffe || in_range(c, 0xfdd0, 0xfdef);
  return c > 0x1f && !in_range(c, 0x7f, 0x9f) && !is_space(c) && !format && !unassigned_or_private;
}

bool is_letter(uint32_t c) {
  if (c < 0x80) {
    return in_range(c | 0x20, 'a', 'z');
  }
  if (c < 0x2b0) {
    return c == 0xaa || c == 0xb5 || c == 0xba || (c >= 0xc0 && c != 0xd7 && c != 0xf7);
  }
  const bool punctuation = in_range(c, 0x2000, 0x2bff) || in_range(c, 0x3000, 0x3004) ||
                           in_range(c, 0x3008, 0x3020) || in_range(c, 0xff00, 0xff20) ||
                           in_range(c, 0xfe00, 0xfe6f) || in_range(c, 0x2e00, 0x2e7f) ||
                           in_range(c, 0x300, 0x36f) || in_range(c, 0x1f000, 0x1faff);
  return c >= 0x370 && !punctuation && is_printable(c);
}

uint32_t to_lower(uint32_t c) {
  if (in_range(c, 'A', 'Z') || (in_range(c, 0xc0, 0xde) && c != 0xd7) ||
      (in_range(c, 0x391, 0x3a9) && c != 0x3a2) || in_range(c, 0x410, 0x42f)) {
    return c + 0x20;
  }
  if (in_range(c, 0x400, 0x40f)) {
    return c + 0x50;
  }
  const bool even_upper = (in_range(c, 0x100, 0x137) && c != 0x130 && c != 0x131) ||
                          in_range(c, 0x14a, 0x177) || in_range(c, 0x460, 0x481);
  const bool odd_upper = in_range(c, 0x139, 0x148) || in_range(c, 0x179, 0x17e);
  if ((even_upper && c % 2 == 0) || (odd_upper && c % 2 == 1)) {
    return c + 1;
  }
  return c == 0x178 ? 0xff : c;
}

uint32_t to_upper(uint32_t c) {
  if (in_range(c, 'a', 'z') || (in_range(c, 0xe0, 0xfe) && c != 0xf7) ||
      (in_range(c, 0x3b1, 0x3c9) && c != 0x3c2) || in_range(c, 0x430, 0x44f)) {
    return c - 0x20;
  }
  if (in_range(c, 0x450, 0x45f)) {
    return c - 0x50;
  }
  const bool even_upper = (in_range(c, 0x100, 0x137) && c != 0x130 && c != 0x131) ||
                          in_range(c, 0x14a, 0x177) || in_range(c, 0x460, 0x481);
  const bool odd_upper = in_range(c, 0x139, 0x148) || in_range(c, 0x179, 0x17e);
  if ((even_upper && c % 2 == 1) || (odd_upper && c % 2 == 0)) {
    return c - 1;
  }
  return c == 0xff ? 0x178 : c;
}

std::string upper(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const uint32_t point = next_code_point(text, i);
    if (point == 0xdf) {  // the one letter of these alphabets that grows
      out += "SS";
    } else {
      append_code_point(out, to_upper(point));
    }
  }
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    append_code_point(out, to_lower(next_code_point(text, i)));
  }
  return out;
}

std::string capitalize(std::string_view text) {
  const size_t first = byte_offset(text, 1);
  return upper(text.substr(0, first)) + lower(text.substr(first));
}

std::string_view strip_left(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    size_t next = offset;
    if (!is_space(next_code_point(text, next))) {
      break;
    }
    offset = next;
  }
  return text.substr(offset);
}

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && text.size() - start < 4 &&
           (static_cast<unsigned char>(text[start]) & 0xc0) == 0x80) {
      --start;
    }
    size_t next = start;
    if (!is_space(next_code_point(text, next)) || next != text.size()) {
      break;
    }
    text = text.substr(0, start);
  }
  return text;
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  size_t start = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t here = i;
    const uint32_t c = next_code_point(text, i);
    const bool line_end = in_range(c, 0x0a, 0x0d) || in_range(c, 0x1c, 0x1e) || c == 0x85 ||
                          c == 0x2028 || c == 0x2029;
    if (!line_end) {
      continue;
    }
    lines.push_back(text.substr(start, here - start));
    if (c == '\r' && i < text.size() && text[i] == '\n') {
      ++i;
    }
    start = i;
  }
  if (start < text.size()) {
    lines.push_back(text.substr(start));
  }
  return lines;
}

}  // namespace nibble::jinja
