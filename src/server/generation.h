#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/answer_format.h"
#include "server/app.h"
#include "server/chat_body.h"

namespace nibble {

struct GenerationJob {
  GenerationRequest request;
  std::vector<std::vector<int32_t>> prompts;  // each answered request.n times
  std::unique_ptr<AnswerFormat> format;
  AnswerForm form = {};                         // of the answers; that of completions has no parts
  std::shared_ptr<const Grammar> grammar = {};  // of the answers; null: they are free
  std::vector<std::vector<int32_t>> bad_words = {};  // token ids of request.bad_words
  std::string id = {};    // by which other requests can end it; "": that of the exchange
  FieldNames names = {};  // of the fields of chats in the route's own words, for errors
};

/// Makes the prompt of a chat from job.request, whose messages are gone then, and sets the form of
/// its answers. The error if there is none, or the request asks for what this server lacks.
[[nodiscard]] std::optional<ApiError> prepare_chat(const AppContext& context, GenerationJob& job);

/// Submits the job and answers the exchange, whole or as a stream. A client that goes away cancels
/// what is left of its job. Errors found before the first token become error answers.
void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job);

}  // namespace nibble
