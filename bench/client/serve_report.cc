#include "bench/client/serve_report.h"

#include <algorithm>

#include "quantizer/report/report_html.h"
#include "serve_page.h"
#include "tools/output.h"

namespace nibble {
namespace {

constexpr size_t kMostSeconds = 600;

// Values at 0, 1, ... 100 %.
Json quantiles_json(const Spread& spread) {
  JsonArray out;
  for (int percent = 0; percent <= 100 && !spread.sorted().empty(); ++percent) {
    out.emplace_back(spread.percentile(percent));
  }
  return out;
}

// Frames in each stretch of `step` seconds, as a rate.
Json per_second_json(const LoadResult& result, double& step) {
  step = std::max(1.0, result.duration / static_cast<double>(kMostSeconds));
  std::vector<double> counts(static_cast<size_t>(result.duration / step) + 1);
  const auto add = [&](double at) {
    ++counts[std::min(counts.size() - 1, static_cast<size_t>(at / step))];
  };
  for (const LoadRecord& record : result.records) {
    if (!record.status.ok()) {
      continue;
    }
    double at = record.start + record.ttft;
    add(at);
    for (const double gap : record.gaps) {
      at += gap;
      add(at);
    }
  }
  JsonArray out;
  for (const double count : counts) {
    out.emplace_back(count / step);
  }
  return out;
}

Json run_json(const ServeRun& run) {
  Json json = serve_json(run.metrics, run.facts);
  json.set("label", run.label);
  json.set("p99_ttft", run.metrics.ttft.percentile(99));
  json.set("url", run.facts.url);
  json.set("model", run.facts.model);
  Json quantiles = Json::object({});
  for (const char* name : {"ttft", "tpot", "itl", "e2el"}) {
    quantiles.set(name, quantiles_json(spread_of(run.metrics, name)));
  }
  json.set("quantiles", std::move(quantiles));
  double step = 1;
  json.set("per_second", per_second_json(run.result, step));
  json.set("step", step);
  return json;
}

Json compared_json(const ComparedNumber& number) {
  Json json = Json::object(
      {{"name", number.name}, {"a", number.a}, {"b", number.b}, {"ratio", number.ratio.ratio}});
  if (number.ratio.interval) {
    json.set("low", number.ratio.interval->low);
    json.set("high", number.ratio.interval->high);
  }
  return json;
}

}  // namespace

Status write_report(const LoadFlags& flags,
                    const std::string& swept,
                    const std::vector<ServeRun>& runs,
                    const std::vector<ComparedNumber>& compared) {
  if (flags.report.empty()) {
    return {};
  }
  JsonArray shown;
  for (const ServeRun& run : runs) {
    shown.push_back(run_json(run));
  }
  JsonArray ratios;
  for (const ComparedNumber& number : compared) {
    ratios.push_back(compared_json(number));
  }
  const Json report =
      Json::object({{"swept", swept}, {"runs", std::move(shown)}, {"compared", std::move(ratios)}});
  return write_text_file(flags.report, page_with(kServePage, report));
}

}  // namespace nibble
