#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "engine/request.h"
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
  int64_t text_offset = 0;  // characters of the text before it
};

/// One of the answers of a request.
struct Choice {
  Choice(const Tokenizer& tokenizer, AnswerStream::Options options)
      : text(tokenizer, std::move(options)) {}

  int64_t index = 0;
  std::vector<int32_t> prompt;
  std::vector<ScoredToken> prompt_logprobs;  // if asked for: of prompt[1], prompt[2] ...
  int64_t text_start = 0;                    // characters in front of the answer in the same text
  bool opened = false;                       // its first event was sent
  std::vector<int32_t> tokens;               // of the answer, one that ends it too
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
  bool timed_out = false;     // it ended at its deadline, and its finish_reason is "length"
  std::string finish_reason;  // "" while running; "stop", "length", "tool_calls" or "abort"
  std::shared_ptr<std::atomic<bool>> cancelled;
  std::chrono::steady_clock::time_point first_token, last_token;
};

/// What stop_reason says of an answer cut by its deadline.
inline constexpr const char* kTimeoutReason = "timeout";
/// The stop string that ended an answer, or kTimeoutReason; else null.
[[nodiscard]] Json stop_reason(const Choice& choice);

}  // namespace nibble
