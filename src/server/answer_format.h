#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/error.h"
#include "server/schema.h"
#include "text/answer/answer_stream.h"

namespace nibble {

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;  // of the completion
};
[[nodiscard]] Json usage_json(const Usage& usage);

/// One token that was chosen, with the text it has alone.
struct TokenEntry {
  TokenEvent event;
  int64_t text_offset = 0;  // characters of the answer before it
};

/// One of the answers of a request.
struct Choice {
  Choice(const Tokenizer& tokenizer, AnswerStream::Options options)
      : text(tokenizer, std::move(options)) {}

  int64_t index = 0;
  std::vector<int32_t> prompt;
  std::vector<int32_t> tokens;  // of the answer, one that ends it too
  AnswerStream text;
  std::string answer;     // all content so far
  std::string reasoning;  // all that was thought
  std::vector<ToolCall> calls;
  std::vector<AnswerPiece> unsent;  // what of these is not streamed yet, in order: whole, all of it
  int64_t seen_calls = 0;           // those that are left out, too
  int64_t sent_calls = 0;
  int64_t unsent_tokens = 0;
  std::vector<TokenEntry> entries;  // with log probabilities; not yet sent ones when streaming
  Usage usage;
  double queue_seconds = 0;
  std::string finish_reason;  // "" while running; "stop", "length", "tool_calls" or "abort"
  std::shared_ptr<std::atomic<bool>> cancelled;
  std::chrono::steady_clock::time_point first_token, last_token;
};

/// How a route words its answers: whole, or as the bytes of a stream of server-sent events. Of a
/// stream, "" says that there is nothing to send.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  /// The body of a whole answer, called once. `total` is the usage of all choices.
  [[nodiscard]] virtual std::string whole_body(const std::vector<Choice>& choices,
                                               const Usage& total) = 0;
  /// What a choice begins with.
  [[nodiscard]] virtual std::string stream_begin(const Choice& choice) = 0;
  /// New text of a choice; a call as it begins, its arguments (call: its place among the calls).
  [[nodiscard]] virtual std::string stream_piece(const Choice& choice,
                                                 const AnswerPiece& piece,
                                                 int64_t call) = 0;
  /// Says why a choice ended.
  [[nodiscard]] virtual std::string stream_choice_end(const Choice& choice) = 0;
  /// What comes behind the last choice.
  [[nodiscard]] virtual std::string stream_end(const Usage& total) = 0;
  /// Ends a stream that failed.
  [[nodiscard]] virtual std::string stream_failure(const ApiError& error) = 0;
};

/// The event of OpenAI's chats and completions: without a name.
[[nodiscard]] std::string data_event(std::string_view data);
/// An event with a name, which is the member "type" of its object.
[[nodiscard]] std::string named_event(const Json& event);

/// Chunks as OpenAI's chats and completions have them; JSON texts are whole objects.
class ChunkFormat : public AnswerFormat {
 public:
  explicit ChunkFormat(const GenerationRequest& request)
      : include_usage_(request.include_usage), continuous_usage_(request.continuous_usage) {}

  [[nodiscard]] std::string whole_body(const std::vector<Choice>& choices,
                                       const Usage& total) final;
  [[nodiscard]] std::string stream_begin(const Choice& choice) final;
  [[nodiscard]] std::string stream_piece(const Choice& choice,
                                         const AnswerPiece& piece,
                                         int64_t call) final;
  [[nodiscard]] std::string stream_choice_end(const Choice& choice) final;
  [[nodiscard]] std::string stream_end(const Usage& total) final;
  [[nodiscard]] std::string stream_failure(const ApiError& error) final;

 protected:
  /// Members of the envelope: id, object, created, model, then `choices`.
  [[nodiscard]] virtual Json whole(const std::vector<Choice>& choices) const = 0;
  /// The first event of a choice; null if the route has none.
  [[nodiscard]] virtual Json opening(const Choice& choice) const = 0;
  /// Null for a piece that the route does not show.
  [[nodiscard]] virtual Json delta(const Choice& choice,
                                   const AnswerPiece& piece,
                                   int64_t call) const = 0;
  /// The event that says why a choice ended.
  [[nodiscard]] virtual Json end(const Choice& choice) const = 0;
  /// An event without choices, to carry the usage.
  [[nodiscard]] virtual Json usage_only() const = 0;

 private:
  [[nodiscard]] std::string framed(const Choice& choice, Json event) const;

  bool include_usage_, continuous_usage_;
};

}  // namespace nibble
