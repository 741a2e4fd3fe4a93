#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "ops/token_mask.h"
#include "text/answer/answer_form.h"
#include "text/grammar/thought_gate.h"
#include "text/tokenizer.h"

namespace nibble {

/// How long a thought may be.
struct ThoughtLimit {
  const Tokenizer& tokenizer;
  ThoughtMarks marks;
  int64_t tokens = 0;
};

/// A constraint that ends a thought after so many tokens: then only the tokens of its closing mark
/// may come. All else is up to `inner`, which may be null. The tokenizer outlives it. The errors of
/// Tokenizer::encode() for the mark.
[[nodiscard]] Result<std::unique_ptr<TokenConstraint>> limited_thought(
    const ThoughtLimit& limit, ThoughtStart start, std::unique_ptr<TokenConstraint> inner);

}  // namespace nibble
