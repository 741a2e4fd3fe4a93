#include <cmath>

#include "bench/client/serve_table.h"

namespace nibble {
namespace {

Json rate_json(double rate) { return std::isinf(rate) ? Json("inf") : Json(rate); }

Json optional_json(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

Json vllm_json(const LoadMetrics& metrics, const RunFacts& facts) {
  Json json = Json::object(
      {{"date", facts.date},
       {"backend", facts.backend},
       {"base_url", facts.url},
       {"model_id", facts.model},
       {"num_prompts", facts.num_prompts},
       {"request_rate", rate_json(facts.request_rate)},
       {"burstiness", facts.burstiness},
       {"max_concurrency", facts.max_concurrency > 0 ? Json(facts.max_concurrency) : Json()},
       {"duration", metrics.duration},
       {"completed", metrics.completed},
       {"failed", metrics.failed},
       {"total_input_tokens", metrics.total_input},
       {"total_output_tokens", metrics.total_output},
       {"request_throughput", metrics.request_throughput},
       {"request_goodput", optional_json(metrics.goodput)},
       {"output_throughput", metrics.output_throughput},
       {"total_token_throughput", metrics.total_throughput},
       {"max_output_tokens_per_s", metrics.peak_output},
       {"max_concurrent_requests", metrics.peak_concurrent}});
  for (const std::string& name : facts.percentile_metrics) {
    const Spread& spread = spread_of(metrics, name);
    json.set(fmt::format("mean_{}_ms", name), spread.mean());
    json.set(fmt::format("median_{}_ms", name), spread.median());
    json.set(fmt::format("std_{}_ms", name), spread.std());
    for (const double percent : facts.percentiles) {
      json.set(fmt::format("p{}_{}_ms", percent_word(percent), name), spread.percentile(percent));
    }
  }
  return json;
}

void add_spread(Json& json, const std::string& name, const Spread& spread) {
  json.set(fmt::format("mean_{}_ms", name), spread.mean());
  json.set(fmt::format("median_{}_ms", name), spread.median());
  json.set(fmt::format("std_{}_ms", name), spread.std());
  if (name == "itl") {
    json.set("p95_itl_ms", spread.percentile(95));
  }
  json.set(fmt::format("p99_{}_ms", name), spread.percentile(99));
  if (name == "itl") {
    json.set("max_itl_ms", spread.max());
  }
}

Json sglang_json(const LoadMetrics& metrics, const RunFacts& facts) {
  Json json = Json::object(
      {{"backend", facts.backend},
       {"dataset_name", facts.dataset},
       {"request_rate", rate_json(facts.request_rate)},
       {"max_concurrency", facts.max_concurrency > 0 ? Json(facts.max_concurrency) : Json()},
       {"random_input_len", facts.input_len},
       {"random_output_len", facts.output_len},
       {"random_range_ratio", facts.range_ratio},
       {"duration", metrics.duration},
       {"completed", metrics.completed},
       {"failed", metrics.failed},
       {"total_input_tokens", metrics.total_input},
       {"total_output_tokens", metrics.total_output},
       {"total_output_tokens_retokenized",
        metrics.retokenized ? Json(*metrics.retokenized) : Json()},
       {"request_throughput", metrics.request_throughput},
       {"input_throughput", metrics.input_throughput},
       {"output_throughput", metrics.output_throughput},
       {"total_throughput", metrics.total_throughput},
       {"concurrency", metrics.concurrency},
       {"accept_length", optional_json(facts.accept_length)}});
  add_spread(json, "e2e_latency", metrics.e2el);
  add_spread(json, "ttft", metrics.ttft);
  add_spread(json, "tpot", metrics.tpot);
  add_spread(json, "itl", metrics.itl);
  return json;
}

}  // namespace

Json serve_json(const LoadMetrics& metrics, const RunFacts& facts) {
  Json json =
      facts.layout == LoadTiming::kVllm ? vllm_json(metrics, facts) : sglang_json(metrics, facts);
  json.set("random_range_semantics", facts.range_semantics);
  Json reasons = Json::object({});
  for (const auto& [message, count] : metrics.errors) {
    reasons.set(message, count);
  }
  json.set("error_counts", std::move(reasons));
  return json;
}

void add_details(Json& json, const LoadResult& result, const LoadMetrics& metrics) {
  JsonArray inputs, outputs, ttfts, itls, latencies, starts, queues, texts, errors;
  for (size_t i = 0; i < result.records.size(); ++i) {
    const LoadRecord& record = result.records[i];
    inputs.emplace_back(record.input_len);
    outputs.emplace_back(metrics.output_lens[i]);
    ttfts.emplace_back(record.ttft);
    itls.emplace_back(JsonArray(record.gaps.begin(), record.gaps.end()));
    latencies.emplace_back(record.latency);
    starts.emplace_back(record.start);
    queues.emplace_back(record.queue);
    texts.emplace_back(record.text);
    errors.emplace_back(record.status.message());
  }
  json.set("input_lens", std::move(inputs));
  json.set("output_lens", std::move(outputs));
  json.set("ttfts", std::move(ttfts));
  json.set("itls", std::move(itls));
  json.set("latencies", std::move(latencies));
  json.set("start_times", std::move(starts));
  json.set("queue_times", std::move(queues));
  json.set("generated_texts", std::move(texts));
  json.set("errors", std::move(errors));
}

}  // namespace nibble
