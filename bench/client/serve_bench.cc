#include "bench/client/serve_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>

#include "base/file.h"
#include "base/log.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace nibble {
namespace {

constexpr int64_t kTryTokens = 32;  // of the first request's answer
// Seeds of rounds lie apart, those of warm-ups beside them.
constexpr uint64_t kRoundSeeds = 1'000'003;
constexpr uint64_t kWarmupSeed = 500'009;

std::string now_text() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

std::string semantics_name(RangeSemantics semantics) {
  return semantics == RangeSemantics::kSglang ? "sglang" : "vllm";
}

}  // namespace

Result<ServeBench> ServeBench::create(const LoadFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(LoadOptions options, read_load_flags(flags));
  ServeBench bench(flags, std::move(options));
  if (!flags.tokenizer.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(bench.tokenizer_, Tokenizer::load(flags.tokenizer));
  }
  return bench;
}

Result<Target> ServeBench::open(const std::string& url) const {
  TargetOptions target = options_.target;
  if (!url.empty()) {
    target.base_url = url;
  }
  return Target::open(target);
}

Result<std::vector<Prompt>> ServeBench::make_prompts(int64_t count, uint64_t seed) const {
  const bool random = flags_->dataset.starts_with("random");
  const PromptOptions options{.count = count,
                              .seed = seed,
                              .input_len = flags_->input_len,
                              .output_len = flags_->output_len,
                              .prefix_len = flags_->prefix_len,
                              .range_ratio = flags_->range_ratio,
                              .semantics = options_.semantics,
                              .tokenizer = tokenizer_.get(),
                              .vocab_size = flags_->vocab_size,
                              .as_ids = flags_->prompt_form == "ids",
                              .fixed_output = flags_->fixed_output,
                              .path = flags_->dataset_path};
  if (random && tokenizer_ == nullptr && options_.target.api == AnswerApi::kChat) {
    return make_error(StatusCode::kInvalidArgument,
                      "random prompts of a chat are text: give --tokenizer DIR");
  }
  if (flags_->dataset == "random" && !flags_->dataset_path.empty()) {
    return random_sharegpt_prompts(options);
  }
  if (random) {
    return random_prompts(options);
  }
  return flags_->dataset == "sharegpt" ? sharegpt_prompts(options) : custom_prompts(options);
}

Result<std::vector<Prompt>> ServeBench::prompts(int64_t round) const {
  NIBBLE_ASSIGN_OR_RETURN(
      std::vector<Prompt> out,
      make_prompts(flags_->num_prompts, flags_->seed + kRoundSeeds * static_cast<uint64_t>(round)));
  const bool chat = options_.target.api == AnswerApi::kChat;
  for (const Prompt& prompt : out) {
    if (!chat && prompt.messages.is_array()) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: has messages, which only a chat takes: --backend openai-chat",
                        flags_->dataset_path);
    }
  }
  return out;
}

Status ServeBench::warm_up(Target& target) const {
  const int64_t count = flags_->num_warmups + 1;
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Prompt> own, make_prompts(count, flags_->seed + kWarmupSeed));
  Prompt first = own.front();
  first.output_len = std::min(first.output_len, kTryTokens);
  NIBBLE_RETURN_IF_ERROR(target.try_out(target.body(first, options_.body)));
  own.erase(own.begin());
  if (own.empty()) {
    return {};
  }
  const ServeRun warmed =
      run(target, own, {.arrivals = {}, .max_concurrency = flags_->max_concurrency});
  return all_failed(warmed);
}

LoadLevel ServeBench::level() const {
  return {.arrivals = options_.arrivals, .max_concurrency = flags_->max_concurrency};
}

ServeRun ServeBench::run(Target& target,
                         const std::vector<Prompt>& prompts,
                         const LoadLevel& level) const {
  LoadPlan plan;
  for (const Prompt& prompt : prompts) {
    plan.requests.push_back(
        {.body = target.body(prompt, options_.body), .input_len = prompt.input_len});
  }
  plan.arrivals = arrival_times(std::ssize(prompts), level.arrivals, options_.layout);
  plan.max_concurrency = level.max_concurrency;
  ServeRun out;
  const auto total = std::ssize(prompts);
  ProgressDisplay display("answered", ProgressDisplay::Unit::kItems);
  out.result = run_load(target.client(), target.load(), std::move(plan),
                        [&](int64_t done) { display.update(done, total, ""); });
  out.metrics =
      measure_load(out.result, {.tokenizer = tokenizer_.get(), .goodput = options_.goodput});
  out.facts = {.layout = options_.layout,
               .backend = flags_->backend,
               .url = target.url(),
               .model = target.model(),
               .dataset = flags_->dataset,
               .request_rate = level.arrivals.rate,
               .burstiness = level.arrivals.burstiness,
               .max_concurrency = level.max_concurrency,
               .num_prompts = total,
               .input_len = flags_->input_len,
               .output_len = flags_->output_len,
               .range_ratio = flags_->range_ratio,
               .range_semantics = semantics_name(options_.semantics),
               .date = now_text(),
               .percentile_metrics = options_.percentile_metrics,
               .percentiles = options_.percentiles,
               .accept_length = {}};
  if (out.metrics.counted_by_frames > 0) {
    NIBBLE_LOG(kWarning,
               "{} answers had no usage: their frames are counted as tokens; --tokenizer counts "
               "their text",
               out.metrics.counted_by_frames);
  }
  return out;
}

std::string ServeBench::header() const {
  std::string out = fmt::format(
      "Definitions of {}; ", options_.layout == LoadTiming::kVllm ? "vLLM's client" : "SGLang's");
  if (!flags_->dataset.starts_with("random")) {
    return out + fmt::format("prompts of {}\n", flags_->dataset_path);
  }
  const auto lengths = [&](int64_t length) {
    const auto range = length_range(length, flags_->range_ratio, options_.semantics);
    return range.ok() ? fmt::format("{} to {}", range->low, range->high) : std::string("invalid");
  };
  return out +
         fmt::format(
             "random range {} ({}): input {}, output {} tokens, prefix {}; distinct prompts\n",
             flags_->range_ratio, semantics_name(options_.semantics), lengths(flags_->input_len),
             lengths(flags_->output_len), flags_->prefix_len);
}

std::string error_lines(const LoadMetrics& metrics) {
  std::vector<std::pair<int64_t, std::string>> sorted;
  for (const auto& [message, count] : metrics.errors) {
    sorted.emplace_back(-count, message);
  }
  std::sort(sorted.begin(), sorted.end());
  std::string out;
  for (const auto& [count, message] : sorted) {
    out += fmt::format("{} failed: {}\n", -count, message);
  }
  return out;
}

Status all_failed(const ServeRun& run) {
  if (run.metrics.completed > 0) {
    return {};
  }
  for (const LoadRecord& record : run.result.records) {
    if (!record.status.ok()) {
      return record.status.with_context(
          fmt::format("{}: all {} requests failed", run.facts.url, run.metrics.failed));
    }
  }
  return {};
}

Status write_result(const LoadFlags& flags, const Json& json) {
  if (flags.result_file.empty()) {
    return {};
  }
  if (flags.layout != "sglang") {
    return write_text_file(flags.result_file, json.dump() + "\n");
  }
  auto before = read_file(flags.result_file);
  if (!before.ok() && before.status().code() != StatusCode::kNotFound) {
    return before.status();
  }
  return write_text_file(flags.result_file,
                         (before.ok() ? *before : std::string()) + json.dump() + "\n");
}

}  // namespace nibble
