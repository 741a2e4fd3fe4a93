#include "server/metrics.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include <fmt/format.h>

#include "quant/kv_formats.h"

namespace nibble {
namespace {

const std::vector<double> kTokenSeconds = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075,
                                           0.1,    0.15,  0.2,   0.3,   0.4,  0.5,   0.75, 1,
                                           2.5,    5,     7.5,   10,    20,   40,    80};
const std::vector<double> kRequestSeconds = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                             30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};

std::vector<double> token_counts(int64_t largest) {
  std::vector<double> bounds;
  for (int64_t decade = 1; decade <= largest; decade *= 10) {
    for (const int64_t step : {1, 2, 5}) {
      if (decade * step <= largest) {
        bounds.push_back(static_cast<double>(decade * step));
      }
    }
  }
  return bounds;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') {
      out += '\\';
    }
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

/// One metric with one sample.
void write_value(std::string& out,
                 std::string_view type,
                 std::string_view name,
                 std::string_view labels,
                 double value) {
  out += fmt::format("# HELP {0} {0}\n# TYPE {0} {1}\n{0}{{{2}}} {3}\n", name, type, labels, value);
}

/// Counters with one sample each.
void write_counters(std::string& out,
                    std::string_view labels,
                    std::initializer_list<std::pair<std::string_view, int64_t>> counters) {
  for (const auto& [name, value] : counters) {
    write_value(out, "counter", name, labels, static_cast<double>(value));
  }
}

/// Share of the pages of a pool that are used, of the pool with the largest: where a cache ends.
double fullest_pool(const EngineStats& stats) {
  double most = 0;
  for (const PoolStats& pool : stats.pools) {
    const double total = static_cast<double>(std::max<int64_t>(pool.pages_total, 1));
    most = std::max(most, static_cast<double>(pool.pages_used) / total);
  }
  return most;
}

/// Pages of the cache, and by pool where layers differ.
void write_pools(std::string& out, std::string_view labels, const EngineStats& stats) {
  write_value(out, "gauge", "vllm:kv_cache_usage_perc", labels, fullest_pool(stats));
  write_value(out, "gauge", "nibble:kv_cache_pages_used", labels,
              static_cast<double>(stats.pages_used));
  write_value(out, "gauge", "nibble:kv_cache_pages_total", labels,
              static_cast<double>(stats.pages_total));
  if (stats.pools.size() < 2) {
    return;
  }
  const auto write = [&](std::string_view name, int64_t PoolStats::*count) {
    out += fmt::format("# HELP {0} {0}\n# TYPE {0} gauge\n", name);
    for (size_t i = 0; i < stats.pools.size(); ++i) {
      out += fmt::format("{}{{{},pool=\"{}\",window=\"{}\"}} {}\n", name, labels, i,
                         stats.pools[i].window, stats.pools[i].*count);
    }
  };
  write("nibble:kv_cache_pool_pages_used", &PoolStats::pages_used);
  write("nibble:kv_cache_pool_pages_total", &PoolStats::pages_total);
}

/// Of servers that propose tokens ahead.
void write_speculation(std::string& out, std::string_view labels, const SpeculationStats& counts) {
  write_counters(out, labels,
                 {{"vllm:spec_decode_num_drafts_total", counts.drafts},
                  {"vllm:spec_decode_num_draft_tokens_total", counts.draft_tokens},
                  {"vllm:spec_decode_num_accepted_tokens_total", counts.accepted_tokens}});
  constexpr std::string_view kPlaces = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
  out += fmt::format("# HELP {0} {0}\n# TYPE {0} counter\n", kPlaces);
  for (size_t place = 0; place < counts.accepted_at.size(); ++place) {
    out += fmt::format("{}{{{},position=\"{}\"}} {}\n", kPlaces, labels, place,
                       counts.accepted_at[place]);
  }
}

/// Tokens of prompts, and where they came from.
void write_prompts(std::string& out, std::string_view labels, const EngineStats& stats) {
  write_counters(out, labels,
                 {{"vllm:prompt_tokens_total", stats.prompt_tokens},
                  {"vllm:prompt_tokens_cached_total", stats.cached_tokens},
                  {"vllm:prefix_cache_queries_total", stats.prompt_tokens},
                  {"vllm:prefix_cache_hits_total", stats.cached_tokens}});
  out +=
      "# HELP vllm:prompt_tokens_by_source_total Prompt tokens computed, and found in the cache\n";
  out += "# TYPE vllm:prompt_tokens_by_source_total counter\n";
  for (const auto& [source, count] :
       {std::pair{"local_compute", stats.prompt_tokens - stats.cached_tokens},
        std::pair{"local_cache_hit", stats.cached_tokens}}) {
    out += fmt::format("vllm:prompt_tokens_by_source_total{{{},source=\"{}\"}} {}\n", labels,
                       source, count);
  }
}

/// How rows are spread over experts, of models that have them: active / runs experts had rows, of
/// slots / active in the mean, the most rows_max / runs.
void write_experts(std::string& out, std::string_view labels, const ExpertCounts& counts) {
  if (counts.runs == 0) {
    return;
  }
  write_counters(out, labels,
                 {{"nibble:expert_layer_runs_total", counts.runs},
                  {"nibble:expert_active_total", counts.active},
                  {"nibble:expert_slots_total", counts.slots},
                  {"nibble:expert_rows_max_total", counts.rows_max}});
}

}  // namespace

void Histogram::observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  ++counts_[static_cast<size_t>(bucket - bounds_.begin())];
  sum_ += value;
}

void Histogram::write(std::string& out, std::string_view name, std::string_view labels) const {
  out += fmt::format("# HELP {0} {0}\n# TYPE {0} histogram\n", name);
  int64_t total = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const std::string bound = i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf";
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bound, total);
  }
  out += fmt::format("{0}_sum{{{1}}} {2}\n{0}_count{{{1}}} {3}\n", name, labels, sum_, total);
}

ServerMetrics::ServerMetrics(int64_t max_model_len)
    : finished_({{"stop", 0}, {"length", 0}, {"abort", 0}, {"timeout", 0}, {"error", 0}}),
      first_token_(kTokenSeconds),
      inter_token_(kTokenSeconds),
      per_token_(kTokenSeconds),
      end_to_end_(kRequestSeconds),
      decode_(kRequestSeconds),
      queue_(kRequestSeconds),
      prefill_(kRequestSeconds),
      inference_(kRequestSeconds),
      prompt_tokens_(token_counts(max_model_len)),
      generated_tokens_(token_counts(max_model_len)),
      max_tokens_(token_counts(max_model_len)),
      computed_tokens_(token_counts(max_model_len)),
      num_choices_({1, 2, 5, 10, 20}) {}

void ServerMetrics::record_inter_token(double seconds) {
  const std::lock_guard lock(mutex_);
  inter_token_.observe(seconds);
}

void ServerMetrics::record(const RequestRecord& request) {
  const std::lock_guard lock(mutex_);
  ++finished_[request.finish_reason];
  if (!request.key_name.empty()) {
    KeyCounts& counts = keys_[request.key_name];
    ++counts.requests;
    counts.prompt_tokens += request.prompt_tokens;
    counts.generated_tokens += request.generated_tokens;
  }
  prompt_tokens_.observe(static_cast<double>(request.prompt_tokens));
  generated_tokens_.observe(static_cast<double>(request.generated_tokens));
  max_tokens_.observe(static_cast<double>(request.max_tokens));
  num_choices_.observe(static_cast<double>(request.num_choices));
  end_to_end_.observe(request.end_to_end);
  if (request.generated_tokens > 0) {
    const double decode = request.end_to_end - request.time_to_first_token;
    first_token_.observe(request.time_to_first_token);
    decode_.observe(decode);
    queue_.observe(request.queue);
    prefill_.observe(std::max(request.time_to_first_token - request.queue, 0.0));
    inference_.observe(std::max(request.end_to_end - request.queue, 0.0));
    computed_tokens_.observe(static_cast<double>(request.prompt_tokens - request.cached_tokens));
    if (request.generated_tokens > 1) {
      per_token_.observe(decode / static_cast<double>(request.generated_tokens - 1));
    }
  }
}

void ServerMetrics::record_ignored(const IgnoredFields& fields) {
  const std::lock_guard lock(mutex_);
  for (const std::string_view name : fields.known) {
    ++ignored_[std::string(name)];
  }
  if (fields.unknown > 0) {
    ignored_["(unknown)"] += fields.unknown;
  }
}

/// By the name of the key that requests came with.
void ServerMetrics::write_keys(std::string& out, std::string_view labels) const {
  const auto write = [&](std::string_view name, int64_t KeyCounts::*count) {
    if (!keys_.empty()) {
      out += fmt::format("# HELP {0} {0}\n# TYPE {0} counter\n", name);
    }
    for (const auto& [key, counts] : keys_) {
      out += fmt::format("{}{{{},key=\"{}\"}} {}\n", name, labels, escaped(key), counts.*count);
    }
  };
  write("nibble:key_requests_total", &KeyCounts::requests);
  write("nibble:key_prompt_tokens_total", &KeyCounts::prompt_tokens);
  write("nibble:key_generation_tokens_total", &KeyCounts::generated_tokens);
}

/// How requests ended, whose they were, and what of them had no effect.
void ServerMetrics::write_ends(std::string& out, std::string_view labels) const {
  out += "# HELP vllm:request_success_total Finished requests\n";
  out += "# TYPE vllm:request_success_total counter\n";
  for (const auto& [reason, count] : finished_) {
    out += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels,
                       reason, count);
  }
  write_keys(out, labels);
  if (!ignored_.empty()) {
    out += "# HELP nibble:ignored_request_fields_total Fields of requests without effect\n";
    out += "# TYPE nibble:ignored_request_fields_total counter\n";
  }
  for (const auto& [name, count] : ignored_) {
    out += fmt::format("nibble:ignored_request_fields_total{{{},field=\"{}\"}} {}\n", labels, name,
                       count);
  }
}

void ServerMetrics::write_histograms(std::string& out, std::string_view labels) const {
  first_token_.write(out, "vllm:time_to_first_token_seconds", labels);
  inter_token_.write(out, "vllm:inter_token_latency_seconds", labels);
  per_token_.write(out, "vllm:request_time_per_output_token_seconds", labels);
  end_to_end_.write(out, "vllm:e2e_request_latency_seconds", labels);
  decode_.write(out, "vllm:request_decode_time_seconds", labels);
  queue_.write(out, "vllm:request_queue_time_seconds", labels);
  prefill_.write(out, "vllm:request_prefill_time_seconds", labels);
  inference_.write(out, "vllm:request_inference_time_seconds", labels);
  computed_tokens_.write(out, "vllm:request_prefill_kv_computed_tokens", labels);
  num_choices_.write(out, "vllm:request_params_n", labels);
  prompt_tokens_.write(out, "vllm:request_prompt_tokens", labels);
  generated_tokens_.write(out, "vllm:request_generation_tokens", labels);
  max_tokens_.write(out, "vllm:request_params_max_tokens", labels);
}

std::string ServerMetrics::render(const EngineStats& stats,
                                  const EngineOptions& options,
                                  const std::string& model_name) const {
  const std::string labels = fmt::format("model_name=\"{}\",engine=\"0\"", escaped(model_name));
  std::string out;
  const auto gauge = [&](std::string_view name, double value) {
    write_value(out, "gauge", name, labels, value);
  };
  gauge("vllm:num_requests_running", static_cast<double>(stats.running));
  gauge("vllm:num_requests_waiting", static_cast<double>(stats.waiting));
  write_value(out, "gauge", "vllm:num_requests_waiting_by_reason", labels + ",reason=\"capacity\"",
              static_cast<double>(stats.waiting));
  write_pools(out, labels, stats);
  write_value(out, "gauge", "vllm:cache_config_info",
              fmt::format("{},block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"{}\","
                          "cache_dtype=\"{}\"",
                          labels, options.page_size, stats.pages_total, options.prefix_caching,
                          kv_code_name(options.kv_code)),
              1);
  write_counters(out, labels, {{"vllm:generation_tokens_total", stats.generated_tokens}});
  write_prompts(out, labels, stats);
  write_counters(out, labels,
                 {{"vllm:num_preemptions_total", stats.preemptions},
                  {"nibble:engine_steps_total", stats.steps}});
  if (options.speculation.tokens > 0) {
    write_speculation(out, labels, stats.speculation);
  }
  write_experts(out, labels, stats.experts);
  const std::lock_guard lock(mutex_);
  write_ends(out, labels);
  write_histograms(out, labels);
  return out;
}

}  // namespace nibble
