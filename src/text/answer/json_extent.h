#pragma once

#include <cstdint>
#include <string_view>

namespace nibble {

/// Follows a JSON object or array byte by byte, to know where it ends. It does not say whether what
/// it followed is valid.
class JsonExtent final {
 public:
  void push(std::string_view text);
  /// Inside a string.
  [[nodiscard]] bool in_string() const { return in_string_; }
  /// Inside of brackets.
  [[nodiscard]] bool open() const { return depth_ > 0 || in_string_; }

  /// Bytes of the object or array that `text` begins with; 0 where it does not end there.
  [[nodiscard]] static size_t length_of(std::string_view text);

 private:
  void push(char byte);

  int64_t depth_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
};

}  // namespace nibble
