#include <algorithm>
#include <cmath>

#include "bench/client/paired_ratio.h"
#include "bench/client/serve_bench.h"
#include "bench/client/serve_report.h"
#include "bench/quartiles.h"
#include "tools/output.h"

namespace nibble {
namespace {

constexpr int64_t kMostConcurrency = 1 << 20;

/// One point of --sweep.
struct SweepPoint {
  std::string label;
  LoadLevel level;
};

struct Sweep {
  std::string what;
  std::vector<SweepPoint> points;
};

Result<Sweep> read_sweep(const ServeBench& bench) {
  const std::string& text = bench.flags().sweep;
  const size_t equals = text.find('=');
  const std::string what = text.substr(0, equals);
  if (equals == std::string::npos || (what != "rate" && what != "concurrency")) {
    return make_error(StatusCode::kInvalidArgument,
                      "--sweep {}: is neither rate=LIST nor concurrency=LIST", text);
  }
  Sweep out{.what = what == "rate" ? "request rate" : "concurrency", .points = {}};
  for (const std::string& value : split_list(std::string_view(text).substr(equals + 1))) {
    NIBBLE_ASSIGN_OR_RETURN(const double number, parse_rate("--sweep", value));
    SweepPoint point{.label = value, .level = bench.level()};
    if (what == "rate") {
      point.level.arrivals.rate = number;
    } else if (number > kMostConcurrency || number != std::floor(number)) {
      return make_error(StatusCode::kInvalidArgument, "--sweep {}: {} is no number of requests",
                        text, value);
    } else {
      point.level.max_concurrency = static_cast<int64_t>(number);
    }
    out.points.push_back(std::move(point));
  }
  if (out.points.empty()) {
    return make_error(StatusCode::kInvalidArgument, "--sweep {}: lists nothing", text);
  }
  return out;
}

std::string sweep_table(const Sweep& sweep, const std::vector<ServeRun>& runs) {
  std::string out = fmt::format("{:>12} {:>9} {:>10} {:>11} {:>9} {:>11} {:>9} {:>11} {:>7}\n",
                                sweep.what, "req/s", "out tok/s", "TTFT median", "p99 (ms)",
                                "TPOT median", "p99 (ms)", "E2EL median", "failed");
  for (const ServeRun& run : runs) {
    const LoadMetrics& of = run.metrics;
    out += fmt::format(
        "{:>12} {:>9.2f} {:>10.1f} {:>11.2f} {:>9.2f} {:>11.2f} {:>9.2f} {:>11.1f} {:>7}\n",
        run.label, of.request_throughput, of.output_throughput, of.ttft.median(),
        of.ttft.percentile(99), of.tpot.median(), of.tpot.percentile(99), of.e2el.median(),
        of.failed);
  }
  return out;
}

/// A number that servers are compared by.
struct Compared {
  const char* name;
  double (*of)(const LoadMetrics&);
};

constexpr Compared kCompared[] = {
    {"Request throughput (req/s)", [](const LoadMetrics& of) { return of.request_throughput; }},
    {"Output throughput (tok/s)", [](const LoadMetrics& of) { return of.output_throughput; }},
    {"Mean TTFT (ms)", [](const LoadMetrics& of) { return of.ttft.mean(); }},
    {"Median TTFT (ms)", [](const LoadMetrics& of) { return of.ttft.median(); }},
    {"P90 TTFT (ms)", [](const LoadMetrics& of) { return of.ttft.percentile(90); }},
    {"Mean TPOT (ms)", [](const LoadMetrics& of) { return of.tpot.mean(); }},
    {"Median TPOT (ms)", [](const LoadMetrics& of) { return of.tpot.median(); }},
    {"P90 TPOT (ms)", [](const LoadMetrics& of) { return of.tpot.percentile(90); }},
    {"Median ITL (ms)", [](const LoadMetrics& of) { return of.itl.median(); }},
    {"Median E2EL (ms)", [](const LoadMetrics& of) { return of.e2el.median(); }},
};

std::vector<ComparedNumber> compare(const std::vector<ServeRun>& a,
                                    const std::vector<ServeRun>& b) {
  std::vector<ComparedNumber> out;
  for (const Compared& what : kCompared) {
    std::vector<double> of_a;
    std::vector<double> of_b;
    for (size_t i = 0; i < a.size(); ++i) {
      of_a.push_back(what.of(a[i].metrics));
      of_b.push_back(what.of(b[i].metrics));
    }
    out.push_back({.name = what.name,
                   .a = median(of_a),
                   .b = median(of_b),
                   .ratio = paired_ratio(of_a, of_b)});
  }
  return out;
}

std::string compare_table(const std::vector<ComparedNumber>& numbers) {
  std::string out = fmt::format("{:<28} {:>12} {:>12} {:>8}   {}\n", "median of the rounds", "A",
                                "B", "B/A", "95 % interval");
  for (const ComparedNumber& number : numbers) {
    out += fmt::format("{:<28} {:>12.2f} {:>12.2f} {:>8.3f}", number.name, number.a, number.b,
                       number.ratio.ratio);
    if (const auto& interval = number.ratio.interval) {
      out += fmt::format("   {:.3f} to {:.3f}", interval->low, interval->high);
    }
    out += "\n";
  }
  return out;
}

Json compare_json(const std::vector<ComparedNumber>& numbers) {
  JsonArray out;
  for (const ComparedNumber& number : numbers) {
    Json json = Json::object(
        {{"name", number.name}, {"a", number.a}, {"b", number.b}, {"ratio", number.ratio.ratio}});
    if (number.ratio.interval) {
      json.set("low", number.ratio.interval->low);
      json.set("high", number.ratio.interval->high);
    }
    out.push_back(std::move(json));
  }
  return out;
}

Json detailed_json(const ServeRun& run, const LoadFlags& flags) {
  Json json = serve_json(run.metrics, run.facts);
  if (flags.save_detailed) {
    add_details(json, run.result, run.metrics);
  }
  return json;
}

Json runs_json(const std::vector<ServeRun>& runs, const LoadFlags& flags) {
  JsonArray out;
  for (const ServeRun& run : runs) {
    Json json = detailed_json(run, flags);
    json.set("label", run.label);
    out.push_back(std::move(json));
  }
  return out;
}

void print(const ServeBench& bench, const Json& json, const std::string& text) {
  print_out(bench.flags().json ? json.dump() + "\n" : bench.header() + text);
}

std::string server_line(const char* name, const Target& target) {
  return fmt::format("{}{} ({}), {}\n", name, target.url(), target.model(), target.load().route);
}

}  // namespace

Status run_single(const ServeBench& bench) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, bench.prompts(0));
  NIBBLE_ASSIGN_OR_RETURN(Target target, bench.open(""));
  NIBBLE_RETURN_IF_ERROR(bench.warm_up(target));
  ServeRun run = bench.run(target, prompts, bench.level());
  if (run.facts.layout == LoadTiming::kSglang) {
    run.facts.accept_length = target.accept_length();
  }
  const Json json = serve_json(run.metrics, run.facts);
  print(bench, json,
        server_line("", target) + error_lines(run.metrics) + serve_table(run.metrics, run.facts));
  NIBBLE_RETURN_IF_ERROR(write_result(bench.flags(), detailed_json(run, bench.flags())));
  const Status outcome = all_failed(run);
  std::vector<ServeRun> runs;
  runs.push_back(std::move(run));
  NIBBLE_RETURN_IF_ERROR(write_report(bench.flags(), "", runs, {}));
  return outcome;
}

Status run_sweep(const ServeBench& bench) {
  NIBBLE_ASSIGN_OR_RETURN(const Sweep sweep, read_sweep(bench));
  NIBBLE_ASSIGN_OR_RETURN(Target target, bench.open(""));
  NIBBLE_RETURN_IF_ERROR(bench.warm_up(target));
  std::vector<ServeRun> runs;
  std::string errors;
  for (const SweepPoint& point : sweep.points) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, bench.prompts(std::ssize(runs)));
    ServeRun run = bench.run(target, prompts, point.level);
    NIBBLE_RETURN_IF_ERROR(all_failed(run));
    run.label = point.label;
    errors += error_lines(run.metrics);
    runs.push_back(std::move(run));
  }
  const Json json = Json::object({{"sweep", sweep.what}, {"runs", runs_json(runs, bench.flags())}});
  print(bench, json, server_line("", target) + errors + sweep_table(sweep, runs));
  NIBBLE_RETURN_IF_ERROR(write_result(bench.flags(), json));
  return write_report(bench.flags(), sweep.what, runs, {});
}

Status run_compare(const ServeBench& bench) {
  const LoadFlags& flags = bench.flags();
  NIBBLE_ASSIGN_OR_RETURN(Target a, bench.open(flags.compare[0]));
  NIBBLE_ASSIGN_OR_RETURN(Target b, bench.open(flags.compare[1]));
  NIBBLE_RETURN_IF_ERROR(bench.warm_up(a));
  NIBBLE_RETURN_IF_ERROR(bench.warm_up(b));
  Target* targets[] = {&a, &b};
  std::vector<ServeRun> runs[2];
  std::string errors;
  for (int64_t round = 0; round < flags.rounds; ++round) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<Prompt> prompts, bench.prompts(round));
    for (const int turn : {0, 1}) {
      const auto which = static_cast<size_t>((round + turn) % 2);  // who is first changes
      ServeRun run = bench.run(*targets[which], prompts, bench.level());
      NIBBLE_RETURN_IF_ERROR(all_failed(run));
      run.label = fmt::format("{}, round {}", which == 0 ? "A" : "B", round + 1);
      errors += error_lines(run.metrics);
      runs[which].push_back(std::move(run));
    }
  }
  const std::vector<ComparedNumber> numbers = compare(runs[0], runs[1]);
  const Json json = Json::object({{"a", a.url()},
                                  {"b", b.url()},
                                  {"rounds", flags.rounds},
                                  {"compared", compare_json(numbers)},
                                  {"runs_a", runs_json(runs[0], flags)},
                                  {"runs_b", runs_json(runs[1], flags)}});
  print(bench, json,
        server_line("A: ", a) + server_line("B: ", b) + errors + compare_table(numbers));
  NIBBLE_RETURN_IF_ERROR(write_result(flags, json));
  std::vector<ServeRun> all = std::move(runs[0]);
  std::move(runs[1].begin(), runs[1].end(), std::back_inserter(all));
  return write_report(flags, "", all, numbers);
}

}  // namespace nibble
