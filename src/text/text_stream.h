#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/detokenizer.h"

namespace nibble {

/// Whether the stop string that ended an answer is part of its text.
enum class StopText { kOmit, kKeep };

/// Watches a text for stop strings as it grows. The result does not depend on how the text is cut
/// into pieces: of all occurrences the one that ends first counts, and of those that end together
/// the longest.
class StopFilter final {
 public:
  /// Empty stop strings are ignored.
  explicit StopFilter(std::vector<std::string> stops, StopText mode = StopText::kOmit);

  /// Takes more text and returns what is certain to belong to the answer. An end that may be the
  /// beginning of a stop string is held back.
  [[nodiscard]] std::string push(std::string_view text);
  /// The text has ended: returns what was held back, nothing after a stop.
  [[nodiscard]] std::string finish();
  [[nodiscard]] bool stopped() const { return stopped_; }
  /// The stop string that was found; empty before.
  [[nodiscard]] const std::string& found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  StopText mode_;
  std::string held_;  // begins a stop string, maybe
  std::string found_;
  bool stopped_ = false;
};

/// Makes the text of one answer from its tokens: detokenizes, hides special tokens, and ends at
/// stop strings. The caller cancels the request when stopped() becomes true, and ignores what
/// tokens still come. The tokenizer must outlive it. Not thread-safe.
class TextStream final {
 public:
  TextStream(const Tokenizer& tokenizer,
             std::vector<std::string> stops,
             StopText mode = StopText::kOmit,
             DecodeSpecials specials = DecodeSpecials::kSkip)
      : detokenizer_(tokenizer, specials, DecodeFrom::kContinuation),
        filter_(std::move(stops), mode) {}

  /// Text that this token adds for certain; maybe empty. Nothing after a stop.
  [[nodiscard]] std::string push(int32_t token) { return filter_.push(detokenizer_.push(token)); }
  /// The rest, after the last token.
  [[nodiscard]] std::string finish() {
    std::string text = filter_.push(detokenizer_.flush());
    return text + filter_.finish();
  }
  /// A stop string was found: the finish reason is "stop", whatever the engine says later.
  [[nodiscard]] bool stopped() const { return filter_.stopped(); }
  [[nodiscard]] const std::string& stop_string() const { return filter_.found(); }

 private:
  Detokenizer detokenizer_;
  StopFilter filter_;
};

}  // namespace nibble
