#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "net/answer_reader.h"
#include "net/http_client.h"

namespace nibble {

/// Whose definitions hold. vLLM: every frame with choices counts, an answer ends with the last of
/// them, and a prompt is as long as the server says. SGLang: frames with text count, an answer ends
/// with its last frame, "[DONE]" included, and a prompt is as long as the client made it.
enum class LoadTiming : uint8_t { kVllm, kSglang };

/// One request, ready to be sent.
struct LoadRequest {
  std::string body;
  int64_t input_len = -1;  // tokens of the prompt, as the client counts; -1: it does not know
};

struct LoadPlan {
  std::vector<LoadRequest> requests;
  std::vector<double> arrivals;  // seconds since the start, of each request; empty: all at once
  int64_t max_concurrency = 0;   // 0: no limit
};

/// Where the requests of a plan go, and how their answers are read.
struct LoadTarget {
  AnswerApi api = AnswerApi::kCompletions;
  std::string route;
  std::vector<HttpHeader> headers;
  LoadTiming timing = LoadTiming::kVllm;
};

/// What happened to one request. Times in seconds, on one clock that starts with the run.
struct LoadRecord {
  double start = 0;  // when it was sent
  double queue = 0;  // how long the client held it back for --max-concurrency
  double ttft = 0;
  double latency = 0;
  std::vector<double> gaps;  // between the frames that count
  int64_t input_len = 0;
  int64_t output_len = 0;  // by the server's usage; 0: it gave none
  std::string text;        // reasoning included
  std::string answer;      // without it
  std::string finish_reason;
  Status status;  // ok: the answer came
};

struct LoadResult {
  std::vector<LoadRecord> records;  // in the plan's order
  double duration = 0;              // from the first request to the end of the last answer
};

/// Sends the requests at their times and waits for all answers; a request that fails is recorded.
///   on_done: called with the number of answers so far
LoadResult run_load(HttpClient& client,
                    const LoadTarget& target,
                    LoadPlan plan,
                    const std::function<void(int64_t)>& on_done);

}  // namespace nibble
