#pragma once

#include <optional>

#include "server/generation.h"

namespace nibble {

/// Finds what the engine needs beside the prompts of a job, which is kept there. The error if the
/// request asks for what there is not.
[[nodiscard]] std::optional<ApiError> prepare_job(const AppContext& context, GenerationJob& job);

/// How the answer to a prompt is taken apart.
[[nodiscard]] AnswerStream::Options stream_options(const AppContext& context,
                                                   const GenerationJob& job,
                                                   const std::vector<int32_t>& prompt);

/// Tokens that the answer to a prompt may have.
[[nodiscard]] int64_t max_tokens(const AppContext& context,
                                 const GenerationJob& job,
                                 const std::vector<int32_t>& prompt);

/// What the engine is asked for one of the answers; its id, its callback and its client are still
/// missing.
[[nodiscard]] Result<Request> engine_request(const AppContext& context,
                                             const GenerationJob& job,
                                             const Choice& choice);

/// Says whose request it is, by its key.
void set_client(const AppContext& context, const HttpRequest& http, Request& request);
/// The name of that key; "" without one.
[[nodiscard]] std::string key_name(const AppContext& context, const HttpRequest& http);
/// When it ends at the latest: as it asks, and as the server's --request-timeout has it.
void set_deadline(const AppContext& context, std::optional<double> timeout_s, Request& request);

/// The error of a request that had no token at its deadline.
[[nodiscard]] ApiError too_late(const Status& why);

}  // namespace nibble
