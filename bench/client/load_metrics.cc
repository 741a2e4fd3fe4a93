#include "bench/client/load_metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eval/statistics.h"

namespace nibble {
namespace {

constexpr double kMs = 1000;
constexpr size_t kMostReasons = 20;

int64_t text_tokens(const LoadRecord& record, const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) {
    return 0;
  }
  const auto ids = tokenizer->encode(record.text, SpecialTokens::kParse);
  return ids.ok() ? std::ssize(*ids) : 0;
}

// The tokens of an answer, counted as well as can be.
int64_t output_tokens(const LoadRecord& record, int64_t by_text, LoadMetrics& metrics) {
  if (record.output_len > 0) {
    return record.output_len;
  }
  if (by_text > 0) {
    return by_text;
  }
  ++metrics.counted_by_frames;
  return std::ssize(record.gaps) + 1;
}

bool is_good(const Goodput& wanted, const LoadRecord& record, double tpot) {
  const auto within = [](const std::optional<double>& limit, double seconds) {
    return !limit || seconds * kMs <= *limit;
  };
  return within(wanted.ttft, record.ttft) && within(wanted.tpot, tpot) &&
         within(wanted.e2el, record.latency);
}

double peak_frames(const std::vector<LoadRecord>& records) {
  std::map<int64_t, int64_t> seconds;
  double first = std::numeric_limits<double>::infinity();
  for (const LoadRecord& record : records) {
    first = record.status.ok() ? std::min(first, record.start) : first;
  }
  int64_t most = 0;
  for (const LoadRecord& record : records) {
    if (!record.status.ok()) {
      continue;
    }
    double at = record.start + record.ttft - first;
    most = std::max(most, ++seconds[static_cast<int64_t>(at)]);
    for (const double gap : record.gaps) {
      at += gap;
      most = std::max(most, ++seconds[static_cast<int64_t>(at)]);
    }
  }
  return static_cast<double>(most);
}

int64_t peak_requests(const std::vector<LoadRecord>& records) {
  std::vector<std::pair<double, int>> changes;  // at equal times one leaves before another comes
  for (const LoadRecord& record : records) {
    if (record.status.ok()) {
      changes.emplace_back(record.start, 1);
      changes.emplace_back(record.start + record.latency, -1);
    }
  }
  std::sort(changes.begin(), changes.end());
  int64_t now = 0;
  int64_t most = 0;
  for (const auto& [time, change] : changes) {
    now += change;
    most = std::max(most, now);
  }
  return most;
}

void count_error(const Status& status, std::map<std::string, int64_t>& errors) {
  const auto found = errors.find(status.message());
  if (found != errors.end() || errors.size() < kMostReasons) {
    ++errors[status.message()];
  } else {
    ++errors["other reasons"];
  }
}

struct Times {
  std::vector<double> ttft, tpot, itl, e2el;  // seconds
};

void set_rates(LoadMetrics& metrics, const Times& times, int64_t good, const Goodput& wanted) {
  const double seconds = std::max(metrics.duration, 1e-9);
  const auto rate = [&](int64_t count) { return static_cast<double>(count) / seconds; };
  metrics.request_throughput = rate(metrics.completed);
  metrics.input_throughput = rate(metrics.total_input);
  metrics.output_throughput = rate(metrics.total_output);
  metrics.total_throughput = rate(metrics.total_input + metrics.total_output);
  metrics.concurrency = std::accumulate(times.e2el.begin(), times.e2el.end(), 0.0) / seconds;
  if (wanted.asked()) {
    metrics.goodput = rate(good);
  }
}

}  // namespace

Spread::Spread(std::vector<double> values) : sorted_(std::move(values)) {
  for (double& value : sorted_) {
    value *= kMs;
  }
  std::sort(sorted_.begin(), sorted_.end());
  if (sorted_.empty()) {
    return;
  }
  const auto count = static_cast<double>(sorted_.size());
  mean_ = std::accumulate(sorted_.begin(), sorted_.end(), 0.0) / count;
  double squares = 0;
  for (const double value : sorted_) {
    squares += (value - mean_) * (value - mean_);
  }
  std_ = std::sqrt(squares / count);
}

double Spread::percentile(double percent) const {
  return sorted_.empty() ? 0 : quantile(sorted_, percent / 100);
}

LoadMetrics measure_load(const LoadResult& result, const MetricOptions& options) {
  LoadMetrics metrics;
  metrics.duration = result.duration;
  if (options.tokenizer != nullptr) {
    metrics.retokenized = 0;
  }
  Times times;
  int64_t good = 0;
  for (const LoadRecord& record : result.records) {
    if (!record.status.ok()) {
      ++metrics.failed;
      metrics.output_lens.push_back(0);
      count_error(record.status, metrics.errors);
      continue;
    }
    ++metrics.completed;
    const int64_t by_text = text_tokens(record, options.tokenizer);
    const int64_t tokens = output_tokens(record, by_text, metrics);
    metrics.output_lens.push_back(tokens);
    metrics.total_output += tokens;
    metrics.total_input += std::max<int64_t>(record.input_len, 0);
    if (metrics.retokenized) {
      *metrics.retokenized += by_text;
    }
    double tpot = 0;
    if (tokens > 1) {
      tpot = (record.latency - record.ttft) / static_cast<double>(tokens - 1);
      times.tpot.push_back(tpot);
    }
    good += is_good(options.goodput, record, tpot) ? 1 : 0;
    times.ttft.push_back(record.ttft);
    times.e2el.push_back(record.latency);
    times.itl.insert(times.itl.end(), record.gaps.begin(), record.gaps.end());
  }
  set_rates(metrics, times, good, options.goodput);
  metrics.peak_output = peak_frames(result.records);
  metrics.peak_concurrent = peak_requests(result.records);
  metrics.ttft = Spread(std::move(times.ttft));
  metrics.tpot = Spread(std::move(times.tpot));
  metrics.itl = Spread(std::move(times.itl));
  metrics.e2el = Spread(std::move(times.e2el));
  return metrics;
}

}  // namespace nibble
