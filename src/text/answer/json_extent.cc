#include "text/answer/json_extent.h"

namespace nibble {

void JsonExtent::push(char byte) {
  if (in_string_) {
    if (escaped_) {
      escaped_ = false;
    } else if (byte == '\\') {
      escaped_ = true;
    } else if (byte == '"') {
      in_string_ = false;
    }
    return;
  }
  if (byte == '"') {
    in_string_ = depth_ > 0;  // quotes outside of brackets are text
  } else if (byte == '{' || byte == '[') {
    ++depth_;
  } else if ((byte == '}' || byte == ']') && depth_ > 0) {
    --depth_;
  }
}

void JsonExtent::push(std::string_view text) {
  for (const char byte : text) {
    push(byte);
  }
}

size_t JsonExtent::length_of(std::string_view text) {
  if (text.empty() || (text.front() != '{' && text.front() != '[')) {
    return 0;
  }
  JsonExtent extent;
  for (size_t i = 0; i < text.size(); ++i) {
    extent.push(text[i]);
    if (!extent.open()) {
      return i + 1;
    }
  }
  return 0;
}

}  // namespace nibble
