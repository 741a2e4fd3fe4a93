#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nibble {

/// Turns the bytes of an answer's tokens into text that may be shown: never half a UTF-8
/// character, and never a part of what may become a stop string.
class AnswerText final {
 public:
  AnswerText(std::vector<std::string> stop_strings, bool include_stop)
      : stop_strings_(std::move(stop_strings)), include_stop_(include_stop) {}

  /// Adds the bytes of a token and returns the text that is new and certain. After a stop string
  /// was found, stopped() is true and further bytes are ignored.
  std::string push(std::string_view bytes);
  /// The answer is over: what was held back, with U+FFFD for an unfinished character.
  std::string finish();

  [[nodiscard]] bool stopped() const { return !matched_.empty(); }
  /// The stop string found, or "".
  [[nodiscard]] const std::string& matched_stop() const { return matched_; }

 private:
  std::string take_valid(bool at_end);

  std::vector<std::string> stop_strings_;
  bool include_stop_;
  std::string bytes_;  // not yet known to be whole characters
  std::string held_;   // text that may be the beginning of a stop string
  std::string matched_;
};

}  // namespace nibble
