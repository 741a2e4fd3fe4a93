#include "server/answer_text.h"

#include <algorithm>

namespace nibble {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Length of the valid UTF-8 character at the front of `text`: 0 if the bytes may still become one,
/// -1 if they never can.
int character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const int length = first >= 0xC2 && first < 0xE0   ? 2
                     : first >= 0xE0 && first < 0xF0 ? 3
                     : first >= 0xF0 && first < 0xF5 ? 4
                                                     : -1;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= text.size()) {
      return 0;
    }
    const unsigned next = byte(static_cast<size_t>(i));
    unsigned low = 0x80;
    unsigned high = 0xBF;
    if (i == 1) {  // overlong forms, surrogates, beyond U+10FFFF
      low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : low;
      high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : high;
    }
    if (next < low || next > high) {
      return -1;
    }
  }
  return length;
}

/// Longest end of `text` that is a proper beginning of `stop`.
size_t overlap(std::string_view text, std::string_view stop) {
  for (size_t size = std::min(text.size(), stop.size() - 1); size > 0; --size) {
    if (text.ends_with(stop.substr(0, size))) {
      return size;
    }
  }
  return 0;
}

}  // namespace

std::string AnswerText::take_valid(bool at_end) {
  std::string out;
  size_t at = 0;
  while (at < bytes_.size()) {
    const int length = character_length(std::string_view(bytes_).substr(at));
    if (length == 0 && !at_end) {
      break;
    }
    if (length > 0) {
      out.append(bytes_, at, static_cast<size_t>(length));
      at += static_cast<size_t>(length);
    } else if (length == 0) {
      out += kReplacement;
      at = bytes_.size();
    } else {
      out += kReplacement;
      ++at;
    }
  }
  bytes_.erase(0, at);
  return out;
}

std::string AnswerText::push(std::string_view bytes) {
  if (stopped()) {
    return {};
  }
  bytes_ += bytes;
  held_ += take_valid(false);
  size_t found = std::string::npos;
  for (const std::string& stop : stop_strings_) {
    const size_t at = held_.find(stop);
    if (at < found) {
      found = at;
      matched_ = stop;
    }
  }
  if (stopped()) {
    return held_.substr(0, found + (include_stop_ ? matched_.size() : 0));
  }
  size_t keep = 0;
  for (const std::string& stop : stop_strings_) {
    keep = std::max(keep, overlap(held_, stop));
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string AnswerText::finish() {
  if (stopped()) {
    return {};
  }
  std::string out = std::move(held_);
  held_.clear();
  return out + take_valid(true);
}

}  // namespace nibble
