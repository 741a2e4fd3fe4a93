#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "net/http_response.h"
#include "net/sse_parser.h"

namespace nibble {

/// What a server is asked with: the completions and the chat of OpenAI, SGLang's own route.
enum class AnswerApi : uint8_t { kCompletions, kChat, kGenerate };

/// "/v1/completions", "/v1/chat/completions" or "/generate".
[[nodiscard]] std::string_view answer_route(AnswerApi api);

struct TokenUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
};

/// One frame of a streamed answer.
struct AnswerFrame {
  bool has_choice = false;  // it belongs to the text, even if it adds none
  std::string text;
  std::string reasoning;
  std::string finish_reason;  // empty before the last
  std::optional<TokenUsage> usage;
  bool done = false;  // "[DONE]": has nothing else
};

/// Reads the answer to one request with one choice, streamed or whole, as it comes.
class AnswerReader final {
 public:
  using Sink = std::function<void(const AnswerFrame&)>;

  AnswerReader(AnswerApi api, Sink sink);
  AnswerReader(const AnswerReader&) = delete;
  AnswerReader& operator=(const AnswerReader&) = delete;

  void head(const HttpHead& head);
  void body(std::string_view bytes);
  /// All has come: what went wrong. A status other than 200 is kInvalidArgument, kNotFound (404)
  /// or kUnavailable (429, 5xx) with the server's own message; an error within a
  /// stream is kUnavailable; a body that is not the API's is kCorrupt.
  Status finish();

 private:
  static constexpr size_t kWholeLimit = size_t{64} << 20;

  [[nodiscard]] bool streamed() const {
    return head_.content_type.starts_with("text/event-stream");
  }
  void take_event(const SseEvent& event);
  void take_json(const Json& json);
  void take_choice(const Json& choice, AnswerFrame& frame) const;
  void take_generated(const Json& json, AnswerFrame& frame);
  void fail(Status status);

  AnswerApi api_;
  Sink sink_;
  SseParser events_;
  HttpHead head_;
  std::string whole_;     // of an answer that is not streamed
  size_t generated_ = 0;  // bytes of text that /generate, which repeats them, has sent
  Status status_;
};

/// The message of an error object in any of the usual shapes; else the beginning of the body.
[[nodiscard]] std::string error_message(std::string_view body);
/// The Status for an HTTP status that is not 200.
[[nodiscard]] Status http_error(const HttpHead& head, std::string_view body);

}  // namespace nibble
