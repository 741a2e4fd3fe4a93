#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/ignored_fields.h"

namespace nibble {

/// A cumulative histogram in Prometheus' sense.
class Histogram final {
 public:
  Histogram() = default;
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void observe(double value);
  /// Appends HELP, TYPE and samples; `labels` as "a=\"b\"".
  void write(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::vector<double> bounds_;   // upper, ascending
  std::vector<int64_t> counts_;  // per bucket; the last is +Inf
  double sum_ = 0;
};

/// What is known about a request when it ends; times in seconds.
struct RequestRecord {
  std::string finish_reason;  // "stop", "length", "abort", "timeout", "error"
  std::string key_name;       // of the key that it came with; "" without keys
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt
  int64_t max_tokens = 0;
  int64_t num_choices = 1;  // the request's n
  double queue = 0;         // until the first step
  double time_to_first_token = 0;
  double end_to_end = 0;
};

/// The server's own counters, and the text of /metrics. Thread-safe.
class ServerMetrics final {
 public:
  explicit ServerMetrics(int64_t max_model_len);

  void record_inter_token(double seconds);
  void record(const RequestRecord& request);
  void record_ignored(const IgnoredFields& fields);
  /// Prometheus text format 0.0.4, under vLLM's names.
  [[nodiscard]] std::string render(const EngineStats& stats,
                                   const EngineOptions& options,
                                   const std::string& model_name) const;

 private:
  void write_keys(std::string& out, std::string_view labels) const;
  void write_ends(std::string& out, std::string_view labels) const;
  void write_histograms(std::string& out, std::string_view labels) const;

  mutable std::mutex mutex_;
  struct KeyCounts {
    int64_t requests = 0, prompt_tokens = 0, generated_tokens = 0;
  };

  std::map<std::string, int64_t> finished_;
  std::map<std::string, KeyCounts> keys_;                // by name
  std::map<std::string, int64_t, std::less<>> ignored_;  // fields of requests
  Histogram first_token_, inter_token_, per_token_, end_to_end_, decode_;
  Histogram queue_, prefill_, inference_;
  Histogram prompt_tokens_, generated_tokens_, max_tokens_, computed_tokens_, num_choices_;
};

}  // namespace nibble
