#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/ranges.h>

#include "backend/open_backend.h"
#include "base/json.h"
#include "bench/bench_commands.h"
#include "bench/kernels/cuda_bench.h"
#include "bench/kernels/gemm_bench.h"
#include "checkpoint/gguf_matrix.h"
#include "tools/flag_checks.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace nibble {

namespace {

constexpr std::string_view kFooter =
    "Weights come from memory, medians of at least 9 runs. The roofline is the longer of reading "
    "the weights\nat the bandwidth, and of all operations at the peak of the instructions, both "
    "measured directly before\nand after each run. On CPUs input_us is the part of us that rounds "
    "the activations to what the kernel\nmultiplies: in a model this is one pass with the norm or "
    "SiLU before, and figures of products elsewhere\noften leave it out.\n\n";
constexpr int64_t kMostRows = 16384;
constexpr int64_t kMostChannels = int64_t{1} << 20;

struct KernelFlags {
  CpuBackendOptions backend;
  std::string device = "cpu";
  std::string cuda_library;
  bool rows_given = false;
  std::vector<std::string> schemes;  // none: all
  std::vector<int64_t> row_counts = {1, 4, 16, 64, 256, 1024};
  double rest = KernelBenchOptions{}.rest;
  double a4_share = GemmBenchOptions{}.a4_share;
  std::vector<int64_t> n, k;  // of each shape; none: those of kShapes
  bool json = false;
};

// Of a Llama with 1.1 B parameters, and of one with 8 B.
constexpr GemmShape kShapes[] = {{2048, 2048}, {5632, 2048}, {2048, 5632}, {4096, 4096}};

Json optional_json(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

Json ceilings_json(const cpu::Ceilings& ceilings) {
  return Json::object({{"read_gbps", ceilings.read_gbps},
                       {"amx_int8_tops", optional_json(ceilings.amx_int8_tops)},
                       {"amx_bf16_tops", optional_json(ceilings.amx_bf16_tops)},
                       {"vnni_int8_tops", optional_json(ceilings.vnni_int8_tops())}});
}

Json timing_json(const GemmTiming& timing, std::string_view isa) {
  return Json::object({{"name", timing.kernel},
                       {"scheme", timing.scheme},
                       {"isa", isa},
                       {"m", timing.m},
                       {"n", timing.shape.n},
                       {"k", timing.shape.k},
                       {"us", timing.us},
                       {"input_us", timing.input_us},
                       {"gbps", timing.gbps},
                       {"tops", timing.tops},
                       {"roofline_percent", timing.roofline_percent.median},
                       {"roofline_percent_p25", timing.roofline_percent.p25},
                       {"roofline_percent_p75", timing.roofline_percent.p75},
                       {"speed", timing.speed}});
}

void print_ceilings(const cpu::Ceilings& ceilings, const Backend& backend) {
  const auto text = [](const std::optional<double>& tops) {
    return tops ? fmt::format("{:.2f}", *tops) : std::string("none");
  };
  print_out(fmt::format(
      "{}, {} threads: reads {:.1f} GB/s; peaks in TOPS: AMX int8 {}, AMX bf16 {}, VNNI int8 {}, "
      "f32 {}\n",
      backend.name(), backend.threads(), ceilings.read_gbps, text(ceilings.amx_int8_tops),
      text(ceilings.amx_bf16_tops), text(ceilings.vnni_int8_tops()),
      text(ceilings.fma512_tops ? ceilings.fma512_tops : ceilings.fma256_tops)));
  print_out(fmt::format("{:14} {:28} {:>5} {:>6} {:>6} {:>10} {:>9} {:>7} {:>8} {:>7} {:>7}\n",
                        "scheme", "kernel", "m", "n", "k", "us", "input us", "GB/s", "GOPS",
                        "roof %", "speed"));
}

void print_timings(const std::vector<GemmTiming>& timings) {
  for (const GemmTiming& timing : timings) {
    print_out(
        fmt::format("{:14} {:28} {:5} {:6} {:6} {:10.1f} {:9.1f} {:7.2f} {:8.1f} {:7.1f} {:7.3f}\n",
                    timing.scheme, timing.kernel, timing.m, timing.shape.n, timing.shape.k,
                    timing.us, timing.input_us, timing.gbps, timing.tops * 1e3,
                    timing.roofline_percent.median, timing.speed));
  }
}

/// A scheme of the table, or a type of GGUF that products take as it is.
Result<QuantScheme> chosen_scheme(const std::string& name) {
  for (const gguf::Type type : {gguf::Type::kQ4_0, gguf::Type::kQ4_1, gguf::Type::kQ8_0}) {
    const std::string_view type_name = gguf::type_traits(type).name;
    if (name == type_name) {
      return QuantScheme{type_name, *gguf_weight_format(type)};
    }
  }
  const auto scheme = find_scheme(name);
  NIBBLE_RETURN_IF_ERROR(scheme.status().with_context("--scheme"));
  return *scheme;
}

Result<std::vector<QuantScheme>> chosen_schemes(const KernelFlags& flags) {
  if (flags.schemes.empty()) {
    return std::vector<QuantScheme>(all_schemes().begin(), all_schemes().end());
  }
  std::vector<QuantScheme> schemes;
  for (const std::string& name : flags.schemes) {
    NIBBLE_ASSIGN_OR_RETURN(schemes.emplace_back(), chosen_scheme(name));
  }
  return schemes;
}

/// kInvalidArgument for sizes without a partner and for a k that no scheme of the list can group.
Status check_shapes(const KernelFlags& flags, const std::vector<QuantScheme>& schemes) {
  if (flags.n.size() != flags.k.size()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--n {} --k {}: give both sizes of each product, or none",
                      fmt::join(flags.n, ","), fmt::join(flags.k, ","));
  }
  for (const QuantScheme& scheme : schemes) {
    for (const int64_t k : flags.k) {
      const int group = scheme.weight.group_size;
      if (group > 0 && k % group != 0) {
        return make_error(
            StatusCode::kInvalidArgument,
            "--k {} is no multiple of the group size of {}; choose another --scheme or "
            "a multiple of {}",
            k, scheme.name, group);
      }
    }
  }
  return {};
}

/// The kernels of a GPU.
Status run_on_gpu(const KernelFlags& flags, const std::vector<QuantScheme>& schemes) {
  const BackendOptions device{
      .device = flags.device, .kernels = flags.backend.kernels, .cuda_library = flags.cuda_library};
  NIBBLE_RETURN_IF_ERROR(open_backend(device).status());  // there is a GPU with these kernels
  NIBBLE_ASSIGN_OR_RETURN(const CudaBench bench, CudaBench::open(device));
  KernelBenchOptions options;
  options.rest = flags.rest;
  options.a4_share = flags.a4_share;
  options.kernels = flags.backend.kernels;
  if (!flags.schemes.empty()) {
    options.schemes = schemes;
    for (QuantScheme& scheme : options.schemes) {
      if (scheme.weight.scale_dtype == DType::kF16) {
        scheme.weight.scale_dtype = DType::kBF16;  // as GPUs keep those of GGUF
      }
    }
  }
  if (flags.rows_given) {
    options.row_counts = flags.row_counts;
  }
  for (size_t i = 0; i < flags.n.size(); ++i) {
    options.shapes.push_back({.n = flags.n[i], .k = flags.k[i]});
  }
  if (!flags.json) {
    options.progress = [](const std::string& line) { print_out(line + "\n"); };
  }
  NIBBLE_ASSIGN_OR_RETURN(const Json report, bench.kernels(options));
  if (flags.json) {
    print_out(report.dump() + "\n");
  }
  return {};
}

Status run(const KernelFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(auto schemes, chosen_schemes(flags));
  if (flags.device != "cpu") {
    NIBBLE_RETURN_IF_ERROR(check_shapes(flags, schemes));
    return run_on_gpu(flags, schemes);
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, make_cpu_backend(flags.backend));
  if (flags.schemes.empty()) {
    std::erase_if(schemes, [&](const QuantScheme& scheme) {
      return !backend->check_gemm(scheme.weight, scheme.act, 4096).ok();
    });
  }
  NIBBLE_RETURN_IF_ERROR(check_shapes(flags, schemes));
  GemmBenchOptions options;
  options.isa = backend->name().substr(backend->name().find('/') + 1);
  options.row_counts = flags.row_counts;
  options.a4_share = flags.a4_share;
  options.kernels = flags.backend.kernels;
  for (size_t i = 0; i < flags.n.size(); ++i) {
    options.shapes.push_back({flags.n[i], flags.k[i]});
  }
  if (options.shapes.empty()) {
    options.shapes.assign(std::begin(kShapes), std::end(kShapes));
  }
  ThreadPool pool(bench_threads(flags.backend, backend->threads()));
  NIBBLE_ASSIGN_OR_RETURN(const cpu::Ceilings ceilings, cpu::measure_ceilings(pool));
  if (!flags.json) {
    print_ceilings(ceilings, *backend);
  }
  NIBBLE_ASSIGN_OR_RETURN(auto near, cpu::NearCeilings::create(pool));
  options.ceilings = &near;
  JsonArray kernels;
  // All schemes one by one, whose weights would not find room beside each other; named ones in
  // turns.
  const size_t at_once = flags.schemes.empty() ? 1 : schemes.size();
  for (size_t i = 0; i < schemes.size(); i += at_once) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<GemmTiming> timings,
                            bench_gemm(*backend, std::span(schemes).subspan(i, at_once), options));
    for (const GemmTiming& timing : timings) {
      kernels.push_back(timing_json(timing, options.isa));
    }
    if (!flags.json) {
      print_timings(timings);
    }
  }
  if (!options.kernels.empty()) {
    NIBBLE_RETURN_IF_ERROR(backend->prepare_steps({}));  // were all of them of use?
  }
  if (flags.json) {
    const Json json =
        Json::object({{"ceilings", ceilings_json(ceilings)}, {"kernels", std::move(kernels)}});
    print_out(json.dump() + "\n");
  }
  return {};
}

}  // namespace

void add_bench_kernels(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<KernelFlags>();
  CLI::App* command =
      bench.add_subcommand("kernels", "Matrix products of every scheme, beside the ceilings");
  command
      ->add_option("--backend", flags->device,
                   "Where the kernels run: cpu, cuda or cuda:N. On GPUs --m and the shapes have "
                   "other defaults, and figures are ratios to BF16 through cuBLASLt")
      ->capture_default_str();
  command->add_option("--cuda-library", flags->cuda_library,
                      "Path of libnibble_cuda.so (default: beside the program, or in ../lib)");
  CpuBackendOptions& backend = flags->backend;
  add_kernel_flags(*command, backend.isa, backend.exact_activations);
  add_kernel_choice(*command, backend.kernels);
  add_thread_flags(*command, {backend.threads, backend.pinning, backend.numa});
  command
      ->add_option(
          "--scheme", flags->schemes,
          "Only these schemes, or types of GGUF (Q4_0, Q4_1, Q8_0), with commas between. On "
          "CPUs several are timed in turns, and `speed` is that of the first one's times "
          "over each one's")
      ->delimiter(',');
  command
      ->add_option("--a4-share", flags->a4_share,
                   "Of schemes with activations in blocks: which share of the blocks has the fewer "
                   "bits, 4 beside 8 or 8 beside BF16")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--m", flags->row_counts, "Rows of activations, like 1,16,256")
      ->delimiter(',')
      ->check(whole_number(1, kMostRows))
      ->capture_default_str();
  command
      ->add_option("--n", flags->n,
                   "Output channels of the only shapes, like 8192,4096; with as many --k")
      ->delimiter(',')
      ->check(whole_number(1, kMostChannels));
  command->add_option("--k", flags->k, "Input channels of the only shapes")
      ->delimiter(',')
      ->check(whole_number(1, kMostChannels));
  command
      ->add_option("--rest", flags->rest,
                   "On GPUs, idle time after each timed run, in its own lengths. At 0 runs follow "
                   "each other, and the power limit lowers clocks")
      ->check(number_between(0.0, 100.0))
      ->capture_default_str();
  command->add_flag("--json", flags->json,
                    "Print one JSON object: ceilings (read_gbps, amx_int8_tops, ...), kernels "
                    "(name, scheme, isa, m, n, k, us, input_us, gbps, tops, roofline_percent, "
                    "_p25, _p75, speed)");
  command->footer(std::string(kFooter) + bench.get_footer());
  command->callback([flags, command, &context] {
    flags->rows_given = command->count("--m") > 0;
    context.action = [flags] { return run(*flags); };
  });
}

}  // namespace nibble
