#include <algorithm>

#include "bench/client/paired_ratio.h"
#include "bench/client/serve_bench.h"
#include "eval/gsm8k.h"
#include "eval/statistics.h"
#include "tools/output.h"

namespace nibble {
namespace {

constexpr int64_t kUsualAnswer = 512;
constexpr int64_t kUsualConcurrency = 16;

struct Problems {
  std::vector<GsmProblem> examples;
  std::vector<GsmProblem> asked;
};

Result<Problems> read_problems(const LoadFlags& flags) {
  if (flags.dataset_path.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--dataset-name gsm8k needs its file: --dataset-path FILE");
  }
  const bool own = flags.gsm8k_examples.empty();
  Problems out;
  NIBBLE_ASSIGN_OR_RETURN(
      out.asked, read_gsm8k(flags.dataset_path, flags.num_prompts + (own ? flags.fewshot : 0)));
  if (own) {
    const auto count = std::min<int64_t>(flags.fewshot, std::ssize(out.asked));
    out.examples.assign(out.asked.begin(), out.asked.begin() + count);
    out.asked.erase(out.asked.begin(), out.asked.begin() + count);
  } else if (flags.fewshot > 0) {
    NIBBLE_ASSIGN_OR_RETURN(out.examples, read_gsm8k(flags.gsm8k_examples, flags.fewshot));
  }
  if (out.asked.empty() || std::ssize(out.examples) < flags.fewshot) {
    return make_error(StatusCode::kInvalidArgument,
                      "--fewshot {}: leaves no problem to ask, or there are fewer examples",
                      flags.fewshot);
  }
  return out;
}

/// Answers of one server, in the order of the problems.
struct Answers {
  LoadResult result;
  std::vector<double> strict;  // 1 or 0
  std::vector<double> flexible;
};

struct Server {
  Target target;
  Answers answers;
};

void score(const std::vector<GsmProblem>& asked, Answers& answers) {
  for (size_t i = 0; i < asked.size(); ++i) {
    const std::string& text = answers.result.records[i].answer;
    const std::string& reference = asked[i].answer;
    answers.strict.push_back(equals_reference(strict_answer(text), reference) ? 1 : 0);
    answers.flexible.push_back(equals_reference(flexible_answer(text), reference) ? 1 : 0);
  }
}

LoadPlan plan_of(const Target& target,
                 const Problems& problems,
                 const ServeBench& bench,
                 size_t from,
                 size_t to) {
  BodyOptions body = bench.options().body;
  body.stop = gsm8k_stops();
  const LoadFlags& flags = bench.flags();
  LoadPlan plan;
  for (size_t i = from; i < to; ++i) {
    Prompt prompt;
    prompt.text = gsm8k_prompt(problems.examples, problems.asked[i]);
    prompt.output_len = flags.fixed_output > 0 ? flags.fixed_output : kUsualAnswer;
    plan.requests.push_back({.body = target.body(prompt, body), .input_len = -1});
  }
  plan.max_concurrency = flags.max_concurrency > 0 ? flags.max_concurrency : kUsualConcurrency;
  return plan;
}

// Each block of problems is asked of all servers before the next; who is first changes.
void ask_in_turns(std::vector<Server>& servers, const Problems& problems, const ServeBench& bench) {
  const size_t count = problems.asked.size();
  const size_t rounds =
      servers.size() == 1 ? 1 : std::min(count, static_cast<size_t>(bench.flags().rounds));
  for (size_t round = 0; round < rounds; ++round) {
    const size_t from = count * round / rounds;
    const size_t to = count * (round + 1) / rounds;
    for (size_t turn = 0; turn < servers.size(); ++turn) {
      Server& server = servers[(round + turn) % servers.size()];
      LoadResult part = run_load(server.target.client(), server.target.load(),
                                 plan_of(server.target, problems, bench, from, to), nullptr);
      LoadResult& all = server.answers.result;
      all.duration += part.duration;
      std::move(part.records.begin(), part.records.end(), std::back_inserter(all.records));
    }
  }
}

Json server_json(const Server& server, const LoadMetrics& metrics) {
  const Estimate strict = estimate_of(server.answers.strict);
  const Estimate flexible = estimate_of(server.answers.flexible);
  return Json::object({{"url", server.target.url()},
                       {"model", server.target.model()},
                       {"items", std::ssize(server.answers.strict)},
                       {"failed", metrics.failed},
                       {"strict_match", strict.mean},
                       {"strict_match_error", strict.error},
                       {"flexible_match", flexible.mean},
                       {"flexible_match_error", flexible.error},
                       {"median_ttft_ms", metrics.ttft.median()},
                       {"p90_ttft_ms", metrics.ttft.percentile(90)},
                       {"median_tpot_ms", metrics.tpot.median()},
                       {"p90_tpot_ms", metrics.tpot.percentile(90)},
                       {"output_throughput", metrics.output_throughput}});
}

std::string server_row(const char* name, const Server& server, const LoadMetrics& metrics) {
  const auto percent = [](const std::vector<double>& scores) {
    const Estimate of = estimate_of(scores);
    return fmt::format("{:.2f} +- {:.2f}", 100 * of.mean, 100 * of.error);
  };
  return fmt::format("{:<4} {:>16} {:>16} {:>11.2f} {:>9.2f} {:>11.2f} {:>9.2f} {:>7}\n", name,
                     percent(server.answers.flexible), percent(server.answers.strict),
                     metrics.ttft.median(), metrics.ttft.percentile(90), metrics.tpot.median(),
                     metrics.tpot.percentile(90), metrics.failed);
}

/// The times of both, request by request, where both answered.
struct PairedTimes {
  std::vector<double> ttft[2];
  std::vector<double> latency[2];
};

PairedTimes paired_times(const std::vector<Server>& servers) {
  PairedTimes out;
  const auto& a = servers[0].answers.result.records;
  const auto& b = servers[1].answers.result.records;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].status.ok() && b[i].status.ok()) {
      out.ttft[0].push_back(a[i].ttft);
      out.ttft[1].push_back(b[i].ttft);
      out.latency[0].push_back(a[i].latency);
      out.latency[1].push_back(b[i].latency);
    }
  }
  return out;
}

std::string ratio_text(const PairedRatio& ratio) {
  return ratio.interval ? fmt::format("{:.3f} ({:.3f} to {:.3f})", ratio.ratio, ratio.interval->low,
                                      ratio.interval->high)
                        : fmt::format("{:.3f}", ratio.ratio);
}

void add_pairs(const std::vector<Server>& servers, Json& json, std::string& text) {
  const Estimate difference =
      paired_difference(servers[1].answers.flexible, servers[0].answers.flexible);
  const PairedTimes times = paired_times(servers);
  const PairedRatio ttft = paired_ratio(times.ttft[0], times.ttft[1]);
  const PairedRatio latency = paired_ratio(times.latency[0], times.latency[1]);
  json.set("accuracy_difference", difference.mean);
  json.set("accuracy_difference_error", difference.error);
  json.set("ttft_ratio", ttft.ratio);
  json.set("e2el_ratio", latency.ratio);
  text += fmt::format(
      "B - A: {:+.2f} +- {:.2f} points of flexible match; B/A, problem by problem, with 95 % "
      "intervals:\nTTFT {}, end-to-end latency {}\n",
      100 * difference.mean, 100 * difference.error, ratio_text(ttft), ratio_text(latency));
}

}  // namespace

Status run_gsm8k(const ServeBench& bench) {
  const LoadFlags& flags = bench.flags();
  NIBBLE_ASSIGN_OR_RETURN(const Problems problems, read_problems(flags));
  const std::vector<std::string> urls =
      flags.compare.empty() ? std::vector<std::string>{""} : flags.compare;
  std::vector<Server> servers;
  for (const std::string& url : urls) {
    NIBBLE_ASSIGN_OR_RETURN(Target target, bench.open(url));
    LoadPlan first = plan_of(target, problems, bench, 0, 1);
    NIBBLE_RETURN_IF_ERROR(target.try_out(first.requests.front().body));
    servers.push_back({.target = std::move(target), .answers = {}});
  }
  ask_in_turns(servers, problems, bench);
  std::string text = fmt::format(
      "GSM8K, {} problems, {} examples, streamed chats at temperature {}; +- one standard error\n"
      "{:<4} {:>16} {:>16} {:>11} {:>9} {:>11} {:>9} {:>7}\n",
      problems.asked.size(), flags.fewshot, bench.options().body.temperature.value_or(0), "",
      "flexible (%)", "strict (%)", "TTFT median", "p90 (ms)", "TPOT median", "p90 (ms)", "failed");
  JsonArray rows;
  std::string where;
  for (size_t i = 0; i < servers.size(); ++i) {
    const char* name = i == 0 ? "A" : "B";
    score(problems.asked, servers[i].answers);
    const LoadMetrics metrics = measure_load(servers[i].answers.result, {});
    rows.push_back(server_json(servers[i], metrics));
    text += server_row(name, servers[i], metrics);
    where += fmt::format("{}: {} ({})\n{}", name, servers[i].target.url(),
                         servers[i].target.model(), error_lines(metrics));
  }
  Json json = Json::object(
      {{"dataset", "gsm8k"}, {"fewshot", flags.fewshot}, {"servers", std::move(rows)}});
  if (servers.size() == 2) {
    add_pairs(servers, json, text);
  }
  print_out(flags.json ? json.dump() + "\n" : where + text);
  return write_result(flags, json);
}

}  // namespace nibble
