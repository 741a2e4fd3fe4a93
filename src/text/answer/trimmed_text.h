#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace nibble {

inline constexpr std::string_view kBlanks = " \t\r\n";

[[nodiscard]] inline std::string_view trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  return begin == std::string_view::npos
             ? std::string_view()
             : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

/// Holds back the blanks at the end of a growing text, until more than blanks follow.
class TrimmedText final {
 public:
  /// Text that is certain not to end in blanks.
  [[nodiscard]] std::string push(std::string_view text) {
    const size_t last = text.find_last_not_of(kBlanks);
    if (last == std::string_view::npos) {
      if (!skips_blanks_) {
        blanks_ += text;
      }
      return {};
    }
    if (skips_blanks_) {
      text.remove_prefix(text.find_first_not_of(kBlanks));
    }
    skips_blanks_ = false;
    const size_t kept = text.find_last_not_of(kBlanks) + 1;
    std::string out = std::exchange(blanks_, std::string(text.substr(kept)));
    out += text.substr(0, kept);
    return out;
  }
  /// The blanks that were held back.
  [[nodiscard]] std::string take_blanks() { return std::exchange(blanks_, {}); }
  /// Drops the blanks that were held back and those that follow.
  void skip_blanks() {
    blanks_.clear();
    skips_blanks_ = true;
  }

 private:
  std::string blanks_;
  bool skips_blanks_ = false;
};

}  // namespace nibble
