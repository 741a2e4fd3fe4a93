#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/embedding_form.h"
#include "engine/engine.h"
#include "server/answer_grammars.h"
#include "server/api_keys.h"
#include "server/http.h"
#include "server/metrics.h"
#include "server/response_store.h"
#include "server/running_answers.h"
#include "server/schema.h"
#include "server/task_thread.h"
#include "server/text_frontend.h"
#include "text/answer/answer_form.h"

namespace nibble {

struct AppOptions {
  std::vector<std::string> model_names;  // at least one; the first is the one shown
  std::vector<ApiKey> api_keys;          // none: no key is asked for
  SchemaOptions schema;
  std::string version;
  int64_t created = 0;                     // seconds since 1970, for /v1/models
  int64_t stream_interval = 1;             // tokens that a stream sends at a time
  double request_timeout_s = 0;            // most that a request may take; 0: as long as it takes
  AnswerForm form;                         // of the model's answers to a chat
  EmbeddingForm embedding;                 // of prompts
  Status no_embeddings;                    // why there are none, if there are none
  std::string model_path, tokenizer_path;  // as given, for clients that look
};

/// What every route works with. The engine and the text frontend outlive it.
struct AppContext {
  AppContext(AppOptions app_options, Engine& app_engine, const TextFrontend& app_text)
      : options(std::move(app_options)),
        engine(app_engine),
        text(app_text),
        grammars(app_text.tokenizer(),
                 app_engine.model_config().vocab_size,
                 app_engine.model_config().eos_token_ids),
        metrics(app_engine.options().max_model_len) {}

  const AppOptions options;
  Engine& engine;
  const TextFrontend& text;
  const AnswerGrammars grammars;
  ServerMetrics metrics;
  const std::shared_ptr<RunningAnswers> running = std::make_shared<RunningAnswers>();
  const std::shared_ptr<ResponseStore> responses = std::make_shared<ResponseStore>();
  std::atomic<bool> ready{true};               // false: /health and every POST answer 503
  TaskThread grammar_thread{"grammars", 256};  // makes grammars; last: its tasks use the others
};

/// The answer to a request that is refused for its head: 401 without the key, 404 for an unknown
/// route, 405 for the wrong method, 503 for a POST while shutting down, 415 for a compressed body.
[[nodiscard]] std::optional<HttpResponse> check_head(const AppContext& context,
                                                     const HttpRequest& request);

/// Checks the head of a request and runs its route. Every error is an error object.
void handle_request(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);

/// The error that `model` causes if this server does not serve it. An empty name means ours.
[[nodiscard]] std::optional<ApiError> check_model(const AppContext& context,
                                                  const std::string& model);

}  // namespace nibble
