#include "text/tokenizer_utf8.h"

#include <algorithm>
#include <cstdint>

namespace nibble {
namespace {

struct LeadByte {
  size_t length;        // bytes of the whole character; 0 if no character starts so
  uint8_t low = 0x80;   // range of the second byte, which excludes overlong forms,
  uint8_t high = 0xBF;  // surrogates and values above U+10FFFF (Unicode table 3-7)
};

LeadByte classify(uint8_t lead) {
  if (lead < 0x80) return {.length = 1};
  if (lead < 0xC2) return {.length = 0};
  if (lead < 0xE0) return {.length = 2};
  if (lead == 0xE0) return {.length = 3, .low = 0xA0};
  if (lead == 0xED) return {.length = 3, .high = 0x9F};
  if (lead < 0xF0) return {.length = 3};
  if (lead == 0xF0) return {.length = 4, .low = 0x90};
  if (lead < 0xF4) return {.length = 4};
  if (lead == 0xF4) return {.length = 4, .high = 0x8F};
  return {.length = 0};
}

}  // namespace

Utf8Step utf8_step(std::string_view text, size_t position) {
  const LeadByte lead = classify(static_cast<uint8_t>(text[position]));
  if (lead.length <= 1) {
    return {lead.length == 1 ? Utf8Unit::kCharacter : Utf8Unit::kInvalid, 1};
  }
  for (size_t i = 1; i < lead.length; ++i) {
    if (position + i >= text.size()) {
      return {Utf8Unit::kIncomplete, i};
    }
    const auto byte = static_cast<uint8_t>(text[position + i]);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) {
      return {Utf8Unit::kInvalid, i};
    }
  }
  return {Utf8Unit::kCharacter, lead.length};
}

int64_t utf8_length(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

bool utf8_valid(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<uint8_t>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Step step = utf8_step(text, i);
    if (step.unit != Utf8Unit::kCharacter) {
      return false;
    }
    i += step.length;
  }
  return true;
}

std::string utf8_repaired(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    out += step.unit == Utf8Unit::kCharacter ? text.substr(i, step.length) : kReplacementCharacter;
    i += step.length;
  }
  return out;
}

char32_t utf8_decode(std::string_view character) {
  const auto lead = static_cast<uint8_t>(character[0]);
  if (lead < 0x80) {
    return lead;
  }
  char32_t value = lead & (character.size() == 2 ? 0x1F : character.size() == 3 ? 0x0F : 0x07);
  for (size_t i = 1; i < character.size(); ++i) {
    value = (value << 6) | (static_cast<uint8_t>(character[i]) & 0x3F);
  }
  return value;
}

void append_utf8(std::string& out, char32_t code_point) {
  const auto put = [&out](uint32_t byte) { out += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace nibble
