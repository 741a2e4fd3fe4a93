#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>

#include "backend/open_backend.h"
#include "base/file.h"
#include "bench/bench_commands.h"
#include "bench/moe/cpu_clock.h"
#include "bench/moe/cuda_clock.h"
#include "bench/moe/moe_bench.h"
#include "bench/moe/moe_report.h"
#include "ops/route.h"
#include "tools/flag_checks.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace nibble {

namespace {

constexpr int64_t kMostRows = 65536;
constexpr int64_t kMostChannels = int64_t{1} << 16;

struct MoeFlags {
  CpuBackendOptions backend;
  std::string device = "cpu";
  std::string cuda_library;
  std::string layer;  // empty: what the sizes say
  MoeShape sizes;     // 0: not given
  std::vector<std::string> schemes;
  std::vector<int64_t> row_counts = {1, 4, 16, 64, 256, 1024, 4096};
  std::string routing = "uniform";
  uint64_t seed = 1;
  int64_t copies = 0;
  int64_t repeats = CudaClock::Options{}.repeats;
  double rest = CudaClock::Options{}.rest;
  std::string json;  // path; empty: none
};

Result<MoeShape> chosen_shape(const MoeFlags& flags) {
  const int64_t sizes[] = {flags.sizes.experts, flags.sizes.top_k, flags.sizes.hidden,
                           flags.sizes.width};
  const auto given = std::ranges::count_if(sizes, [](int64_t size) { return size > 0; });
  if (flags.layer.empty() ? given != std::ssize(sizes) : given > 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "give either --layer with one of {}, or all of --experts, --top-k, --hidden "
                      "and --width",
                      moe_shape_names());
  }
  if (!flags.layer.empty()) {
    auto shape = find_moe_shape(flags.layer);
    NIBBLE_RETURN_IF_ERROR(shape.status().with_context("--layer"));
    return shape;
  }
  MoeShape shape = flags.sizes;
  shape.name = "custom";
  shape.all_experts = shape.experts;
  NIBBLE_RETURN_IF_ERROR(check_moe_shape(shape));
  return shape;
}

Result<MoeBenchOptions> bench_options(const MoeFlags& flags) {
  MoeBenchOptions options{.seed = flags.seed,
                          .row_counts = flags.row_counts,
                          .copies = flags.copies,
                          .kernels = flags.backend.kernels};
  NIBBLE_ASSIGN_OR_RETURN(options.shape, chosen_shape(flags));
  const auto routing = find_routing(flags.routing);
  NIBBLE_RETURN_IF_ERROR(routing.status().with_context("--routing"));
  options.routing = *routing;
  options.progress = [](const MoeTiming& timing) { print_out(moe_timing_line(timing) + "\n"); };
  return options;
}

Result<std::vector<QuantScheme>> chosen_schemes(const MoeFlags& flags) {
  std::vector<QuantScheme> schemes;
  for (const std::string& name : flags.schemes) {
    const auto scheme = find_scheme(name);
    NIBBLE_RETURN_IF_ERROR(scheme.status().with_context("--scheme"));
    schemes.push_back(*scheme);
  }
  return schemes;
}

/// Replaces a file, which may be there.
Status write_report(const std::string& path,
                    const MoeReport& report,
                    const MoeBenchOptions& options) {
  constexpr int kMode = 0644;
  Descriptor descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode));
  if (descriptor.get() < 0) {
    return file_error(path, "write", errno).with_context("--json");
  }
  WritableFile file(std::move(descriptor), path);
  const std::string text = moe_report_json(report, options).dump_pretty() + "\n";
  NIBBLE_RETURN_IF_ERROR(file.write_at(0, std::as_bytes(std::span(text))));
  return file.close();
}

/// All schemes, one after the other. What is measured is in the file as soon as a scheme is done.
Status measure(const MoeFlags& flags, Backend& backend, RunClock& clock, MoeReport report) {
  NIBBLE_ASSIGN_OR_RETURN(const MoeBenchOptions options, bench_options(flags));
  NIBBLE_ASSIGN_OR_RETURN(const auto schemes, chosen_schemes(flags));
  for (const QuantScheme& scheme : schemes) {  // before minutes go by
    NIBBLE_RETURN_IF_ERROR(check_moe_scheme(backend, scheme, options.shape));
  }
  report.backend = backend.name();
  report.threads = backend.threads();
  if (!flags.json.empty()) {
    NIBBLE_RETURN_IF_ERROR(write_report(flags.json, report, options));
  }
  print_out(fmt::format("{}, {} threads: {} by {} routing; memory reads {:.1f} GB/s\n{}\n",
                        backend.name(), backend.threads(), options.shape.name, flags.routing,
                        report.read_gbps, moe_timing_head()));
  for (const QuantScheme& scheme : schemes) {
    NIBBLE_ASSIGN_OR_RETURN(const auto timings, bench_moe(backend, clock, scheme, options));
    report.timings.insert(report.timings.end(), timings.begin(), timings.end());
    if (!flags.json.empty()) {
      NIBBLE_RETURN_IF_ERROR(write_report(flags.json, report, options));
    }
  }
  return {};
}

Status run_on_cpu(const MoeFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, make_cpu_backend(flags.backend));
  ThreadPool pool(bench_threads(flags.backend, backend->threads()));
  NIBBLE_ASSIGN_OR_RETURN(const double read_gbps, cpu::measure_read_gbps(pool));
  NIBBLE_ASSIGN_OR_RETURN(auto near, cpu::NearCeilings::create(pool));
  CpuClock clock(std::move(near), flags.repeats);
  return measure(flags, *backend, clock, {.read_gbps = read_gbps});
}

Status run_on_gpu(const MoeFlags& flags) {
  const BackendOptions device{
      .device = flags.device, .kernels = flags.backend.kernels, .cuda_library = flags.cuda_library};
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, open_backend(device));
  NIBBLE_ASSIGN_OR_RETURN(const CudaBench bench, CudaBench::open(device));
  NIBBLE_ASSIGN_OR_RETURN(const double read_gbps, bench.read_gbps());
  CudaClock clock(bench, *backend,
                  {.repeats = flags.repeats, .rest = flags.rest, .read_gbps = read_gbps});
  return measure(flags, *backend, clock, {.read_gbps = read_gbps});
}

Status run(const MoeFlags& flags) {
  if (flags.device == "auto") {  // figures are of a device that was meant
    return make_error(StatusCode::kInvalidArgument,
                      "--backend auto: choose cpu, cuda or cuda:N with N from 0");
  }
  NIBBLE_RETURN_IF_ERROR(bench_options(flags).status());
  NIBBLE_RETURN_IF_ERROR(chosen_schemes(flags).status());
  return flags.device == "cpu" ? run_on_cpu(flags) : run_on_gpu(flags);
}

void add_layer_flags(CLI::App& command, MoeFlags& flags) {
  command.add_option("--layer", flags.layer,
                     "A layer of a published model: " + moe_shape_names() +
                         ". kimi-k2-ep8 is one of eight devices");
  const auto size = [&](const char* name, int64_t& value, const char* help, int64_t most) {
    command.add_option(name, value, help)->check(whole_number(1, most));
  };
  size("--experts", flags.sizes.experts, "Experts of another layer, with SiLU and without biases",
       kMostExperts);
  size("--top-k", flags.sizes.top_k, "Experts of a row of it", kMostExperts);
  size("--hidden", flags.sizes.hidden, "Its hidden size, not below its experts", kMostChannels);
  size("--width", flags.sizes.width, "Width of one of its experts", kMostChannels);
}

void add_run_flags(CLI::App& command, MoeFlags& flags) {
  command.add_option("--scheme", flags.schemes, "Scheme of the experts, or several")
      ->delimiter(',')
      ->required();
  command.add_option("--m", flags.row_counts, "Rows of a step, like 1,16,256")
      ->delimiter(',')
      ->check(whole_number(1, kMostRows))
      ->capture_default_str();
  command
      .add_option("--routing", flags.routing,
                  "Which experts rows take: " + routing_names() +
                      " (any at random; one after the other; at random by rank^-1.2; all rows the "
                      "same)")
      ->capture_default_str();
  command.add_option("--seed", flags.seed, "Of the rows and their routing")
      ->check(whole_number(0))
      ->capture_default_str();
  command
      .add_option("--copies", flags.copies,
                  "Copies of the layer that take turns (default: as many as the caches need)")
      ->check(whole_number(1, 4096));
  command.add_option("--repeats", flags.repeats, "Timings of each figure, which is their median")
      ->check(whole_number(1, 1000))
      ->capture_default_str();
  command
      .add_option("--rest", flags.rest,
                  "On GPUs, idle time after each timed replay, in its own lengths")
      ->check(number_between(0.0, 100.0))
      ->capture_default_str();
  command.add_option("--json", flags.json,
                     "Write one JSON object to this file: backend, layer, routing, ceilings "
                     "(read_gbps), runs (scheme, kernel, m, rows, slots, active_experts, "
                     "expert_rows_max, expert_rows_mean, us, active_bytes, copies, gbps, "
                     "read_gbps, read_percent, tflops, kernel_launches)");
}

}  // namespace

void add_bench_moe(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<MoeFlags>();
  CLI::App* command = bench.add_subcommand(
      "moe", "The experts of one layer, from router to combining, beside the read bandwidth");
  command->add_option("--backend", flags->device, "Where the layer runs: cpu, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--cuda-library", flags->cuda_library,
                      "Path of libnibble_cuda.so (default: beside the program, or in ../lib)");
  add_layer_flags(*command, *flags);
  add_run_flags(*command, *flags);
  CpuBackendOptions& backend = flags->backend;
  add_kernel_flags(*command, backend.isa, backend.exact_activations);
  add_kernel_choice(*command, backend.kernels);
  add_thread_flags(*command, {backend.threads, backend.pinning, backend.numa});
  command->footer(
      "Weights and rows are random; the rows make the router choose as --routing says. Copies of "
      "the layer take turns,\nso that weights come from memory. active_bytes are those of the "
      "active experts and the router, gbps their rate,\nread_percent what that is of the "
      "bandwidth: "
      "on CPUs measured beside each run, on GPUs before all. tflops counts\ntwo operations for "
      "each "
      "weight and slot, a row of an expert; expert_rows_mean is of active experts. On GPUs the\n"
      "runs are recorded one after the other in a CUDA graph, and kernel_launches are those of one "
      "run.\nOf kimi-k2-ep8: " +
      find_moe_shape("kimi-k2-ep8")->rows_note() + "\n\n" + bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
