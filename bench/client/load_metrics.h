#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/client/load_run.h"
#include "text/tokenizer.h"

namespace nibble {

/// Milliseconds of many requests, or of many gaps.
class Spread final {
 public:
  Spread() = default;
  /// values: seconds
  explicit Spread(std::vector<double> values);

  /// Of no values all are 0.
  [[nodiscard]] double mean() const { return mean_; }
  [[nodiscard]] double std() const { return std_; }  // of the population, as numpy.std
  [[nodiscard]] double median() const { return percentile(50); }
  [[nodiscard]] double max() const { return sorted_.empty() ? 0 : sorted_.back(); }
  /// Between neighbours on the line through them, as numpy.percentile. percent in [0, 100]
  [[nodiscard]] double percentile(double percent) const;
  [[nodiscard]] const std::vector<double>& sorted() const { return sorted_; }

 private:
  std::vector<double> sorted_;
  double mean_ = 0;
  double std_ = 0;
};

/// What a good request needs, in ms; absent: anything is good.
struct Goodput {
  std::optional<double> ttft;
  std::optional<double> tpot;
  std::optional<double> e2el;

  [[nodiscard]] bool asked() const { return ttft || tpot || e2el; }
};

struct LoadMetrics {
  int64_t completed = 0;
  int64_t failed = 0;
  int64_t total_input = 0;
  int64_t total_output = 0;
  std::optional<int64_t> retokenized;  // of the texts, by --tokenizer
  double duration = 0;                 // s
  double request_throughput = 0;       // requests/s
  std::optional<double> goodput;       // requests/s
  double input_throughput = 0;         // tokens/s
  double output_throughput = 0;
  double total_throughput = 0;
  double concurrency = 0;  // the sum of all latencies over the duration
  double peak_output = 0;  // most frames in a second since the first request
  int64_t peak_concurrent = 0;
  int64_t counted_by_frames = 0;  // answers without usage, where no tokenizer counted them either
  Spread ttft;
  Spread tpot;  // of requests with more than one token: (latency - TTFT) / (tokens - 1)
  Spread itl;   // of all gaps together
  Spread e2el;
  std::vector<int64_t> output_lens;       // by request; 0 of those that failed
  std::map<std::string, int64_t> errors;  // how often each was the reason
};

struct MetricOptions {
  const Tokenizer* tokenizer = nullptr;
  Goodput goodput;
};

/// Tokens of an answer are those of the server's usage, else those of its text.
[[nodiscard]] LoadMetrics measure_load(const LoadResult& result, const MetricOptions& options);

}  // namespace nibble
