#pragma once

#include <string>
#include <string_view>

#include "model_flags.h"

namespace nibble {

/// Sets one value by its name ("temperature", "max_tokens"); "default" takes it back.
/// kInvalidArgument with the names, or with what the value must be.
Status set_answer_flag(AnswerFlags& flags, std::string_view name, const std::string& value);

/// All values, one a line.
[[nodiscard]] std::string answer_flags_text(const AnswerFlags& flags);

}  // namespace nibble
