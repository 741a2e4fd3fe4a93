#include <chrono>

#include "chat_partner.h"
#include "net/answer_reader.h"
#include "net/http_client.h"
#include "net/served_model.h"

namespace nibble {
namespace {

using Clock = HttpClient::Clock;

constexpr auto kLook = std::chrono::milliseconds(30);  // for Ctrl-C

class RemotePartner final : public ChatPartner {
 public:
  RemotePartner(std::unique_ptr<HttpClient> client, ChatForm form)
      : client_(std::move(client)),
        api_(form == ChatForm::kText ? AnswerApi::kCompletions : AnswerApi::kChat) {}

  Status connect(const RemoteFlags& flags, const Url& url) {
    url_ = url.text();
    if (!flags.api_key.empty()) {
      headers_.push_back({"Authorization", "Bearer " + flags.api_key});
    }
    model_ = flags.model;
    if (model_.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(model_, first_served_model(*client_, headers_));
    }
    return {};
  }

  [[nodiscard]] std::string title() const override { return fmt::format("{} at {}", model_, url_); }
  [[nodiscard]] bool chats() const override { return api_ == AnswerApi::kChat; }

  Result<ChatReply> reply(const ChatTurn& turn, const ChatSinks& sinks) override {
    ChatReply out;
    Clock::time_point first;
    Clock::time_point now;
    int64_t frames = 0;
    AnswerReader reader(api_, [&](const AnswerFrame& frame) {
      take(frame, sinks, out);
      if (!frame.text.empty() || !frame.reasoning.empty()) {
        first = frames++ == 0 ? now : first;
      }
    });
    Status ended;
    bool over = false;
    const Clock::time_point start = Clock::now();
    HttpCall call{.method = "POST",
                  .target = std::string(answer_route(api_)),
                  .headers = headers_,
                  .body = body_of(turn),
                  .on_head = [&](const HttpHead& head) { reader.head(head); },
                  .on_body =
                      [&](std::string_view bytes, HttpCall::Time time) {
                        now = time;
                        reader.body(bytes);
                      },
                  .on_end =
                      [&](const Status& status) {
                        ended = status;
                        over = true;
                      }};
    const uint64_t number = client_->start(std::move(call));
    const std::function<void()> look = [&] {
      if (!over && turn.interrupts.any()) {
        client_->cancel(number);
      } else if (!over) {
        client_->at(Clock::now() + kLook, look);
      }
    };
    look();
    client_->run();
    if (ended.code() == StatusCode::kCancelled) {
      out.finish_reason = "cancelled";
    } else {
      NIBBLE_RETURN_IF_ERROR(outcome(ended.ok() ? reader.finish() : ended));
    }
    out.tokens = out.tokens > 0 ? out.tokens : frames;
    if (frames > 0) {
      out.ttft_ms = std::chrono::duration<double, std::milli>(first - start).count();
      out.seconds = std::chrono::duration<double>(now - first).count();
    }
    return out;
  }

 private:
  static void take(const AnswerFrame& frame, const ChatSinks& sinks, ChatReply& out) {
    if (!frame.reasoning.empty()) {
      sinks.on_reasoning(frame.reasoning);
    }
    if (!frame.text.empty()) {
      out.text += frame.text;
      sinks.on_text(frame.text);
    }
    if (!frame.finish_reason.empty()) {
      out.finish_reason = frame.finish_reason;
    }
    if (frame.usage) {
      out.tokens = frame.usage->completion_tokens;
    }
  }
  // Servers say in their own words that a prompt is too long; all of them name the context.
  static Status outcome(const Status& status) {
    if (status.code() == StatusCode::kInvalidArgument &&
        status.message().find("context") != std::string::npos) {
      return {StatusCode::kResourceExhausted, status.message()};
    }
    return status;
  }
  [[nodiscard]] std::string body_of(const ChatTurn& turn) const {
    const AnswerFlags& of = turn.settings;
    Json body = Json::object({{"model", model_},
                              {"stream", true},
                              {"stream_options", Json::object({{"include_usage", true}})},
                              {"max_tokens", of.max_tokens}});
    if (chats()) {
      body.set("messages", turn.messages);
    } else {
      body.set("prompt", turn.text);
    }
    const auto set = [&](const char* key, const auto& value) {
      if (value) {
        body.set(key, *value);
      }
    };
    set("temperature", of.temperature);
    set("top_p", of.top_p);
    set("top_k", of.top_k);
    set("min_p", of.min_p);
    set("repetition_penalty", of.repetition_penalty);
    set("seed", of.seed);
    if (!of.stop.empty()) {
      body.set("stop", JsonArray(of.stop.begin(), of.stop.end()));
    }
    return body.dump();
  }

  std::unique_ptr<HttpClient> client_;
  AnswerApi api_;
  std::string url_;
  std::string model_;
  std::vector<HttpHeader> headers_;
};

}  // namespace

Result<std::unique_ptr<ChatPartner>> open_remote_partner(const RemoteFlags& flags, ChatForm form) {
  NIBBLE_ASSIGN_OR_RETURN(const Url url, parse_url(flags.url));
  NIBBLE_ASSIGN_OR_RETURN(auto client, HttpClient::create(url, {.connect_s = 10, .stall_s = 600}));
  auto partner = std::make_unique<RemotePartner>(std::move(client), form);
  NIBBLE_RETURN_IF_ERROR(partner->connect(flags, url).with_context(url.text()));
  return std::unique_ptr<ChatPartner>(std::move(partner));
}

}  // namespace nibble
