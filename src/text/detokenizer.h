#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace nibble {

/// Where a stream of tokens begins: SentencePiece puts a space before a whole text, and that one is
/// not shown; the space before the first word of a continuation is the model's own.
enum class DecodeFrom { kTextStart, kContinuation };

/// Turns a stream of token ids into text, never cutting a character in two. One per sequence; not
/// thread-safe. The tokenizer must outlive it.
class Detokenizer final {
 public:
  Detokenizer(const Tokenizer& tokenizer,
              DecodeSpecials specials,
              DecodeFrom from = DecodeFrom::kTextStart)
      : tokenizer_(tokenizer),
        specials_(specials),
        strips_space_(from == DecodeFrom::kTextStart && tokenizer.strips_leading_space()),
        strip_space_(strips_space_) {}

  /// Text that this token completes: valid UTF-8, maybe empty. Bytes of a character that is not
  /// complete yet are held back; bytes that can never become one are U+FFFD.
  [[nodiscard]] std::string push(int32_t id);

  /// What was held back, as U+FFFD; the next token begins a new text.
  [[nodiscard]] std::string flush();

  /// Bytes held back now, at most 3.
  [[nodiscard]] const std::string& pending() const { return pending_; }

 private:
  const Tokenizer& tokenizer_;
  DecodeSpecials specials_;
  bool strips_space_;    // at the beginning of a text
  bool strip_space_;     // the next byte, if it is a space, is not part of the text
  std::string pending_;  // an incomplete character
};

}  // namespace nibble
