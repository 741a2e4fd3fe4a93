#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "backend/cpu/ceilings.h"
#include "base/json.h"
#include "base/process.h"
#include "bench.h"
#include "flag_checks.h"
#include "model_flags.h"
#include "offline_bench.h"
#include "ops/kv_name.h"
#include "output.h"

namespace nibble {

namespace {

constexpr int64_t kMostSequences = 4096;
constexpr int64_t kMostTokens = int64_t{1} << 24;

struct OfflineFlags {
  ModelFlags model;
  OfflineShape shape{.batch = 1, .input_len = 512, .output_len = 64, .context = 0};
  int64_t max_num_batched_tokens = EngineOptions().max_num_batched_tokens;
  int64_t repeats = 5;
  uint64_t seed = 0;
  bool json = false;
};

struct OfflineReport {
  std::string scheme;
  std::string backend;
  int threads = 0;
  double load_ms = 0;
  double prefill_ms = 0;
  double decode_ms = 0;
  double prefill_tps = 0;
  double decode_tps = 0;
  int64_t weight_bytes = 0;
  int64_t kv_bytes = 0;  // of one sequence, in one decode step
  double read_gbps = 0;
  double roofline_percent = 0;
  std::vector<double> rounds_ms;  // prefills
  std::vector<double> peak_tops;  // of their instructions: before and after each; or none
  int64_t peak_rss_bytes = 0;
};

std::string_view cache_type(const ModelFlags& flags) {
  return kv_code_name(parse_kv_cache_dtype(flags.kv_cache_dtype).value());
}

/// Bytes of keys and values that a decode step reads for one sequence of this length.
int64_t kv_bytes_read(const ModelConfig& config, KvCode code, int64_t length) {
  const int64_t row = kv_row_bytes(code, config.head_dim) + 4 * kv_row_params(code);
  int64_t tokens = 0;
  for (const int64_t window : config.sliding_windows) {
    tokens += window > 0 ? std::min(window, length) : length;
  }
  return tokens * config.num_kv_heads * 2 * row;
}

/// The peak of the instructions that bound prefills of a scheme, on CPUs.
std::optional<double> measure_peak(ThreadPool& pool, const OfflineReport& report) {
  const auto scheme = find_scheme(report.scheme);
  return cpu::measure_peak_tops(pool, report.backend.substr(report.backend.find('/') + 1),
                                scheme.ok() ? scheme->act : ActFormat::kFloat);
}

Result<OfflineReport> measure(const OfflineFlags& flags) {
  using Clock = std::chrono::steady_clock;
  const OfflineShape& shape = flags.shape;
  OfflineReport report;
  EngineOptions base;
  base.max_num_batched_tokens = flags.max_num_batched_tokens;
  NIBBLE_ASSIGN_OR_RETURN(base.kv_code, parse_kv_cache_dtype(flags.model.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags.model.model_dir));
  const auto begin = Clock::now();
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, open_backend(backend_of(flags.model)));
  base.page_size = backend->preferred_page_size(base.kv_code);
  NIBBLE_ASSIGN_OR_RETURN(const EngineOptions options,
                          OfflineBench::options_for(shape, base, config));
  NIBBLE_ASSIGN_OR_RETURN(auto model,
                          load_model(flags.model.model_dir, *backend,
                                     {.max_batch_tokens = options.max_num_batched_tokens,
                                      .max_logit_rows = options.max_num_seqs}));
  report.scheme = model->scheme();
  report.weight_bytes = model->weight_bytes();
  report.backend = backend->name();
  report.threads = backend->threads();
  NIBBLE_ASSIGN_OR_RETURN(const auto core, EngineCore::create(std::move(model), options));
  report.load_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();

  OfflineBench bench(*core, shape, flags.seed);
  OfflineBench::Timings timings;
  std::optional<ThreadPool> pool;
  if (backend->host_memory()) {
    pool.emplace(bench_threads(backend_of(flags.model).cpu, report.threads));
  }
  const auto keep_peak = [&] {
    if (const auto tops = pool ? measure_peak(*pool, report) : std::nullopt) {
      report.peak_tops.push_back(*tops);
    }
  };
  NIBBLE_RETURN_IF_ERROR(bench.warm_up());
  keep_peak();
  for (int64_t round = 0; round < flags.repeats; ++round) {
    NIBBLE_RETURN_IF_ERROR(bench.run_round(timings));
    keep_peak();
  }
  report.rounds_ms = timings.prefill_ms;
  report.peak_rss_bytes = peak_rss_bytes();  // before the memory that measures the bandwidth
  if (pool) {
    NIBBLE_ASSIGN_OR_RETURN(report.read_gbps, cpu::measure_read_gbps(*pool));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(report.read_gbps, backend->measure_read_gbps());
  }

  report.prefill_ms = median(timings.prefill_ms);
  report.decode_ms = median(timings.decode_ms);
  report.prefill_tps = static_cast<double>(timings.prefill_tokens) / report.prefill_ms * 1e3;
  report.decode_tps = static_cast<double>(shape.batch) / report.decode_ms * 1e3;
  report.kv_bytes = kv_bytes_read(config, options.kv_code,
                                  shape.context + shape.input_len + shape.output_len / 2);
  const auto step_bytes = static_cast<double>(report.weight_bytes + shape.batch * report.kv_bytes);
  report.roofline_percent = 100 * step_bytes / (report.decode_ms * 1e-3) / (report.read_gbps * 1e9);
  return report;
}

JsonArray json_of(const std::vector<double>& values) { return {values.begin(), values.end()}; }

Json to_json(const OfflineReport& report, const OfflineFlags& flags) {
  return Json::object({{"prefill_tps", report.prefill_tps},
                       {"decode_tps", report.decode_tps},
                       {"bytes_per_token", report.weight_bytes + report.kv_bytes},
                       {"read_gbps", report.read_gbps},
                       {"roofline_percent", report.roofline_percent},
                       {"peak_rss_bytes", report.peak_rss_bytes},
                       {"batch", flags.shape.batch},
                       {"input_len", flags.shape.input_len},
                       {"output_len", flags.shape.output_len},
                       {"context", flags.shape.context},
                       {"repeats", flags.repeats},
                       {"max_num_batched_tokens", flags.max_num_batched_tokens},
                       {"prefill_ms_median", report.prefill_ms},
                       {"prefill_ms", json_of(report.rounds_ms)},
                       {"peak_tops", json_of(report.peak_tops)},
                       {"decode_ms_median", report.decode_ms},
                       {"weight_bytes", report.weight_bytes},
                       {"kv_bytes", report.kv_bytes},
                       {"load_ms", report.load_ms},
                       {"scheme", report.scheme},
                       {"backend", report.backend},
                       {"threads", int64_t{report.threads}},
                       {"kv_cache_dtype", cache_type(flags.model)}});
}

void print_table(const OfflineReport& report, const OfflineFlags& flags) {
  const OfflineShape& shape = flags.shape;
  const auto mega = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  print_out(fmt::format("{}: {} on {}, {} threads, KV cache {}; loaded in {:.0f} ms\n",
                        flags.model.model_dir, report.scheme, report.backend, report.threads,
                        cache_type(flags.model), report.load_ms));
  print_out(fmt::format("  prefill  {:10.1f} tokens/s  {} x {} tokens after {}, {:.1f} ms\n",
                        report.prefill_tps, shape.batch, shape.input_len, shape.context,
                        report.prefill_ms));
  print_out(fmt::format("  decode   {:10.1f} tokens/s  {} x {} steps, {:.2f} ms a step\n",
                        report.decode_tps, shape.batch, shape.output_len, report.decode_ms));
  print_out(fmt::format(
      "  memory   {:10.1f} GB/s      a step reads {:.1f} MB of weights and {} x {:.1f} MB of keys "
      "and values:\n                               {:.1f} % of this bandwidth\n",
      report.read_gbps, mega(report.weight_bytes), shape.batch, mega(report.kv_bytes),
      report.roofline_percent));
  print_out(fmt::format("  resident {:10.1f} MB\n", mega(report.peak_rss_bytes)));
}

Status run(const OfflineFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const OfflineReport report, measure(flags));
  if (flags.json) {
    print_out(to_json(report, flags).dump() + "\n");
  } else {
    print_table(report, flags);
  }
  return {};
}

}  // namespace

void add_bench_offline(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<OfflineFlags>();
  CLI::App* command = bench.add_subcommand(
      "offline", "Prefill and decode of a model by the engine, without a server");
  add_model_flags(*command, flags->model);
  const auto number = [&](const char* name, int64_t& value, const char* help, int64_t least,
                          int64_t most) {
    command->add_option(name, value, help)->check(whole_number(least, most))->capture_default_str();
  };
  OfflineShape& shape = flags->shape;
  number("--batch", shape.batch, "Sequences at once", 1, kMostSequences);
  number("--input-len", shape.input_len, "New tokens of each prompt", 1, kMostTokens);
  number("--output-len", shape.output_len, "Decode steps", 1, kMostTokens);
  number("--context", shape.context, "Tokens of each prompt that are in the cache before", 0,
         kMostTokens);
  number("--max-num-batched-tokens", flags->max_num_batched_tokens,
         "Tokens of one step; longer prefills are cut", 1, int64_t{1} << 20);
  number("--repeats", flags->repeats, "Prefills, each followed by the decode steps", 1, 1000);
  command->add_option("--seed", flags->seed, "Of the random tokens")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_flag("--json", flags->json,
                    "Print one JSON object: prefill_tps, decode_tps, bytes_per_token, read_gbps, "
                    "roofline_percent, peak_rss_bytes, ...");
  command->footer(
      "Rates are of all sequences together, from the median of the prefills and of all decode "
      "steps; decoding\nfollows the prompt. bytes_per_token: weights, and keys and values of one "
      "sequence, that a step reads.\nroofline_percent: all bytes that a step reads, per second, "
      "of the bandwidth measured in this run.\n\n" +
      bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
