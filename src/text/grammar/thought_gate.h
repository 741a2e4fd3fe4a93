#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "ops/token_mask.h"
#include "text/answer/answer_form.h"
#include "text/tokenizer.h"

namespace nibble {

/// What a thought stands between; the views are constants.
struct ThoughtMarks {
  std::string_view opening, closing;
};
/// None for forms without marks (none, harmony).
[[nodiscard]] std::optional<ThoughtMarks> thought_marks(ReasoningForm form);

/// Where an answer begins.
enum class ThoughtStart : uint8_t {
  kMayThink,  // it may begin with the opening of a thought
  kThinking,  // the prompt has opened one
};

/// A constraint that holds for what follows a thought: until the thought has ended all tokens may
/// come. An answer that does not begin with a thought's opening, as a token of its own, obeys from
/// its first token on. For forms without marks of thoughts it is `inner`. The tokenizer outlives
/// it.
[[nodiscard]] std::unique_ptr<TokenConstraint> after_thought(
    const Tokenizer& tokenizer,
    ReasoningForm form,
    ThoughtStart start,
    std::unique_ptr<TokenConstraint> inner);

}  // namespace nibble
