#include <ctime>

#include "server/completion_logprobs.h"
#include "server/error.h"
#include "server/generation.h"
#include "server/routes.h"

namespace nibble {
namespace {

class ChatFormat final : public ChunkFormat {
 public:
  ChatFormat(const AppContext& context, const GenerationRequest& request)
      : ChunkFormat(request),
        tokenizer_(context.text.tokenizer()),
        model_(request.model.empty() ? context.options.model_names.front() : request.model),
        wants_logprobs_(request.logprobs >= 0),
        prompt_logprobs_(request.prompt_logprobs),
        streams_(request.stream) {}

  Json whole(const std::vector<Choice>& choices) const override {
    JsonArray list;
    for (const Choice& choice : choices) {
      const bool only_calls = choice.answer.empty() && !choice.calls.empty();
      const Json reasoning = choice.reasoning.empty() ? Json() : Json(choice.reasoning);
      Json message = Json::object({{"role", "assistant"},
                                   {"content", only_calls ? Json() : Json(choice.answer)},
                                   {"refusal", Json()},
                                   {"reasoning_content", reasoning},
                                   {"reasoning", reasoning}});
      if (!choice.calls.empty()) {
        JsonArray calls;
        for (const ToolCall& call : choice.calls) {
          calls.push_back(call_json(call));
        }
        message.set("tool_calls", std::move(calls));
      }
      list.push_back(Json::object({{"index", choice.index},
                                   {"message", message},
                                   {"logprobs", logprobs(choice)},
                                   {"finish_reason", choice.finish_reason},
                                   {"stop_reason", stop_reason(choice)}}));
    }
    Json answer = envelope("chat.completion", std::move(list));
    if (prompt_logprobs_ >= 0) {  // the choices have one prompt
      answer.set("prompt_logprobs",
                 prompt_logprobs_json(choices.front(), tokenizer_, prompt_logprobs_));
    }
    return answer;
  }

  Json opening(const Choice& choice) const override {
    return chunk(choice, Json::object({{"role", "assistant"}, {"content", ""}}), Json());
  }

  Json delta(const Choice& choice, const AnswerPiece& piece, int64_t call) const override {
    using Kind = AnswerPiece::Kind;
    Json delta;
    switch (piece.kind) {
      case Kind::kContent:
        delta = Json::object({{"content", piece.text}});
        break;
      case Kind::kReasoning:  // other servers have the one or the other name
        delta = Json::object({{"reasoning_content", piece.text}, {"reasoning", piece.text}});
        break;
      case Kind::kCallBegin: {
        Json item = call_json({piece.text, "", piece.id});
        item.set("index", call);
        delta = Json::object({{"tool_calls", JsonArray{std::move(item)}}});
        break;
      }
      case Kind::kArguments: {
        const Json item = Json::object(
            {{"index", call}, {"function", Json::object({{"arguments", piece.text}})}});
        delta = Json::object({{"tool_calls", JsonArray{item}}});
        break;
      }
      case Kind::kCallEnd:
        return {};
    }
    return chunk(choice, std::move(delta), logprobs(choice));
  }

  Json end(const Choice& choice) const override {
    return chunk(choice, JsonObject(), logprobs(choice));
  }

  Json usage_only() const override { return envelope("chat.completion.chunk", {}); }

 private:
  Json envelope(const char* object, JsonArray choices) const {
    return Json::object({{"id", id_},
                         {"object", object},
                         {"created", created_},
                         {"model", model_},
                         {"choices", std::move(choices)}});
  }

  Json chunk(const Choice& choice, Json delta, Json logprobs) const {
    const bool over = !choice.finish_reason.empty();
    Json item = Json::object({{"index", choice.index},
                              {"delta", std::move(delta)},
                              {"logprobs", std::move(logprobs)},
                              {"finish_reason", over ? Json(choice.finish_reason) : Json()}});
    if (over) {
      item.set("stop_reason", stop_reason(choice));
    }
    return envelope("chat.completion.chunk", {std::move(item)});
  }

  static Json call_json(const ToolCall& call) {
    return Json::object(
        {{"id", call.id},
         {"type", "function"},
         {"function", Json::object({{"name", call.name}, {"arguments", call.arguments}})}});
  }

  Json token_json(int32_t token, float logprob) const {
    const std::string& bytes = tokenizer_.token_bytes(token);
    JsonArray values;
    for (const char byte : bytes) {
      values.emplace_back(static_cast<int64_t>(static_cast<unsigned char>(byte)));
    }
    return Json::object(
        {{"token", bytes}, {"logprob", static_cast<double>(logprob)}, {"bytes", values}});
  }

  Json logprobs(const Choice& choice) const {
    if (!wants_logprobs_ || (choice.entries.empty() && streams_)) {
      return {};
    }
    JsonArray content;
    for (const TokenEntry& entry : choice.entries) {
      JsonArray top;
      for (const TokenLogprob& other : entry.event.top_logprobs) {
        top.push_back(token_json(other.token, other.logprob));
      }
      Json item = token_json(entry.event.token, entry.event.logprob);
      item.set("top_logprobs", std::move(top));
      content.push_back(std::move(item));
    }
    return Json::object({{"content", std::move(content)}, {"refusal", Json()}});
  }

  const Tokenizer& tokenizer_;
  std::string id_ = "chatcmpl-" + random_id();
  std::string model_;
  bool wants_logprobs_;
  int prompt_logprobs_;  // alternatives of each prompt token, or -1
  bool streams_;         // events without a token have no logprobs
  int64_t created_ = std::time(nullptr);
};

}  // namespace

void route_chat(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  ParsedRequest parsed = parse_chat_request(exchange->request().body, context.options.schema);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    exchange->respond(error_response(*error));
    return;
  }
  GenerationJob job{.request = std::move(std::get<GenerationRequest>(parsed))};
  if (const auto error = prepare_chat(context, job)) {
    exchange->respond(error_response(*error));
    return;
  }
  job.format = std::make_unique<ChatFormat>(context, job.request);
  run_generation(context, exchange, std::move(job));
}

}  // namespace nibble
