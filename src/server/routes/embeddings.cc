#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "server/embedding_text.h"
#include "server/engine_request.h"
#include "server/error.h"
#include "server/prompt.h"
#include "server/routes.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;
using Prompts = std::vector<std::vector<int32_t>>;

constexpr int64_t kMostAnswerBytes = int64_t{48} << 20;  // a connection holds 64 MiB

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Embeddings under way. Lives as long as the engine may report about it; all members belong to the
/// exchange's thread of control.
class Embedding final : public std::enable_shared_from_this<Embedding> {
 public:
  Embedding(AppContext& context, std::shared_ptr<HttpExchange> exchange, EmbeddingRequest request)
      : context_(context), exchange_(std::move(exchange)), request_(std::move(request)) {}

  /// `prompts` fit the context.
  void start(Prompts prompts);

 private:
  Status submit(size_t index, std::vector<int32_t> prompt);
  void on_event(size_t index, const TokenEvent& event);
  void record(const TokenEvent& event, const char* reason);
  void complete();
  void fail(const ApiError& error);
  void cancel();

  AppContext& context_;
  std::shared_ptr<HttpExchange> exchange_;
  EmbeddingRequest request_;
  std::vector<std::string> texts_;  // embeddings as JSON, by input
  size_t running_ = 0;
  int64_t prompt_tokens_ = 0;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<RunningAnswers::Entry> entry_;
  bool over_ = false;  // answered, failed or abandoned: events are ignored
  Clock::time_point started_ = Clock::now();
};

void Embedding::start(Prompts prompts) {
  exchange_->on_disconnect([self = shared_from_this()] { self->cancel(); });
  entry_ = std::make_unique<RunningAnswers::Entry>(context_.running, exchange_->request().id,
                                                   RunningAnswers::Flags{cancelled_});
  texts_.resize(prompts.size());
  running_ = prompts.size();
  context_.metrics.record_ignored(request_.ignored);
  for (size_t i = 0; i < prompts.size(); ++i) {
    prompt_tokens_ += std::ssize(prompts[i]);
    if (const Status status = submit(i, std::move(prompts[i])); !status.ok()) {
      fail(to_api_error(status));
      return;
    }
  }
}

Status Embedding::submit(size_t index, std::vector<int32_t> prompt) {
  Request request;
  request.id = fmt::format("{}-{}", exchange_->request().id, index);
  request.prompt = std::move(prompt);
  request.max_tokens = 0;
  request.pooling = context_.options.embedding.pooling;
  request.priority = request_.priority;
  request.cache_salt = request_.cache_salt;
  request.cancelled = cancelled_;
  set_client(context_, exchange_->request(), request);
  set_deadline(context_, std::nullopt, request);
  request.on_event = [self = shared_from_this(), index](TokenEvent event) {
    self->exchange_->post(
        [self, index, event = std::move(event)] { self->on_event(index, event); });
  };
  return context_.engine.submit(std::move(request));
}

void Embedding::on_event(size_t index, const TokenEvent& event) {
  if (over_) {
    return;
  }
  if (event.finish == FinishReason::kError) {
    record(event, "error");
    fail({500, event.failure.message(), "", ""});
    return;
  }
  if (event.finish == FinishReason::kTimeout) {
    record(event, kTimeoutReason);
    fail(too_late(event.failure));
    return;
  }
  if (event.pooled.empty()) {  // ended by another request, or by a shutdown
    record(event, "abort");
    fail(entry_->ended() ? ApiError{400, "aborted by /abort_request", "", ""}
                         : ApiError{503, "the server is shutting down", "", ""});
    return;
  }
  record(event, "stop");
  const int64_t dimensions = request_.dimensions.value_or(std::ssize(event.pooled));
  texts_[index] =
      embedding_json(embedding_of(event.pooled, dimensions, request_.length), request_.encoding);
  if (--running_ == 0) {
    complete();
  }
}

void Embedding::record(const TokenEvent& event, const char* reason) {
  context_.metrics.record({.finish_reason = reason,
                           .key_name = key_name(context_, exchange_->request()),
                           .prompt_tokens = event.prompt_tokens,
                           .cached_tokens = event.cached_tokens,
                           .queue = event.queue_seconds,
                           .end_to_end = seconds_since(started_)});
}

void Embedding::complete() {
  over_ = true;
  std::string data;
  for (size_t i = 0; i < texts_.size(); ++i) {
    data += fmt::format("{}{{\"object\":\"embedding\",\"index\":{},\"embedding\":{}}}",
                        i == 0 ? "" : ",", i, std::exchange(texts_[i], {}));
  }
  const Json model = request_.model.empty() ? context_.options.model_names.front() : request_.model;
  const Json usage =
      Json::object({{"prompt_tokens", prompt_tokens_}, {"total_tokens", prompt_tokens_}});
  exchange_->respond(
      {.headers = warning_headers(request_.ignored),
       .body = fmt::format("{{\"object\":\"list\",\"data\":[{}],\"model\":{},\"usage\":{}}}", data,
                           model.dump(), usage.dump())});
}

void Embedding::cancel() {
  over_ = true;
  cancelled_->store(true);
}

void Embedding::fail(const ApiError& error) {
  cancel();
  refuse(*exchange_, error);
}

/// How many numbers an embedding may have, as the model says.
std::optional<ApiError> check_dimensions(const AppContext& context,
                                         std::optional<int64_t> dimensions) {
  const EmbeddingForm& form = context.options.embedding;
  const int64_t whole = context.engine.model_config().hidden_size;
  if (!dimensions || *dimensions == whole) {
    return std::nullopt;
  }
  const auto error = [](std::string message) {
    return ApiError{400, "dimensions: " + std::move(message), "dimensions", ""};
  };
  if (!form.can_be_cut) {
    return error(
        fmt::format("the model's vectors have {} numbers, and its config.json does not "
                    "say that fewer would do (is_matryoshka); leave it out",
                    whole));
  }
  if (*dimensions > whole) {
    return error(fmt::format("the model's vectors have {} numbers", whole));
  }
  if (!form.dimensions.empty() &&
      std::ranges::find(form.dimensions, *dimensions) == form.dimensions.end()) {
    return error(fmt::format("the model was made for {}", fmt::join(form.dimensions, ", ")));
  }
  return std::nullopt;
}

/// Refuses what could never be served, or answered.
std::optional<ApiError> check_request(const AppContext& context, const EmbeddingRequest& request) {
  if (auto error = check_model(context, request.model)) {
    return error;
  }
  if (!context.options.no_embeddings.ok()) {
    return to_api_error(context.options.no_embeddings);
  }
  if (auto error = check_dimensions(context, request.dimensions)) {
    return error;
  }
  const int64_t most = context.engine.options().max_queued_requests;
  const auto count = std::ssize(request.inputs);
  if (count > most) {
    return ApiError{400,
                    fmt::format("input: {} texts, but at most {} can be asked for at once "
                                "(--max-queued-requests)",
                                count, most),
                    "input", ""};
  }
  const int64_t size = longest_embedding(
      request.dimensions.value_or(context.engine.model_config().hidden_size), request.encoding);
  if (count * size > kMostAnswerBytes) {
    return ApiError{400,
                    fmt::format("input: the answer to {} texts could have {} MiB, but at most {} "
                                "are sent at once; send fewer, or ask for base64",
                                count, count * size >> 20, kMostAnswerBytes >> 20),
                    "input", ""};
  }
  return std::nullopt;
}

}  // namespace

void route_embeddings(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  auto parsed =
      parse_embedding_request(exchange->request().body, context.options.schema.strictness);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    refuse(*exchange, *error);
    return;
  }
  auto& request = std::get<EmbeddingRequest>(parsed);
  if (const auto error = check_request(context, request)) {
    refuse(*exchange, *error);
    return;
  }
  auto prompts = prompt_tokens(context, request.inputs,
                               {.add_special = request.add_special_tokens, .field = "input"});
  if (const auto* error = std::get_if<ApiError>(&prompts)) {
    refuse(*exchange, *error);
    return;
  }
  for (auto& prompt : std::get<Prompts>(prompts)) {
    truncate_prompt(context, request.truncate_prompt_tokens, 0, prompt);
    if (const auto error = check_prompt(context, prompt, 0, "input")) {
      refuse(*exchange, *error);
      return;
    }
  }
  request.inputs.clear();
  std::make_shared<Embedding>(context, exchange, std::move(request))
      ->start(std::move(std::get<Prompts>(prompts)));
}

}  // namespace nibble
