#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace nibble {

/// Turns a stream of token ids into text, never cutting a character in two. One per sequence; not
/// thread-safe. The tokenizer must outlive it.
class Detokenizer final {
 public:
  Detokenizer(const Tokenizer& tokenizer, DecodeSpecials specials)
      : tokenizer_(tokenizer),
        specials_(specials),
        strip_space_(tokenizer.strips_leading_space()) {}

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
  bool strip_space_;     // the next byte, if it is a space, is not part of the text
  std::string pending_;  // an incomplete character
};

}  // namespace nibble
