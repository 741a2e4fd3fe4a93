#include <algorithm>
#include <utility>

#include "server/chat_body.h"
#include "server/error.h"
#include "server/generation.h"
#include "server/routes.h"
#include "text/grammar/thought_gate.h"

namespace nibble {
namespace {

/// Events and answers of Anthropic's messages. Whole answers are made of the same pieces.
class MessageFormat final : public AnswerFormat {
 public:
  MessageFormat(const AppContext& context, const GenerationRequest& request)
      : model_(request.model.empty() ? context.options.model_names.front() : request.model),
        max_model_len_(context.engine.options().max_model_len) {}

  std::string whole_body(const std::vector<Choice>& choices, const Usage& total) override {
    const Choice& choice = choices.front();
    for (const AnswerPiece& piece : choice.unsent) {
      (void)stream_piece(choice, piece, 0);
    }
    (void)close_blocks();
    Json message = message_json(total);
    message.set("content", std::move(blocks_));
    message.set("stop_reason", stop_reason(choice));
    message.set("stop_sequence", stop_sequence(choice));
    return message.dump();
  }

  std::string stream_begin(const Choice& choice) override {
    return event("message_start", {{"message", message_json(choice.usage)}}) + event("ping", {});
  }

  std::string stream_piece(const Choice& /*choice*/,
                           const AnswerPiece& piece,
                           int64_t /*call*/) override {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        return add_text("text", piece.text);
      case AnswerPiece::Kind::kReasoning:
        return add_text("thinking", piece.text);
      case AnswerPiece::Kind::kCallBegin:
        return open_block(Json::object({{"type", "tool_use"},
                                        {"id", piece.id},
                                        {"name", piece.text},
                                        {"input", JsonObject()}}));
      case AnswerPiece::Kind::kArguments:
        text_ += piece.text;
        return delta(Json::object({{"type", "input_json_delta"}, {"partial_json", piece.text}}));
      case AnswerPiece::Kind::kCallEnd:
        return close_block();
    }
    return {};
  }

  std::string stream_choice_end(const Choice& choice) override {
    end_ = Json::object(
        {{"stop_reason", stop_reason(choice)}, {"stop_sequence", stop_sequence(choice)}});
    return close_blocks();
  }

  std::string stream_end(const Usage& total) override {
    return event("message_delta", {{"delta", std::move(end_)}, {"usage", usage(total)}}) +
           event("message_stop", {});
  }

  std::string stream_failure(const ApiError& error) override {
    return "event: error\n" + data_event(anthropic_error_json(error));
  }

 private:
  static std::string event(const char* type, std::vector<JsonObject::Member> members) {
    members.emplace(members.begin(), "type", type);
    return named_event(Json::object(std::move(members)));
  }

  /// What was found in the cache is not counted as input, but beside it.
  static Json usage(const Usage& usage) {
    return Json::object(
        {{"input_tokens", usage.prompt_tokens - usage.cached_tokens},
         {"output_tokens", usage.completion_tokens},
         {"cache_creation_input_tokens", 0},
         {"cache_read_input_tokens", usage.cached_tokens},
         {"output_tokens_details", Json::object({{"thinking_tokens", usage.reasoning_tokens}})}});
  }

  Json message_json(const Usage& used) const {
    return Json::object({{"id", id_},
                         {"type", "message"},
                         {"role", "assistant"},
                         {"model", model_},
                         {"content", JsonArray()},
                         {"stop_reason", Json()},
                         {"stop_sequence", Json()},
                         {"usage", usage(used)}});
  }

  Json stop_reason(const Choice& choice) const {
    if (choice.finish_reason == "tool_calls") {
      return "tool_use";
    }
    if (choice.finish_reason == "length") {
      const bool full =
          choice.usage.prompt_tokens + choice.usage.completion_tokens >= max_model_len_;
      return full ? "model_context_window_exceeded" : "max_tokens";
    }
    return choice.text.stopped() ? "stop_sequence" : "end_turn";
  }

  static Json stop_sequence(const Choice& choice) {
    return choice.text.stopped() ? Json(choice.text.stop_string()) : Json();
  }

  /// Text of a block ("text", "thinking") that is open, or of a new one.
  std::string add_text(const char* kind, const std::string& text) {
    std::string out;
    if (open_.is_null() || open_.find("type")->as_string() != kind) {
      Json block = Json::object({{"type", kind}, {kind, ""}});
      if (block.find("thinking") != nullptr) {
        block.set("signature", "");
      }
      out = open_block(std::move(block));
    }
    text_ += text;
    return out + delta(Json::object({{"type", kind + std::string("_delta")}, {kind, text}}));
  }

  std::string open_block(Json block) {
    std::string out = close_block();
    open_ = std::move(block);
    text_.clear();
    return out + event("content_block_start", {{"index", index()}, {"content_block", open_}});
  }

  std::string delta(Json delta) const {
    return event("content_block_delta", {{"index", index()}, {"delta", std::move(delta)}});
  }

  std::string close_block() {
    if (open_.is_null()) {
      return {};
    }
    const std::string type = open_.find("type")->as_string();
    if (type == "tool_use") {
      open_.set("input", Json::parse(text_).value());  // the parser of answers saw to it
    } else {
      open_.set(type, text_);
    }
    std::string out = event("content_block_stop", {{"index", index()}});
    blocks_.push_back(std::exchange(open_, Json()));
    return out;
  }

  /// Clients read the text of an answer that has none, too.
  std::string close_blocks() {
    std::string out = close_block();
    if (blocks_.empty()) {
      out = open_block(Json::object({{"type", "text"}, {"text", ""}}));
      out += close_block();
    }
    return out;
  }

  int64_t index() const { return static_cast<int64_t>(blocks_.size()); }

  std::string id_ = "msg_" + random_id();
  std::string model_;
  int64_t max_model_len_;
  JsonArray blocks_;  // that are over
  Json open_;         // the one that is not; null: none
  std::string text_;  // of the open one
  Json end_;
};

ParsedRequest parse_messages(const AppContext& context, const HttpRequest& request) {
  const auto body = parse_object(request.body);
  if (const auto* error = std::get_if<ApiError>(&body)) {
    return *error;
  }
  const ChatBody chat = chat_of_messages(std::get<Json>(body), context.options.schema.strictness);
  if (const auto* error = std::get_if<ApiError>(&chat)) {
    return *error;
  }
  const auto& [body_of_chat, ignored] = std::get<TranslatedBody>(chat);
  ParsedRequest parsed = read_chat_request(body_of_chat, context.options.schema);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    return renamed(*error, {{"stop", "stop_sequences"},
                            {"continue_final_message", "messages"},
                            {"response_format", "output_config.format"},
                            {"reasoning_effort", "output_config.effort"}});
  }
  std::get<GenerationRequest>(parsed).ignored = ignored;
  return parsed;
}

/// The context bounds an answer, too: clients ask for what their largest model could write.
void fit_context(const AppContext& context, GenerationJob& job) {
  const int64_t room =
      context.engine.options().max_model_len - static_cast<int64_t>(job.prompts.front().size());
  if (room > 0) {
    job.request.max_tokens = std::min(*job.request.max_tokens, room);
  }
}

}  // namespace

void route_messages(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  ParsedRequest parsed = parse_messages(context, exchange->request());
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    refuse(*exchange, *error);
    return;
  }
  GenerationJob job{.request = std::move(std::get<GenerationRequest>(parsed))};
  if (!job.request.max_tokens) {
    refuse(*exchange, {400, "max_tokens: expected a number of tokens", "max_tokens", ""});
    return;
  }
  if (const auto error = prepare_chat(context, job)) {
    refuse(*exchange, *error);
    return;
  }
  fit_context(context, job);
  if (job.request.thought_tokens && !thought_marks(job.form.reasoning)) {
    job.request.thought_tokens.reset();  // clients send it to models that do not think, too
    job.request.ignored.add("thinking.budget_tokens");
  }
  job.format = std::make_unique<MessageFormat>(context, job.request);
  job.names = {{"response_format.json_schema.schema", "output_config.format"}};
  run_generation(context, exchange, std::move(job));
}

void route_count_tokens(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  ParsedRequest parsed = parse_messages(context, exchange->request());
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    refuse(*exchange, *error);
    return;
  }
  GenerationJob job{.request = std::move(std::get<GenerationRequest>(parsed))};
  if (const auto error = prepare_chat(context, job)) {
    refuse(*exchange, *error);
    return;
  }
  const auto tokens = static_cast<int64_t>(job.prompts.front().size());
  context.metrics.record_ignored(job.request.ignored);
  exchange->respond({.headers = warning_headers(job.request.ignored),
                     .body = Json::object({{"input_tokens", tokens}}).dump()});
}

}  // namespace nibble
