#include <ctime>

#include <fmt/format.h>

#include "server/error.h"
#include "server/generation.h"
#include "server/prompt.h"
#include "server/routes.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

constexpr int64_t kDefaultMaxTokens = 16;

class CompletionFormat final : public ChunkFormat {
 public:
  CompletionFormat(const AppContext& context, const GenerationRequest& request)
      : ChunkFormat(request),
        text_(context.text),
        model_(request.model.empty() ? context.options.model_names.front() : request.model),
        wants_logprobs_(request.logprobs >= 0),
        streams_(request.stream),
        echo_(request.echo) {}

  Json whole(const std::vector<Choice>& choices) const override {
    JsonArray list;
    for (const Choice& choice : choices) {
      list.push_back(item(choice, (echo_ ? text_.decode(choice.prompt) : "") + choice.answer));
    }
    return envelope(std::move(list));
  }

  Json opening(const Choice& choice) const override {
    return echo_ ? envelope({item(choice, text_.decode(choice.prompt))}) : Json();
  }

  Json delta(const Choice& choice, const AnswerPiece& piece, int64_t /*call*/) const override {
    return envelope({item(choice, piece.text)});
  }

  Json end(const Choice& choice) const override { return envelope({item(choice, "")}); }

  Json usage_only() const override { return envelope({}); }

 private:
  Json envelope(JsonArray choices) const {
    return Json::object({{"id", id_},
                         {"object", "text_completion"},
                         {"created", created_},
                         {"model", model_},
                         {"choices", std::move(choices)}});
  }

  Json item(const Choice& choice, const std::string& text) const {
    const bool over = !choice.finish_reason.empty();
    const bool stopped = choice.text.stopped();
    return Json::object({{"index", choice.index},
                         {"text", text},
                         {"logprobs", logprobs(choice)},
                         {"finish_reason", over ? Json(choice.finish_reason) : Json()},
                         {"stop_reason", stopped ? Json(choice.text.stop_string()) : Json()}});
  }

  /// A token's text; "bytes:\\xe2\\x82" for a part of a character, so that labels differ.
  std::string label(int32_t token) const {
    const std::string& bytes = text_.tokenizer().token_bytes(token);
    if (utf8_valid(bytes)) {
      return bytes;
    }
    std::string out = "bytes:";
    for (const char byte : bytes) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    return out;
  }

  Json logprobs(const Choice& choice) const {
    if (!wants_logprobs_ || (choice.entries.empty() && streams_)) {
      return {};
    }
    JsonArray tokens, values, tops, offsets;
    for (const TokenEntry& entry : choice.entries) {
      JsonObject top;
      for (const TokenLogprob& other : entry.event.top_logprobs) {
        top.set(label(other.token), static_cast<double>(other.logprob));
      }
      tokens.emplace_back(label(entry.event.token));
      values.emplace_back(static_cast<double>(entry.event.logprob));
      tops.emplace_back(std::move(top));
      offsets.emplace_back(entry.text_offset);
    }
    return Json::object({{"tokens", std::move(tokens)},
                         {"token_logprobs", std::move(values)},
                         {"top_logprobs", std::move(tops)},
                         {"text_offset", std::move(offsets)}});
  }

  const TextFrontend& text_;
  std::string id_ = "cmpl-" + random_id();
  std::string model_;
  bool wants_logprobs_;
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
  for (const PromptInput& prompt : job.request.prompts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
      job.prompts.push_back(*ids);
      continue;
    }
    PromptTokens tokens =
        text_prompt(context, std::get<std::string>(prompt), job.request.add_special_tokens);
    if (const auto* error = std::get_if<ApiError>(&tokens)) {
      exchange->respond(error_response(*error));
      return;
    }
    job.prompts.push_back(std::move(std::get<std::vector<int32_t>>(tokens)));
  }
  if (!job.request.max_tokens) {
    job.request.max_tokens = kDefaultMaxTokens;
  }
  job.format = std::make_unique<CompletionFormat>(context, job.request);
  run_generation(context, exchange, std::move(job));
}

}  // namespace nibble
