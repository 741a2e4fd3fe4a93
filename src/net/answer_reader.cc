#include "net/answer_reader.h"

#include <algorithm>
#include <utility>

#include "base/utf8.h"

namespace nibble {
namespace {

constexpr size_t kShownError = 300;

std::string text_of(const Json* value) {
  return value != nullptr && value->is_string() ? value->as_string() : std::string();
}

int64_t count_of(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && value->is_int() ? value->as_int() : 0;
}

std::optional<TokenUsage> usage_of(const Json& json) {
  const Json* usage = json.find("usage");
  if (usage == nullptr || !usage->is_object()) {
    return std::nullopt;
  }
  TokenUsage out{.prompt_tokens = count_of(*usage, "prompt_tokens"),
                 .completion_tokens = count_of(*usage, "completion_tokens"),
                 .cached_tokens = 0};
  if (const Json* details = usage->find("prompt_tokens_details")) {
    out.cached_tokens = count_of(*details, "cached_tokens");
  }
  return out;
}

// The beginning of a server's text, on one line and without what would steer a terminal.
std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size() && out.size() < kShownError;) {
    const size_t length = utf8_length(text, i);
    const bool control = static_cast<unsigned char>(text[i]) < 0x20 || text[i] == 0x7f;
    out += length == 0 || control ? std::string_view(" ") : text.substr(i, length);
    i += std::max<size_t>(length, 1);
  }
  return out;
}

StatusCode code_of(int status) {
  if (status == 404) {
    return StatusCode::kNotFound;
  }
  if (status == 429 || status >= 500 || status < 400) {
    return StatusCode::kUnavailable;
  }
  return StatusCode::kInvalidArgument;
}

}  // namespace

std::string_view answer_route(AnswerApi api) {
  switch (api) {
    case AnswerApi::kCompletions:
      return "/v1/completions";
    case AnswerApi::kChat:
      return "/v1/chat/completions";
    default:
      return "/generate";
  }
}

std::string error_message(std::string_view body) {
  std::string shown = printable(body);
  if (const auto json = Json::parse(body); json.ok()) {
    const Json* error = json->find("error");
    const Json& holder = error != nullptr ? *error : *json;
    if (holder.is_string()) {
      return printable(holder.as_string());
    }
    for (const char* key : {"message", "detail"}) {
      if (const std::string text = text_of(holder.find(key)); !text.empty()) {
        return printable(text);
      }
    }
  }
  return shown.empty() ? "no message" : shown;
}

Status http_error(const HttpHead& head, std::string_view body) {
  return {code_of(head.status), fmt::format("HTTP {}: {}", head.status, error_message(body))};
}

AnswerReader::AnswerReader(AnswerApi api, Sink sink)
    : api_(api),
      sink_(std::move(sink)),
      events_([this](const SseEvent& event) { take_event(event); }) {}

void AnswerReader::head(const HttpHead& head) { head_ = head; }

void AnswerReader::body(std::string_view bytes) {
  if (!status_.ok()) {
    return;
  }
  if (head_.status == 200 && streamed()) {
    if (Status status = events_.push(bytes); !status.ok()) {
      fail(std::move(status));
    }
  } else if (whole_.size() + bytes.size() > kWholeLimit) {
    fail(make_error(StatusCode::kCorrupt, "the server's answer is above {} bytes", kWholeLimit));
  } else {
    whole_ += bytes;
  }
}

Status AnswerReader::finish() {
  if (head_.status != 200) {
    return http_error(head_, whole_);
  }
  if (streamed()) {
    events_.finish();
    return status_;
  }
  const auto json = Json::parse(whole_);
  if (!json.ok()) {
    fail(json.status().with_context("the server's answer"));
  } else if (status_.ok()) {
    take_json(*json);
  }
  return status_;
}

void AnswerReader::fail(Status status) {
  if (status_.ok()) {
    status_ = std::move(status);
  }
}

void AnswerReader::take_event(const SseEvent& event) {
  if (!status_.ok()) {
    return;
  }
  if (event.data == "[DONE]") {
    sink_({.done = true});
    return;
  }
  const auto json = Json::parse(event.data);
  if (!json.ok()) {
    fail(json.status().with_context("an event of the server"));
    return;
  }
  take_json(*json);
}

void AnswerReader::take_json(const Json& json) {
  const Json* error = json.find("error");
  if (!json.is_object() || (error != nullptr && !error->is_null())) {
    fail(make_error(StatusCode::kUnavailable, "the server failed while it answered: {}",
                    error_message(json.dump())));
    return;
  }
  AnswerFrame frame;
  frame.usage = usage_of(json);
  if (api_ == AnswerApi::kGenerate) {
    take_generated(json, frame);
  } else if (const Json* choices = json.find("choices");
             choices != nullptr && choices->is_array() && !choices->as_array().empty()) {
    take_choice(choices->as_array().front(), frame);
  }
  sink_(frame);
}

void AnswerReader::take_choice(const Json& choice, AnswerFrame& frame) const {
  frame.has_choice = true;
  frame.finish_reason = text_of(choice.find("finish_reason"));
  if (api_ == AnswerApi::kCompletions) {
    frame.text = text_of(choice.find("text"));
    return;
  }
  const Json* delta = choice.find("delta");
  const Json* message = delta != nullptr ? delta : choice.find("message");
  if (message == nullptr) {
    return;
  }
  frame.text = text_of(message->find("content"));
  frame.reasoning = text_of(message->find("reasoning_content"));
  if (frame.reasoning.empty()) {
    frame.reasoning = text_of(message->find("reasoning"));
  }
}

// SGLang repeats the whole text in each frame.
void AnswerReader::take_generated(const Json& json, AnswerFrame& frame) {
  const Json* text = json.find("text");
  if (text != nullptr && text->is_string()) {
    frame.has_choice = true;
    if (text->as_string().size() > generated_) {
      frame.text = text->as_string().substr(generated_);
      generated_ = text->as_string().size();
    }
  }
  const Json* meta = json.find("meta_info");
  if (meta == nullptr) {
    return;
  }
  frame.usage = TokenUsage{.prompt_tokens = count_of(*meta, "prompt_tokens"),
                           .completion_tokens = count_of(*meta, "completion_tokens"),
                           .cached_tokens = count_of(*meta, "cached_tokens")};
  if (const Json* reason = meta->find("finish_reason"); reason != nullptr) {
    frame.finish_reason = reason->is_object() ? text_of(reason->find("type")) : text_of(reason);
  }
}

}  // namespace nibble
