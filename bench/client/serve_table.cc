#include "bench/client/serve_table.h"

#include <algorithm>
#include <cmath>
#include <concepts>

#include "base/check.h"

namespace nibble {
namespace {

constexpr int kWidth = 50;

class Table final {
 public:
  void rule() { text_ += fmt::format("{:=^{}}\n", "", kWidth); }
  void title(std::string_view text) { text_ += fmt::format("{:=^{}}\n", text, kWidth); }
  void section(std::string_view text) { text_ += fmt::format("{:-^{}}\n", text, kWidth); }
  void row(std::string_view name, double value) {
    text_ += fmt::format("{:<40} {:<10.2f}\n", name, value);
  }
  void row(std::string_view name, std::integral auto value) {
    text_ += fmt::format("{:<40} {:<10}\n", name, value);
  }
  void row(std::string_view name, std::string_view value) {
    text_ += fmt::format("{:<40} {:<10}\n", name, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

struct MetricName {
  const char* key;
  const char* shown;
  const char* title;
};

constexpr MetricName kMetrics[] = {
    {"ttft", "TTFT", "Time to First Token"},
    {"tpot", "TPOT", "Time per Output Token (excl. 1st token)"},
    {"itl", "ITL", "Inter-token Latency"},
    {"e2el", "E2EL", "End-to-end Latency"},
};

std::string vllm_table(const LoadMetrics& metrics, const RunFacts& facts) {
  Table table;
  table.title(" Serving Benchmark Result ");
  table.row("Successful requests:", metrics.completed);
  table.row("Failed requests:", metrics.failed);
  if (facts.max_concurrency > 0) {
    table.row("Maximum request concurrency:", facts.max_concurrency);
  }
  if (!std::isinf(facts.request_rate)) {
    table.row("Request rate configured (RPS):", facts.request_rate);
  }
  table.row("Benchmark duration (s):", metrics.duration);
  table.row("Total input tokens:", metrics.total_input);
  table.row("Total generated tokens:", metrics.total_output);
  table.row("Request throughput (req/s):", metrics.request_throughput);
  if (metrics.goodput) {
    table.row("Request goodput (req/s):", *metrics.goodput);
  }
  table.row("Output token throughput (tok/s):", metrics.output_throughput);
  table.row("Peak output token throughput (tok/s):", metrics.peak_output);
  table.row("Peak concurrent requests:", static_cast<double>(metrics.peak_concurrent));
  table.row("Total token throughput (tok/s):", metrics.total_throughput);
  for (const MetricName& metric : kMetrics) {
    const auto& asked = facts.percentile_metrics;
    if (std::find(asked.begin(), asked.end(), metric.key) == asked.end()) {
      continue;
    }
    const Spread& spread = spread_of(metrics, metric.key);
    table.section(metric.title);
    table.row(fmt::format("Mean {} (ms):", metric.shown), spread.mean());
    table.row(fmt::format("Median {} (ms):", metric.shown), spread.median());
    for (const double percent : facts.percentiles) {
      table.row(fmt::format("P{} {} (ms):", percent_word(percent), metric.shown),
                spread.percentile(percent));
    }
  }
  table.rule();
  return table.take();
}

void sglang_latencies(Table& table, const LoadMetrics& metrics) {
  table.section("End-to-End Latency");
  table.row("Mean E2E Latency (ms):", metrics.e2el.mean());
  table.row("Median E2E Latency (ms):", metrics.e2el.median());
  table.section("Time to First Token");
  table.row("Mean TTFT (ms):", metrics.ttft.mean());
  table.row("Median TTFT (ms):", metrics.ttft.median());
  table.row("P99 TTFT (ms):", metrics.ttft.percentile(99));
  table.section("Inter-Token Latency");
  table.row("Mean ITL (ms):", metrics.itl.mean());
  table.row("Median ITL (ms):", metrics.itl.median());
  table.row("P95 ITL (ms):", metrics.itl.percentile(95));
  table.row("P99 ITL (ms):", metrics.itl.percentile(99));
  table.row("Max ITL (ms):", metrics.itl.max());
}

std::string sglang_table(const LoadMetrics& metrics, const RunFacts& facts) {
  Table table;
  table.title(" Serving Benchmark Result ");
  table.row("Backend:", facts.backend);
  table.row("Traffic request rate:", fmt::format("{}", facts.request_rate));
  table.row("Max request concurrency:",
            facts.max_concurrency > 0 ? std::to_string(facts.max_concurrency) : "not set");
  table.row("Successful requests:", metrics.completed);
  table.row("Benchmark duration (s):", metrics.duration);
  table.row("Total input tokens:", metrics.total_input);
  table.row("Total generated tokens:", metrics.total_output);
  if (metrics.retokenized) {
    table.row("Total generated tokens (retokenized):", *metrics.retokenized);
  }
  table.row("Request throughput (req/s):", metrics.request_throughput);
  table.row("Input token throughput (tok/s):", metrics.input_throughput);
  table.row("Output token throughput (tok/s):", metrics.output_throughput);
  table.row("Total token throughput (tok/s):", metrics.total_throughput);
  table.row("Concurrency:", metrics.concurrency);
  if (facts.accept_length) {
    table.row("Accept length:", *facts.accept_length);
  }
  sglang_latencies(table, metrics);
  table.rule();
  return table.take();
}

}  // namespace

std::string percent_word(double percent) { return fmt::format("{}", percent); }

const Spread& spread_of(const LoadMetrics& metrics, const std::string& name) {
  if (name == "ttft") {
    return metrics.ttft;
  }
  if (name == "tpot") {
    return metrics.tpot;
  }
  if (name == "itl") {
    return metrics.itl;
  }
  CHECK_MSG(name == "e2el", "no metric {}", name);
  return metrics.e2el;
}

std::string serve_table(const LoadMetrics& metrics, const RunFacts& facts) {
  return facts.layout == LoadTiming::kVllm ? vllm_table(metrics, facts)
                                           : sglang_table(metrics, facts);
}

}  // namespace nibble
