#include "bench/client/load_metrics.h"

#include <gtest/gtest.h>

#include "bench/client/serve_table.h"

namespace nibble {
namespace {

LoadRecord record(double start, double ttft, std::vector<double> gaps, int64_t tokens) {
  LoadRecord out;
  out.start = start;
  out.ttft = ttft;
  out.latency = ttft;
  for (const double gap : gaps) {
    out.latency += gap;
  }
  out.gaps = std::move(gaps);
  out.input_len = 10;
  out.output_len = tokens;
  return out;
}

LoadRecord failed(const char* why) {
  LoadRecord out;
  out.status = make_error(StatusCode::kUnavailable, "{}", why);
  return out;
}

// Numbers worked out by hand.
LoadResult three_requests() {
  LoadResult result;
  result.duration = 4;
  result.records = {record(0, 0.5, {0.25, 0.25}, 5), record(1, 1.0, {1.0}, 2),
                    record(1.5, 0.25, {}, 1), failed("gone"), failed("gone")};
  return result;
}

TEST(LoadMetrics, TimesOfRequests) {
  const LoadMetrics metrics = measure_load(three_requests(), {});
  EXPECT_EQ(metrics.completed, 3);
  EXPECT_EQ(metrics.failed, 2);
  EXPECT_EQ(metrics.errors.at("gone"), 2);
  EXPECT_EQ(metrics.total_input, 30);
  EXPECT_EQ(metrics.total_output, 8);
  EXPECT_EQ(metrics.output_lens, (std::vector<int64_t>{5, 2, 1, 0, 0}));
  EXPECT_DOUBLE_EQ(metrics.output_throughput, 2);
  EXPECT_DOUBLE_EQ(metrics.total_throughput, 38.0 / 4);
  EXPECT_DOUBLE_EQ(metrics.concurrency, (1.0 + 2.0 + 0.25) / 4);
  EXPECT_DOUBLE_EQ(metrics.ttft.median(), 500);
  EXPECT_DOUBLE_EQ(metrics.tpot.mean(), (125.0 + 1000.0) / 2);  // of the two with several tokens
  EXPECT_DOUBLE_EQ(metrics.itl.median(), 250);
  EXPECT_DOUBLE_EQ(metrics.itl.max(), 1000);
  EXPECT_DOUBLE_EQ(metrics.e2el.max(), 2000);
  EXPECT_FALSE(metrics.goodput.has_value());
}

TEST(LoadMetrics, Peaks) {
  const LoadMetrics metrics = measure_load(three_requests(), {});
  // Frames at 0.5, 0.75 | 1.0, 1.75 | 2.0 | 3.0.
  EXPECT_DOUBLE_EQ(metrics.peak_output, 2);
  // [0, 1) ends where [1, 3) begins; [1.5, 1.75) lies within the latter.
  EXPECT_EQ(metrics.peak_concurrent, 2);
}

TEST(LoadMetrics, Goodput) {
  MetricOptions options;
  options.goodput.tpot = 500;
  EXPECT_DOUBLE_EQ(*measure_load(three_requests(), options).goodput, 2.0 / 4);  // one token is good
  options.goodput.ttft = 300;
  EXPECT_DOUBLE_EQ(*measure_load(three_requests(), options).goodput, 1.0 / 4);
  options.goodput.e2el = 100;
  EXPECT_DOUBLE_EQ(*measure_load(three_requests(), options).goodput, 0);
}

TEST(LoadMetrics, AnswersWithoutUsageAreCountedByFrames) {
  LoadResult result;
  result.duration = 1;
  result.records = {record(0, 0.1, {0.1, 0.1}, 0)};
  const LoadMetrics metrics = measure_load(result, {});
  EXPECT_EQ(metrics.total_output, 3);
  EXPECT_EQ(metrics.counted_by_frames, 1);
}

TEST(LoadMetrics, NothingCameBack) {
  LoadResult result;
  result.records = {failed("a")};
  const LoadMetrics metrics = measure_load(result, {});
  EXPECT_EQ(metrics.completed, 0);
  EXPECT_EQ(metrics.ttft.percentile(99), 0);
  EXPECT_EQ(metrics.peak_concurrent, 0);
}

TEST(Spread, AsNumpy) {
  // numpy 1.26: a = [1, 2, 4, 8]; mean 3.75, std 2.680951, percentile(a, [50, 90, 99]).
  const Spread spread({0.004, 0.001, 0.008, 0.002});
  EXPECT_NEAR(spread.mean(), 3.75, 1e-9);
  EXPECT_NEAR(spread.std(), 2.680951323690902, 1e-9);
  EXPECT_NEAR(spread.median(), 3.0, 1e-9);
  EXPECT_NEAR(spread.percentile(90), 6.8, 1e-9);
  EXPECT_NEAR(spread.percentile(99), 7.88, 1e-9);
}

TEST(ServeTable, LayoutOfVllm) {
  const LoadMetrics metrics = measure_load(three_requests(), {});
  RunFacts facts;
  facts.request_rate = 2;
  facts.percentiles = {90, 99.9};
  facts.percentile_metrics = {"ttft"};
  EXPECT_EQ(serve_table(metrics, facts),
            "============ Serving Benchmark Result ============\n"
            "Successful requests:                     3         \n"
            "Failed requests:                         2         \n"
            "Request rate configured (RPS):           2.00      \n"
            "Benchmark duration (s):                  4.00      \n"
            "Total input tokens:                      30        \n"
            "Total generated tokens:                  8         \n"
            "Request throughput (req/s):              0.75      \n"
            "Output token throughput (tok/s):         2.00      \n"
            "Peak output token throughput (tok/s):    2.00      \n"
            "Peak concurrent requests:                2.00      \n"
            "Total token throughput (tok/s):          9.50      \n"
            "---------------Time to First Token----------------\n"
            "Mean TTFT (ms):                          583.33    \n"
            "Median TTFT (ms):                        500.00    \n"
            "P90 TTFT (ms):                           900.00    \n"
            "P99.9 TTFT (ms):                         999.00    \n"
            "==================================================\n");
}

TEST(ServeTable, LayoutOfSglang) {
  const LoadMetrics metrics = measure_load(three_requests(), {});
  RunFacts facts;
  facts.layout = LoadTiming::kSglang;
  facts.backend = "sglang-oai";
  facts.request_rate = std::numeric_limits<double>::infinity();
  const std::string table = serve_table(metrics, facts);
  EXPECT_TRUE(
      table.starts_with("============ Serving Benchmark Result ============\n"
                        "Backend:                                 sglang-oai\n"
                        "Traffic request rate:                    inf       \n"
                        "Max request concurrency:                 not set   \n"
                        "Successful requests:                     3         \n"));
  EXPECT_NE(table.find("Max ITL (ms):                            1000.00   \n"), std::string::npos);
}

TEST(ServeJson, KeysOfBoth) {
  const LoadMetrics metrics = measure_load(three_requests(), {});
  RunFacts facts;
  facts.percentiles = {99.9};
  const Json vllm = serve_json(metrics, facts);
  for (const char* key :
       {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms",
        "median_tpot_ms", "std_itl_ms", "p99.9_e2el_ms", "error_counts"}) {
    EXPECT_NE(vllm.find(key), nullptr) << key;
  }
  facts.layout = LoadTiming::kSglang;
  const Json sglang = serve_json(metrics, facts);
  for (const char* key :
       {"backend", "dataset_name", "request_rate", "mean_e2e_latency_ms", "p99_e2e_latency_ms",
        "p95_itl_ms", "max_itl_ms", "concurrency", "accept_length", "input_throughput"}) {
    EXPECT_NE(sglang.find(key), nullptr) << key;
  }
}

TEST(ServeJson, DetailsHaveAnEntryForEachRequest) {
  const LoadResult result = three_requests();
  const LoadMetrics metrics = measure_load(result, {});
  Json json = serve_json(metrics, {});
  add_details(json, result, metrics);
  for (const char* key : {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times",
                          "queue_times", "generated_texts", "errors"}) {
    ASSERT_NE(json.find(key), nullptr) << key;
    EXPECT_EQ(json.find(key)->as_array().size(), 5u) << key;
  }
  EXPECT_EQ(json.find("errors")->as_array()[3].as_string(), "gone");
}

}  // namespace
}  // namespace nibble
