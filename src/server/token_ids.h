#pragma once

#include <vector>

#include "server/generation.h"

namespace nibble {

/// Where an answer has the ids of its prompt: a chat beside its choices, a completion in each.
enum class PromptIdsPlace { kAnswer, kChoice };

/// Adds token_ids to the choices of a whole answer, and prompt_token_ids.
void add_token_ids(Json& answer, const std::vector<Choice>& choices, PromptIdsPlace place);
/// Adds the ids that were not sent yet to an event with one choice, and takes them from it; the
/// first event has the prompt's, too.
void add_new_token_ids(Json& event, Choice& choice, PromptIdsPlace place);

}  // namespace nibble
