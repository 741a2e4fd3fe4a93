#include "bench/serving/offline_report.h"

#include <algorithm>
#include <numeric>

namespace nibble {

namespace {

/// Rates of a shape over those of the first, each compared with the first's right before and, if
/// there is one, right after it.
class RatesOverFirst final {
 public:
  explicit RatesOverFirst(double work) : work_(work) {}  // of the shape, over that of the first

  /// Times of turns: first, other, first, other, ...
  void add(const std::vector<double>& first, const std::vector<double>& other) {
    for (size_t i = 0; i < other.size(); ++i) {
      ratios_.push_back(work_ * first[i] / other[i]);
      if (i + 1 < first.size()) {
        ratios_.push_back(work_ * first[i + 1] / other[i]);
      }
    }
  }
  [[nodiscard]] Quartiles quartiles() const { return nibble::quartiles(ratios_); }

 private:
  double work_;
  std::vector<double> ratios_;
};

std::vector<double> medians_ms(const std::vector<OfflineTimings::Turn>& turns) {
  std::vector<double> ms(turns.size());
  std::ranges::transform(turns, ms.begin(), [](const auto& turn) { return median(turn.step_ms); });
  return ms;
}

/// The median of the rounds: tokens that a round decodes, over the time of its prefill and steps.
double throughput_of(const OfflineShape& shape, const OfflineTimings& timings) {
  std::vector<double> rates;
  for (size_t round = 0; round < timings.turns.size(); ++round) {
    double ms = timings.prefills[round].ms;
    int64_t steps = 0;
    for (const auto& turn : timings.turns[round]) {
      ms = std::accumulate(turn.step_ms.begin(), turn.step_ms.end(), ms);
      steps += std::ssize(turn.step_ms);
    }
    rates.push_back(static_cast<double>(shape.batch * steps) / ms * 1e3);
  }
  return median(rates);
}

}  // namespace

ShapeReport report_of(const OfflineShape& shape,
                      const OfflineTimings& timings,
                      int64_t weight_bytes,
                      int64_t kv_bytes) {
  ShapeReport report{
      .shape = shape, .kv_bytes = kv_bytes, .decode_experts = timings.decode_experts};
  for (const auto& prefill : timings.prefills) {
    report.rounds_ms.push_back(prefill.ms);
    if (prefill.peak_tops > 0) {
      report.peak_tops.push_back(prefill.peak_tops);
    }
  }
  const auto step_bytes = static_cast<double>(weight_bytes + shape.batch * kv_bytes);
  std::vector<double> steps_ms;
  std::vector<double> read_gbps;
  std::vector<double> percents;
  for (const auto& round : timings.turns) {
    for (const auto& turn : round) {
      steps_ms.insert(steps_ms.end(), turn.step_ms.begin(), turn.step_ms.end());
      read_gbps.push_back(turn.read_gbps);
      percents.push_back(100 * step_bytes / (median(turn.step_ms) * 1e-3) / (turn.read_gbps * 1e9));
    }
  }
  report.prefill_ms = median(report.rounds_ms);
  report.decode_ms = median(steps_ms);
  report.prefill_tps = static_cast<double>(timings.prefill_tokens) / report.prefill_ms * 1e3;
  report.decode_tps = static_cast<double>(shape.batch) / report.decode_ms * 1e3;
  report.throughput_tps = throughput_of(shape, timings);
  report.read_gbps = median(read_gbps);
  report.roofline = quartiles(percents);
  return report;
}

void compare_with_first(const std::vector<OfflineTimings>& timings,
                        std::vector<ShapeReport>& reports) {
  const OfflineTimings& first = timings.front();
  for (size_t i = 1; i < reports.size(); ++i) {
    const OfflineTimings& other = timings[i];
    RatesOverFirst prefill(static_cast<double>(other.prefill_tokens) /
                           static_cast<double>(first.prefill_tokens));
    prefill.add(reports[0].rounds_ms, reports[i].rounds_ms);
    reports[i].prefill_over_first = prefill.quartiles();
    RatesOverFirst decode(static_cast<double>(reports[i].shape.batch) /
                          static_cast<double>(reports[0].shape.batch));
    for (size_t round = 0; round < other.turns.size(); ++round) {
      decode.add(medians_ms(first.turns[round]), medians_ms(other.turns[round]));
    }
    reports[i].decode_over_first = decode.quartiles();
  }
}

}  // namespace nibble
