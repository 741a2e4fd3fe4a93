#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/app.h"
#include "text/text_stream.h"

namespace nibble {

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
};
[[nodiscard]] Json usage_json(const Usage& usage);

/// One token that was chosen, with the text it has alone.
struct TokenEntry {
  TokenEvent event;
  int64_t text_offset = 0;  // characters of the answer before it
};

/// One of the answers of a request.
struct Choice {
  Choice(const GenerationRequest& request, const Tokenizer& tokenizer)
      : text(tokenizer,
             request.stop,
             request.include_stop ? StopText::kKeep : StopText::kOmit,
             request.skip_special_tokens ? DecodeSpecials::kSkip : DecodeSpecials::kKeep) {}

  int64_t index = 0;
  std::vector<int32_t> prompt;
  TextStream text;
  std::string answer;  // all text so far
  std::string unsent;  // of these, not yet streamed
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
  /// New text of a choice, or its end ("" unless finish_reason is set).
  [[nodiscard]] virtual Json delta(const Choice& choice, const std::string& text) const = 0;
  /// An event without choices, to carry the usage.
  [[nodiscard]] virtual Json usage_only() const = 0;
};

struct GenerationJob {
  GenerationRequest request;
  std::vector<std::vector<int32_t>> prompts;  // each answered request.n times
  std::unique_ptr<AnswerFormat> format;
};

/// Submits the job and answers the exchange, whole or as a stream. A client that goes away cancels
/// what is left of its job. Errors found before the first token become error answers.
void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job);

}  // namespace nibble
