#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/field_reader.h"
#include "server/schema.h"

namespace nibble {

constexpr int64_t kMaxLogprobs = 20;

// What is particular to one route; errors go to `fields`.

/// Reads what the engine is told besides sampling: prompt_logprobs, bad_words, allowed_token_ids,
/// return_token_ids, truncate_prompt_tokens, cache_salt, priority, timeout.
void read_engine_fields(FieldReader& fields, GenerationRequest& request);
/// Reads messages, tools and the template's arguments of a chat.
void read_chat_fields(FieldReader& fields,
                      const SchemaOptions& options,
                      GenerationRequest& request);
/// Reads a string, strings, token ids or lists of these; at least one.
void read_prompts(FieldReader& fields, std::string_view key, std::vector<PromptInput>& prompts);
/// Reads truncate_prompt_tokens.
void read_truncation(FieldReader& fields, std::optional<int64_t>& target);
/// Reads cache_salt and priority.
void read_scheduling(FieldReader& fields, std::string& cache_salt, int64_t& priority);
/// Reads the prompts of a text completion.
void read_completion_fields(FieldReader& fields, GenerationRequest& request);

/// Refuses members that are not `known`, or logs how many there are and returns that.
int64_t check_unknown_fields(FieldReader& fields,
                             const Json& body,
                             const std::function<bool(std::string_view)>& known,
                             Strictness strictness);

}  // namespace nibble
