#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/session.h"
#include "text/answer/answer_parser.h"

namespace nibble {

/// One answer to ask of an engine.
struct AnswerRequest {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 0;
  SamplingParams sampling;
  std::vector<std::string> stop;
  /// Receives the text as it comes; may be empty.
  std::function<void(std::string_view)> on_text;
  /// How the model writes thoughts, which on_reasoning receives; by default all is text.
  AnswerParser::Options parts;
  std::function<void(std::string_view)> on_reasoning;
  /// Becomes readable when the answer shall end early (a signalfd); -1: never.
  int interrupt_fd = -1;
};

struct Answer {
  std::string text;             // without thoughts
  std::vector<int32_t> tokens;  // including an end token, up to where a stop string was complete
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  std::string finish_reason;  // stop, length or cancelled
  double ttft_ms = 0;         // from the request to the first token
  double tpot_ms = 0;         // between later tokens, on average; 0 with fewer than two
};

/// Runs one request to its end on the calling thread. Errors: those of Engine::submit, and
/// kUnavailable with the engine's message when it fails on the way.
Result<Answer> ask(ServingSession& session, AnswerRequest request);

}  // namespace nibble
