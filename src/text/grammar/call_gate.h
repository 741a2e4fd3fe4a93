#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/grammar/call_grammar.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer.h"

namespace nibble {

/// A mark, and the tokens of a vocabulary that it may end in without being the last of their bytes.
/// Made once for a vocabulary. Immutable.
class CallMark final {
 public:
  CallMark(const Tokenizer& tokenizer, std::string mark);

  [[nodiscard]] const std::string& text() const { return mark_; }
  /// Clears tokens behind a text that ends with `tail` by which the mark would end within a token.
  /// False where there are none.
  bool clear_crossing(std::string_view tail, std::span<uint32_t> mask) const;

 private:
  std::string mark_;
  // By how many bytes of the mark are there already: the tokens that hold its rest and more.
  std::vector<std::vector<int32_t>> crossing_;
};

/// Answers that are free, but for their calls: behind a mark they obey `calls` (call_tail()).
/// `tokenizer` outlives it.
[[nodiscard]] std::shared_ptr<const Grammar> gated_calls(const Tokenizer& tokenizer,
                                                         std::shared_ptr<const CallMark> mark,
                                                         std::shared_ptr<const Grammar> calls,
                                                         CallTail::Next next);

/// Grammars of arguments, by function.
using ArgumentGrammars = std::map<std::string, std::shared_ptr<const Grammar>, std::less<>>;
/// Answers in harmony, whose messages to these functions obey their grammars, up to the end of the
/// answer.
[[nodiscard]] std::shared_ptr<const Grammar> gated_harmony_calls(const Tokenizer& tokenizer,
                                                                 ArgumentGrammars arguments);

}  // namespace nibble
