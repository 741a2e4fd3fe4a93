#include <ctime>

#include "server/completion_logprobs.h"
#include "server/error.h"
#include "server/generation.h"
#include "server/prompt.h"
#include "server/routes.h"

namespace nibble {
namespace {

constexpr int64_t kDefaultMaxTokens = 16;

class CompletionFormat final : public ChunkFormat {
 public:
  CompletionFormat(const AppContext& context, const GenerationRequest& request)
      : ChunkFormat(request),
        text_(context.text),
        model_(request.model.empty() ? context.options.model_names.front() : request.model),
        logprobs_(request.logprobs),
        prompt_logprobs_(request.prompt_logprobs),
        streams_(request.stream),
        echo_(request.echo) {}

  Json whole(const std::vector<Choice>& choices) const override {
    JsonArray list;
    for (const Choice& choice : choices) {
      CompletionLogprobs logprobs(text_.tokenizer(), logprobs_);
      if (echo_) {
        logprobs.add_prompt(choice);
      }
      logprobs.add_answer(choice);
      Json one =
          item(choice, (echo_ ? text_.decode(choice.prompt) : "") + choice.answer, logprobs.json());
      if (prompt_logprobs_ >= 0) {
        one.set("prompt_logprobs",
                prompt_logprobs_json(choice, text_.tokenizer(), prompt_logprobs_));
      }
      list.push_back(std::move(one));
    }
    return envelope(std::move(list));
  }

  Json opening(const Choice& choice) const override {
    if (!echo_) {
      return {};
    }
    CompletionLogprobs logprobs(text_.tokenizer(), logprobs_);
    logprobs.add_prompt(choice);
    return envelope({item(choice, text_.decode(choice.prompt), logprobs.json())});
  }

  Json delta(const Choice& choice, const AnswerPiece& piece, int64_t /*call*/) const override {
    return envelope({item(choice, piece.text, new_logprobs(choice))});
  }

  Json end(const Choice& choice) const override {
    return envelope({item(choice, "", new_logprobs(choice))});
  }

  Json usage_only() const override { return envelope({}); }

 private:
  Json envelope(JsonArray choices) const {
    return Json::object({{"id", id_},
                         {"object", "text_completion"},
                         {"created", created_},
                         {"model", model_},
                         {"choices", std::move(choices)}});
  }

  static Json item(const Choice& choice, const std::string& text, Json logprobs) {
    const bool over = !choice.finish_reason.empty();
    return Json::object({{"index", choice.index},
                         {"text", text},
                         {"logprobs", std::move(logprobs)},
                         {"finish_reason", over ? Json(choice.finish_reason) : Json()},
                         {"stop_reason", stop_reason(choice)}});
  }

  /// Of tokens that were not sent yet.
  Json new_logprobs(const Choice& choice) const {
    if (choice.entries.empty() && streams_) {
      return {};
    }
    CompletionLogprobs logprobs(text_.tokenizer(), logprobs_);
    logprobs.add_answer(choice);
    return logprobs.json();
  }

  const TextFrontend& text_;
  std::string id_ = "cmpl-" + random_id();
  std::string model_;
  int logprobs_;  // alternatives of each token, or -1
  int prompt_logprobs_;
  bool streams_;  // events without a token have no logprobs
  bool echo_;
  int64_t created_ = std::time(nullptr);
};

}  // namespace

void route_completions(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  ParsedRequest parsed = parse_completion_request(exchange->request().body, context.options.schema);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    exchange->respond(error_response(*error));
    return;
  }
  GenerationJob job{.request = std::move(std::get<GenerationRequest>(parsed))};
  if (const auto error = check_model(context, job.request.model)) {
    exchange->respond(error_response(*error));
    return;
  }
  if (const auto error = check_request(context, job.request, job.request.prompts.size())) {
    exchange->respond(error_response(*error));
    return;
  }
  auto prompts =
      prompt_tokens(context, job.request.prompts, {.add_special = job.request.add_special_tokens});
  if (const auto* error = std::get_if<ApiError>(&prompts)) {
    exchange->respond(error_response(*error));
    return;
  }
  job.prompts = std::get<0>(std::move(prompts));
  if (!job.request.max_tokens) {
    job.request.max_tokens = kDefaultMaxTokens;
  }
  job.format = std::make_unique<CompletionFormat>(context, job.request);
  run_generation(context, exchange, std::move(job));
}

}  // namespace nibble
