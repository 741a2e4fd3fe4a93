#include "bench/serving/offline_report.h"

#include <string>

#include <gtest/gtest.h>

namespace nibble {
namespace {

OfflineTimings::Turn turn(double ms, double read_gbps) {
  return {.step_ms = {ms, 1.1 * ms, ms / 1.1}, .read_gbps = read_gbps};  // the median is ms
}

/// A host that slows down from turn to turn by `drift`, and by four between rounds.
std::vector<OfflineTimings> rounds_of(double other_ms, double drift) {
  std::vector<OfflineTimings> timings(2);
  timings[0].prefill_tokens = 100;
  timings[1].prefill_tokens = 200;
  double slow = 1;
  for (int round = 0; round < 3; ++round, slow *= 4) {
    for (OfflineTimings& shape : timings) {
      shape.turns.emplace_back();
    }
    timings[0].prefills.push_back({.ms = 10 * slow, .peak_tops = 2});
    slow *= drift;
    timings[1].prefills.push_back({.ms = other_ms * slow, .peak_tops = 2});
    for (int i = 0; i < 4; ++i) {
      timings[0].turns.back().push_back(turn(1 * slow, 10 / slow));
      slow *= drift;
      timings[1].turns.back().push_back(turn(other_ms * slow, 10 / slow));
      slow *= drift;
    }
  }
  return timings;
}

std::vector<ShapeReport> reports_of(const std::vector<OfflineTimings>& timings) {
  std::vector<ShapeReport> reports;
  for (const OfflineTimings& shape : timings) {
    const auto batch = static_cast<int64_t>(reports.size() + 1);
    reports.push_back(report_of({.batch = batch}, shape, 4'000'000, 500'000));
  }
  compare_with_first(timings, reports);
  return reports;
}

TEST(OfflineReport, RatesAndSharesOfOneShape) {
  const ShapeReport report = reports_of(rounds_of(5, 1))[1];
  EXPECT_EQ(report.prefill_ms, 20);
  EXPECT_EQ(report.prefill_tps, 200 / 20e-3);
  EXPECT_EQ(report.decode_ms, 20);
  EXPECT_EQ(report.decode_tps, 2 / 20e-3);
  // Of a round four turns of three steps each, 5, 5.5 and 5 / 1.1 ms in the first.
  const double round_ms = 4 * (20 + 1.1 * 20 + 20 / 1.1) + 20;
  EXPECT_NEAR(report.throughput_tps, 2 * 12 / (round_ms * 1e-3), 1e-6);
  EXPECT_EQ(report.read_gbps, 2.5);
  // 4 MB and twice 0.5 MB in 5 ms are a tenth of 10 GB/s, in slower rounds as in the first.
  EXPECT_NEAR(report.roofline.p25, 10, 1e-9);
  EXPECT_NEAR(report.roofline.p75, 10, 1e-9);
  EXPECT_EQ(report.rounds_ms, (std::vector<double>{5, 20, 80}));
  EXPECT_EQ(report.peak_tops, (std::vector<double>{2, 2, 2}));
}

TEST(OfflineReport, WithoutPeaksThereAreNone) {
  OfflineTimings timings = rounds_of(5, 1)[0];
  for (auto& prefill : timings.prefills) {
    prefill.peak_tops = 0;
  }
  EXPECT_TRUE(report_of({}, timings, 1, 1).peak_tops.empty());
}

TEST(OfflineReport, RatiosCompareNeighboursOnly) {
  const auto reports = reports_of(rounds_of(5, 1));
  EXPECT_FALSE(reports[0].prefill_over_first || reports[0].decode_over_first);
  // Twice the sequences in five times the time, in every round, whatever its speed.
  for (const double ratio :
       {reports[1].decode_over_first->p25, reports[1].decode_over_first->median,
        reports[1].decode_over_first->p75}) {
    EXPECT_NEAR(ratio, 0.4, 1e-9);
  }
  EXPECT_NEAR(reports[1].prefill_over_first->p25, 4, 1e-9);  // twice the tokens in half the time
}

TEST(OfflineReport, DriftShowsInTheQuartilesOnBothSides) {
  const Quartiles ratio = *reports_of(rounds_of(5, 1.5))[1].decode_over_first;
  EXPECT_NEAR(ratio.p25, 0.4 / 1.5, 1e-9);  // after a turn of the first on a quicker host
  EXPECT_NEAR(ratio.p75, 0.4 * 1.5, 1e-9);  // before one on a slower host
}

}  // namespace
}  // namespace nibble
