#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/client/load_metrics.h"

namespace nibble {

/// What a run was, for its table and its JSON.
struct RunFacts {
  LoadTiming layout = LoadTiming::kVllm;
  std::string backend;  // "openai", "sglang-oai", ...
  std::string url;
  std::string model;
  std::string dataset;
  double request_rate = 0;  // requests/s; infinity: all at once
  double burstiness = 1;
  int64_t max_concurrency = 0;  // 0: no limit
  int64_t num_prompts = 0;
  int64_t input_len = 0;  // of random prompts
  int64_t output_len = 0;
  double range_ratio = 0;
  std::string range_semantics;  // "vllm", "sglang"
  std::string date;             // ISO 8601
  std::vector<std::string> percentile_metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> percentiles = {99};
  std::optional<double> accept_length;
};

/// "99" or "99.9".
[[nodiscard]] std::string percent_word(double percent);
/// The spread of the metric "ttft", "tpot", "itl" or "e2el".
[[nodiscard]] const Spread& spread_of(const LoadMetrics& metrics, const std::string& name);

/// The table of vLLM's or of SGLang's client, 50 columns wide.
[[nodiscard]] std::string serve_table(const LoadMetrics& metrics, const RunFacts& facts);

/// The same numbers under the keys of that client.
[[nodiscard]] Json serve_json(const LoadMetrics& metrics, const RunFacts& facts);
/// Adds lists with an entry for each request: lengths, times, texts and errors.
void add_details(Json& json, const LoadResult& result, const LoadMetrics& metrics);

}  // namespace nibble
