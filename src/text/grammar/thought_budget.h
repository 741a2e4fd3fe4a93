#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "ops/token_mask.h"
#include "text/answer/answer_form.h"
#include "text/grammar/thought_gate.h"
#include "text/tokenizer.h"

namespace nibble {

/// A constraint that ends a thought after `budget` tokens: then only the tokens of its closing mark
/// may come. All else is up to `inner`, which may be null. The tokenizer outlives it.
/// kUnsupported for forms without marks of thoughts (none, harmony).
[[nodiscard]] Result<std::unique_ptr<TokenConstraint>> limited_thought(
    const Tokenizer& tokenizer,
    ReasoningForm form,
    ThoughtStart start,
    int64_t budget,
    std::unique_ptr<TokenConstraint> inner);

}  // namespace nibble
