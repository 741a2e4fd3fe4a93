#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/app.h"
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
  AnswerStream text;
  std::string answer;     // all content so far
  std::string reasoning;  // all that was thought
  std::vector<ToolCall> calls;
  std::vector<AnswerPiece> unsent;  // of these, not yet streamed
  int64_t seen_calls = 0;           // those that are left out, too
  int64_t sent_calls = 0;
  int64_t unsent_tokens = 0;
  std::vector<TokenEntry> entries;  // with log probabilities; not yet sent ones when streaming
  Usage usage;
  double queue_seconds = 0;
  std::string finish_reason;  // "" while running
  std::shared_ptr<std::atomic<bool>> cancelled;
  std::chrono::steady_clock::time_point first_token, last_token;
};

/// How a route words its answers. JSON texts are whole objects.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  /// Members of the envelope: id, object, created, model, then `choices`.
  [[nodiscard]] virtual Json whole(const std::vector<Choice>& choices) const = 0;
  /// The first event of a choice; null if the route has none.
  [[nodiscard]] virtual Json opening(const Choice& choice) const = 0;
  /// New text of a choice; a call as it begins, its arguments (call: its place among the calls).
  /// Null for a piece that the route does not show.
  [[nodiscard]] virtual Json delta(const Choice& choice,
                                   const AnswerPiece& piece,
                                   int64_t call) const = 0;
  /// The event that says why a choice ended.
  [[nodiscard]] virtual Json end(const Choice& choice) const = 0;
  /// An event without choices, to carry the usage.
  [[nodiscard]] virtual Json usage_only() const = 0;
};

struct GenerationJob {
  GenerationRequest request;
  std::vector<std::vector<int32_t>> prompts;  // each answered request.n times
  std::unique_ptr<AnswerFormat> format;
  AnswerForm form = {};                    // of the answers; that of completions has no parts
  std::shared_ptr<const Grammar> grammar;  // of the answers; null: they are free
};

/// Submits the job and answers the exchange, whole or as a stream. A client that goes away cancels
/// what is left of its job. Errors found before the first token become error answers.
void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job);

}  // namespace nibble
