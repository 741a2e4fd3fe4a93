#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "arch/kv_specs.h"
#include "base/json.h"
#include "base/process.h"
#include "bench/bench_commands.h"
#include "bench/ceilings/ceilings.h"
#include "bench/kernels/cuda_bench.h"
#include "bench/serving/offline_report.h"
#include "bench/serving/offline_setup.h"
#include "tools/flag_checks.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace nibble {

namespace {

constexpr int64_t kMostSequences = 4096;
constexpr int64_t kMostTokens = int64_t{1} << 24;

struct OfflineFlags {
  ModelFlags model;
  bool dummy_weights = false;
  std::string scheme;
  int64_t memory = 0;
  std::string expert_rank;
  ExpertShare experts;  // of expert_rank
  bool fit_batch = false;
  int64_t max_batch = 512;
  std::vector<int64_t> batches = {1};
  std::vector<int64_t> contexts = {0};
  int64_t input_len = 512;
  int64_t output_len = 64;
  int64_t max_num_batched_tokens = 512;
  int64_t repeats = 5;
  uint64_t seed = 0;
  bool json = false;
};

struct OfflineReport {
  std::string scheme;
  KvCode kv_code = KvCode::kBf16;
  std::string backend;
  int threads = 0;
  double load_ms = 0;
  int64_t weight_bytes = 0;
  int64_t cache_bytes = 0;
  int64_t peak_rss_bytes = 0;
  std::vector<ShapeReport> shapes;
};

/// Bytes of keys and values that a decode step reads for one sequence of this length.
int64_t kv_bytes_read(const ModelConfig& config, KvCode code, int64_t length) {
  double bytes = 0;
  for (const KvSpec& spec : kv_specs(config, code)) {
    const int64_t tokens = spec.window > 0 ? std::min(spec.window, length) : length;
    bytes += static_cast<double>(tokens) * kv_token_bytes(spec);
  }
  return static_cast<int64_t>(bytes);
}

std::vector<OfflineShape> shapes_of(const OfflineFlags& flags) {
  std::vector<OfflineShape> shapes;
  for (const int64_t batch :
       flags.fit_batch ? std::vector<int64_t>{flags.max_batch} : flags.batches) {
    for (const int64_t context : flags.contexts) {
      shapes.push_back({.batch = batch,
                        .input_len = flags.input_len,
                        .output_len = flags.output_len,
                        .context = context});
    }
  }
  return shapes;
}

/// The ceilings of a CPU right now: the best of three readings, and the peak of the instructions
/// that bound prefills of the scheme.
OfflineMeter meter_of(ThreadPool& pool, cpu::NearCeilings& near, const OfflineReport& report) {
  const auto scheme = find_scheme(report.scheme);
  const ActFormat act = scheme.ok() ? scheme->act : ActFormat::kFloat;
  const std::string isa = report.backend.substr(report.backend.find('/') + 1);
  return {.read_gbps =
              [&near] {
                return std::max({near.read_gbps(), near.read_gbps(), near.read_gbps()});
              },
          .peak_tops = [&pool, isa,
                        act] { return cpu::measure_peak_tops(pool, isa, act).value_or(0.0); }};
}

/// The rounds of all shapes. Fills in peak_rss_bytes, without the memory that measures ceilings.
Result<std::vector<OfflineTimings>> run_rounds(const OfflineSetup& setup,
                                               const OfflineFlags& flags,
                                               OfflineReport& report) {
  OfflineBench bench(*setup.core, setup.shapes, flags.seed);
  NIBBLE_RETURN_IF_ERROR(bench.warm_up());
  report.peak_rss_bytes = peak_rss_bytes();
  const bool on_cpu = setup.backend->host_memory();
  std::optional<CudaBench> gpu;
  if (!on_cpu) {
    NIBBLE_ASSIGN_OR_RETURN(gpu, CudaBench::open(backend_of(flags.model)));
  }
  const auto run_all = [&](const OfflineMeter& meter) -> Status {
    for (int64_t round = 0; round < flags.repeats; ++round) {
      NIBBLE_RETURN_IF_ERROR(bench.run_round(meter));
    }
    return {};
  };
  if (on_cpu) {
    ThreadPool pool(bench_threads(backend_of(flags.model).cpu, report.threads));
    NIBBLE_ASSIGN_OR_RETURN(auto near, cpu::NearCeilings::create(pool));
    NIBBLE_RETURN_IF_ERROR(run_all(meter_of(pool, near, report)));
  } else {
    NIBBLE_RETURN_IF_ERROR(run_all(OfflineMeter()));
  }
  report.peak_rss_bytes = std::max(report.peak_rss_bytes, rss_bytes());
  std::vector<OfflineTimings> timings = bench.timings();
  if (!on_cpu) {
    NIBBLE_ASSIGN_OR_RETURN(const double read_gbps, gpu->read_gbps());
    for (OfflineTimings& shape : timings) {
      for (auto& round : shape.turns) {
        for (auto& turn : round) {
          turn.read_gbps = read_gbps;
        }
      }
    }
  }
  return timings;
}

Result<OfflineReport> measure(const OfflineFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(
      const OfflineSetup setup,
      set_up_offline({.model = flags.model,
                      .shapes = shapes_of(flags),
                      .max_num_batched_tokens = flags.max_num_batched_tokens,
                      .seed = flags.seed,
                      .dummy_scheme = flags.scheme,
                      .memory = flags.memory,
                      .batch = flags.fit_batch ? OfflineRequest::Batch::kThatFits
                                               : OfflineRequest::Batch::kAsSaid,
                      .experts = flags.experts}));
  OfflineReport report{.scheme = setup.scheme,
                       .kv_code = setup.kv_code,
                       .backend = std::string(setup.backend->name()),
                       .threads = setup.backend->threads(),
                       .load_ms = setup.load_ms,
                       .weight_bytes = setup.weight_bytes,
                       .cache_bytes = setup.cache_bytes};
  NIBBLE_ASSIGN_OR_RETURN(const auto timings, run_rounds(setup, flags, report));
  for (size_t i = 0; i < setup.shapes.size(); ++i) {
    const int64_t length = OfflineBench::decode_length(setup.shapes[i], setup.shapes.size());
    report.shapes.push_back(report_of(setup.shapes[i], timings[i], report.weight_bytes,
                                      kv_bytes_read(setup.config, report.kv_code, length)));
  }
  compare_with_first(timings, report.shapes);
  return report;
}

JsonArray json_of(const std::vector<double>& values) { return {values.begin(), values.end()}; }

Json json_of(const std::optional<Quartiles>& ratio) {
  return ratio ? Json::object({{"median", ratio->median}, {"p25", ratio->p25}, {"p75", ratio->p75}})
               : Json();
}

Json to_json(const OfflineReport& report, const ShapeReport& shape, const OfflineFlags& flags) {
  const ExpertCounts& experts = shape.decode_experts;
  Json json = Json::object({{"prefill_tps", shape.prefill_tps},
                            {"decode_tps", shape.decode_tps},
                            {"throughput_tps", shape.throughput_tps},
                            {"bytes_per_token", report.weight_bytes + shape.kv_bytes},
                            {"read_gbps", shape.read_gbps},
                            {"roofline_percent", shape.roofline.median},
                            {"roofline_percent_p25", shape.roofline.p25},
                            {"roofline_percent_p75", shape.roofline.p75},
                            {"peak_rss_bytes", report.peak_rss_bytes},
                            {"batch", shape.shape.batch},
                            {"input_len", shape.shape.input_len},
                            {"output_len", shape.shape.output_len},
                            {"context", shape.shape.context},
                            {"repeats", flags.repeats},
                            {"max_num_batched_tokens", flags.max_num_batched_tokens},
                            {"prefill_ms_median", shape.prefill_ms},
                            {"prefill_ms", json_of(shape.rounds_ms)},
                            {"peak_tops", json_of(shape.peak_tops)},
                            {"decode_ms_median", shape.decode_ms},
                            {"weight_bytes", report.weight_bytes},
                            {"cache_bytes", report.cache_bytes},
                            {"kv_bytes", shape.kv_bytes},
                            {"load_ms", report.load_ms},
                            {"scheme", report.scheme},
                            {"backend", report.backend},
                            {"threads", int64_t{report.threads}},
                            {"kv_cache_dtype", kv_code_name(report.kv_code)}});
  if (!flags.experts.whole()) {
    json.set("expert_rank", flags.expert_rank);
  }
  if (experts.runs > 0) {
    json.set("active_experts_mean", experts.active_mean());
    json.set("max_over_mean", experts.max_over_mean());
    json.set("expert_slots_mean",
             static_cast<double>(experts.slots) / static_cast<double>(experts.runs));
  }
  return json;
}

/// One object for one shape; for several their objects, with what compares them.
Json to_json(const OfflineReport& report, const OfflineFlags& flags) {
  if (report.shapes.size() == 1) {
    return to_json(report, report.shapes.front(), flags);
  }
  JsonArray shapes;
  for (const ShapeReport& shape : report.shapes) {
    Json json = to_json(report, shape, flags);
    json.set("prefill_over_first", json_of(shape.prefill_over_first));
    json.set("decode_over_first", json_of(shape.decode_over_first));
    shapes.push_back(std::move(json));
  }
  return Json::object({{"shapes", std::move(shapes)}});
}

void print_shape(const OfflineReport& report, const ShapeReport& of) {
  const OfflineShape& shape = of.shape;
  const auto mega = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  const auto ratio = [](const std::optional<Quartiles>& q) {
    return q ? fmt::format(", {:.3f} ({:.3f} to {:.3f}) x the first", q->median, q->p25, q->p75)
             : std::string();
  };
  print_out(fmt::format("  prefill  {:10.1f} tokens/s  {} x {} tokens after {}, {:.1f} ms{}\n",
                        of.prefill_tps, shape.batch, shape.input_len, shape.context, of.prefill_ms,
                        ratio(of.prefill_over_first)));
  print_out(fmt::format("  decode   {:10.1f} tokens/s  {} x {} steps, {:.2f} ms a step{}\n",
                        of.decode_tps, shape.batch, shape.output_len, of.decode_ms,
                        ratio(of.decode_over_first)));
  print_out(fmt::format("  both     {:10.1f} tokens/s  of {} answers, prompts included\n",
                        of.throughput_tps, shape.batch));
  print_out(fmt::format(
      "  memory   {:10.1f} GB/s      a step reads {:.1f} MB of weights and {} x {:.1f} MB of keys "
      "and values:\n                               {:.1f} % ({:.1f} to {:.1f}) of this bandwidth\n",
      of.read_gbps, mega(report.weight_bytes), shape.batch, mega(of.kv_bytes), of.roofline.median,
      of.roofline.p25, of.roofline.p75));
  if (const ExpertCounts& experts = of.decode_experts; experts.runs > 0) {
    print_out(fmt::format(
        "  experts  {:10.1f} a layer and step of decoding have rows, the fullest {:.2f} x the "
        "mean of these\n",
        experts.active_mean(), experts.max_over_mean()));
  }
}

void print_table(const OfflineReport& report, const OfflineFlags& flags) {
  print_out(fmt::format("{}: {} on {}, {} threads, KV cache {}; loaded in {:.0f} ms\n",
                        flags.model.model_dir, report.scheme, report.backend, report.threads,
                        kv_code_name(report.kv_code), report.load_ms));
  for (const ShapeReport& shape : report.shapes) {
    print_shape(report, shape);
  }
  print_out(fmt::format("  cache    {:10.1f} MB\n  resident {:10.1f} MB\n",
                        static_cast<double>(report.cache_bytes) / 1e6,
                        static_cast<double>(report.peak_rss_bytes) / 1e6));
}

/// "0/8".
Result<ExpertShare> parse_expert_rank(const std::string& text) {
  ExpertShare share;
  const char* end = text.data() + text.size();
  const auto [slash, error] = std::from_chars(text.data(), end, share.rank);
  bool read = error == std::errc() && slash != end && *slash == '/';
  if (read) {
    const auto [stop, second_error] = std::from_chars(slash + 1, end, share.ranks);
    read = second_error == std::errc() && stop == end;
  }
  return read && share.rank >= 0 && share.rank < share.ranks
             ? Result<ExpertShare>(share)
             : make_error(StatusCode::kInvalidArgument,
                          "--expert-rank {}: not of the form I/N with I from 0 to N - 1, like 0/8",
                          text);
}

Status check_flags(const OfflineFlags& flags) {
  if (flags.dummy_weights == flags.scheme.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--dummy-weights and --scheme NAME belong together: random weights are made "
                      "in that scheme, and a model has its own");
  }
  if (flags.fit_batch && flags.contexts.size() > 1) {
    return make_error(StatusCode::kInvalidArgument,
                      "--fit-batch: finds the batch of one shape; give one --context");
  }
  return {};
}

Status run(OfflineFlags& flags) {
  NIBBLE_RETURN_IF_ERROR(check_flags(flags));
  if (!flags.expert_rank.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(flags.experts, parse_expert_rank(flags.expert_rank));
  }
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
  const auto numbers = [&](const char* name, std::vector<int64_t>& values, const char* help,
                           int64_t least, int64_t most) {
    command->add_option(name, values, help)
        ->delimiter(',')
        ->check(whole_number(least, most))
        ->capture_default_str();
  };
  command->add_flag("--dummy-weights", flags->dummy_weights,
                    "Random weights, made where they are needed: MODEL is a config.json, or a "
                    "folder with one, and --scheme says how they are stored");
  command->add_option("--scheme", flags->scheme, "Of --dummy-weights, like those of quantize");
  command
      ->add_option("--gpu-memory", flags->memory,
                   "Model and cache may take so much of the device, like 80GB (default: all that "
                   "is free); a cache that needs more is refused")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number(1))
      ->default_str("all");
  command->add_option("--expert-rank", flags->expert_rank,
                      "Like 0/8: load the experts of one of so many devices alone, and leave out "
                      "what rows choose of the others'; all else is whole");
  auto* batch = command->add_flag("--fit-batch", flags->fit_batch,
                                  "Instead of --batch: the largest batch whose prompts and answers "
                                  "fit memory, for the greatest throughput");
  number("--max-batch", flags->max_batch, "Largest batch that --fit-batch takes", 1,
         kMostSequences);
  numbers("--batch", flags->batches, "Sequences at once, or several numbers like 1,16", 1,
          kMostSequences);
  batch->excludes("--batch");
  number("--input-len", flags->input_len, "New tokens of each prompt", 1, kMostTokens);
  number("--output-len", flags->output_len, "Decode steps", 1, kMostTokens);
  numbers("--context", flags->contexts,
          "Tokens of each prompt that are in the cache before, or several numbers like 0,4096", 0,
          kMostTokens);
  number("--max-num-batched-tokens", flags->max_num_batched_tokens,
         "Tokens of one step; longer prefills are cut", 1, int64_t{1} << 20);
  number("--repeats", flags->repeats, "Prefills, each followed by the decode steps", 1, 1000);
  command->add_flag("--one-stream", flags->model.one_stream,
                    "On GPUs: no work of a step beside other work, for comparisons");
  command->add_option("--seed", flags->seed, "Of the random tokens")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_flag(
      "--json", flags->json,
      "Print one JSON object: prefill_tps, decode_tps, bytes_per_token, read_gbps, "
      "roofline_percent, peak_rss_bytes, ...; of several shapes: shapes, a list of "
      "such objects with prefill_over_first and decode_over_first (median, p25, p75)");
  command->footer(
      "throughput_tps: tokens of all answers over the time of prefill and decode steps.\n"
      "Rates are of all sequences together, from the median of the prefills and of all decode "
      "steps; decoding\nfollows the prompt. bytes_per_token: weights, and keys and values of one "
      "sequence, that a step reads.\nroofline_percent: all bytes that a step reads, per second, "
      "of the bandwidth; on CPUs that is measured before\nand after every 8 steps.\nOf lists, "
      "every "
      "combination is run in one process. They take turns, in decoding 8 steps at a time: ratios\n"
      "compare neighbours in time with the first, as medians and quartiles.\n\n" +
      bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
