#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/f16.h"
#include "base/json.h"
#include "bench/bench_commands.h"
#include "bench/ceilings/ceilings.h"
#include "checkpoint/source_kernels.h"
#include "quantizer/encoder.h"
#include "tools/flag_checks.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace nibble {

namespace {

constexpr int64_t kMostChannels = int64_t{1} << 20;
constexpr int64_t kRowsPerTask = 16;
constexpr int kLeastTimings = 5;
constexpr double kLeastSeconds = 0.4;
constexpr double kGiga = 1e9;

struct QuantizeFlags {
  CpuBackendOptions threads;
  std::string scheme;  // empty: all
  std::string rule;    // empty: all that apply
  std::string format;  // empty: the scheme's own
  int64_t n = 4096;
  int64_t k = 4096;
  bool json = false;
};

struct Timing {
  double seconds = 0;
  double snr_db = 0;
};

/// A BF16 matrix in memory and the memory of one result.
class Job final {
 public:
  Job(const MatrixEncoder& encoder, const std::vector<uint16_t>& weights, int64_t n, int64_t k)
      : encoder_(encoder), weights_(weights), n_(n), k_(k) {
    for (size_t slot = 0; slot < encoder.slots().size(); ++slot) {
      out_.emplace_back(static_cast<size_t>(encoder.place(slot, 0, n).bytes));
    }
    task_rows_ = std::max(kRowsPerTask, encoder.row_block());
  }

  /// Decodes, encodes and measures every row once.
  Status run(ThreadPool& pool, std::vector<RowsError>& errors) {
    const int64_t tasks = (n_ + task_rows_ - 1) / task_rows_;
    std::vector<Status> failures(static_cast<size_t>(tasks));
    std::vector<float> extents(static_cast<size_t>(tasks));
    buffers_.resize(static_cast<size_t>(pool.threads()));
    errors.assign(static_cast<size_t>(tasks), {});
    Extent extent;
    if (encoder_.needs_extent()) {
      pool.parallel_for(tasks, [&](int64_t task, int thread) {
        const auto at = static_cast<size_t>(task);
        const int64_t rows = rows_of(task);
        const auto found = absmax_of(decode(task, thread), task * task_rows_, rows, k_);
        failures[at] = found.status();
        extents[at] = found.ok() ? *found : 0;
      });
      extent.absmax = *std::max_element(extents.begin(), extents.end());
    }
    pool.parallel_for(tasks, [&](int64_t task, int thread) {
      failures[static_cast<size_t>(task)] =
          encode(task, decode(task, thread), extent, errors[static_cast<size_t>(task)]);
    });
    for (const Status& failure : failures) {
      NIBBLE_RETURN_IF_ERROR(failure);
    }
    return {};
  }

 private:
  [[nodiscard]] int64_t rows_of(int64_t task) const {
    return std::min(task_rows_, n_ - task * task_rows_);
  }

  const float* decode(int64_t task, int thread) {
    std::vector<float>& buffer = buffers_[static_cast<size_t>(thread)];
    buffer.resize(static_cast<size_t>(task_rows_ * k_));
    const uint16_t* in = weights_.data() + task * task_rows_ * k_;
    decode_plain(DType::kBF16, reinterpret_cast<const std::byte*>(in), rows_of(task) * k_,
                 buffer.data());
    return buffer.data();
  }

  Status encode(int64_t task, const float* x, const Extent& extent, RowsError& error) {
    for (int64_t row = 0; row < rows_of(task); row += encoder_.row_block()) {
      const int64_t first = task * task_rows_ + row;
      const int64_t rows = std::min(encoder_.row_block(), n_ - first);
      std::vector<std::byte*> out;
      for (size_t slot = 0; slot < out_.size(); ++slot) {
        out.push_back(out_[slot].data() + encoder_.place(slot, first, rows).offset);
      }
      RowsError part;
      NIBBLE_RETURN_IF_ERROR(encoder_.encode(first, rows, x + row * k_, extent, out, part));
      error.add(part);
    }
    return {};
  }

  const MatrixEncoder& encoder_;
  const std::vector<uint16_t>& weights_;
  int64_t n_;
  int64_t k_;
  int64_t task_rows_ = 0;
  std::vector<std::vector<std::byte>> out_;
  std::vector<std::vector<float>> buffers_;
};

std::vector<uint16_t> random_weights(int64_t count) {
  constexpr size_t kPeriod = 1U << 16;  // enough not to repeat within a row
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<uint16_t> some(kPeriod + 1);
  for (uint16_t& value : some) {
    value = f32_to_bf16(normal(random));
  }
  std::vector<uint16_t> weights(static_cast<size_t>(count));
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = some[i % some.size()];
  }
  return weights;
}

/// Best of several runs: others use the machine too.
Result<Timing> measure(const EncoderOptions& options,
                       const std::vector<uint16_t>& weights,
                       const QuantizeFlags& flags,
                       ThreadPool& pool) {
  NIBBLE_ASSIGN_OR_RETURN(const auto encoder, make_encoder(options, flags.n, flags.k));
  Job job(*encoder, weights, flags.n, flags.k);
  std::vector<RowsError> errors;
  Timing best{.seconds = 1e30};
  NIBBLE_RETURN_IF_ERROR(job.run(pool, errors));  // touches the memory
  double sum = 0;
  for (int i = 0; i < kLeastTimings || sum < kLeastSeconds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    NIBBLE_RETURN_IF_ERROR(job.run(pool, errors));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best.seconds = std::min(best.seconds, elapsed.count());
    sum += elapsed.count();
  }
  RowsError total;
  for (const RowsError& error : errors) {
    total.add(error);
  }
  best.snr_db = total.snr_db();
  return best;
}

/// The scheme and rule that the flags name, or every rule of every scheme.
Result<std::vector<EncoderOptions>> chosen(const QuantizeFlags& flags) {
  std::vector<QuantScheme> schemes(all_schemes().begin(), all_schemes().end());
  std::vector<ScaleRule> rules(all_scale_rules().begin(), all_scale_rules().end());
  if (!flags.scheme.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const QuantScheme scheme, find_scheme(flags.scheme));
    schemes = {scheme};
  }
  if (!flags.rule.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const ScaleRule rule, parse_scale_rule(flags.rule));
    rules = {rule};
  }
  std::vector<EncoderOptions> all;
  Status refused;
  for (const QuantScheme& scheme : schemes) {
    for (const ScaleRule rule : rules) {
      EncoderOptions options = {.scheme = scheme, .rule = rule, .dialect = default_dialect(scheme)};
      options.isa = flags.threads.isa;
      if (!flags.format.empty()) {
        NIBBLE_ASSIGN_OR_RETURN(options.dialect, parse_dialect(flags.format));
      }
      const auto encoder = make_encoder(options, flags.n, flags.k);
      refused = encoder.status();
      if (encoder.ok()) {
        all.push_back(options);
      }
    }
  }
  NIBBLE_RETURN_IF_ERROR(all.empty() ? refused : Status());
  return all;
}

Status run(const QuantizeFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<EncoderOptions> rows, chosen(flags));
  ThreadPool pool(bench_threads(flags.threads, flags.threads.threads));
  NIBBLE_ASSIGN_OR_RETURN(const double read_gbps, cpu::measure_read_gbps(pool));
  const std::vector<uint16_t> weights = random_weights(flags.n * flags.k);
  const auto count = static_cast<double>(weights.size());
  JsonArray results;
  if (!flags.json) {
    print_out(fmt::format("{} threads, BF16 [{}, {}] in memory, which reads at {:.1f} GB/s\n",
                          pool.threads(), flags.n, flags.k, read_gbps));
    print_out(fmt::format("{:16} {:18} {:10} {:>12} {:>8} {:>8}\n", "scheme", "format", "rule",
                          "G weights/s", "GB/s in", "SNR dB"));
  }
  for (const EncoderOptions& options : rows) {
    const std::string_view scheme = options.scheme.name;
    const std::string_view rule = scale_rule_name(options.rule);
    NIBBLE_ASSIGN_OR_RETURN(const Timing timing, measure(options, weights, flags, pool));
    const double speed = count / timing.seconds / kGiga;
    results.push_back(Json::object({{"scheme", scheme},
                                    {"format", dialect_name(options.dialect)},
                                    {"rule", rule},
                                    {"gweights_per_s", speed},
                                    {"gbps_in", speed * 2},
                                    {"snr_db", timing.snr_db}}));
    if (!flags.json) {
      print_out(fmt::format("{:16} {:18} {:10} {:12.3f} {:8.2f} {:8.2f}\n", scheme,
                            dialect_name(options.dialect), rule, speed, speed * 2, timing.snr_db));
    }
  }
  if (flags.json) {
    const Json json = Json::object({{"threads", pool.threads()},
                                    {"n", flags.n},
                                    {"k", flags.k},
                                    {"read_gbps", read_gbps},
                                    {"results", std::move(results)}});
    print_out(json.dump() + "\n");
  }
  return {};
}

}  // namespace

void add_bench_quantize(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<QuantizeFlags>();
  CLI::App* command =
      bench.add_subcommand("quantize", "Encoding of a matrix in memory, beside its bandwidth");
  add_thread_flags(*command, {flags->threads.threads, flags->threads.pinning, flags->threads.numa});
  command->add_option("--isa", flags->threads.isa, "Instruction set: auto, scalar, avx2, avx512")
      ->check(CLI::IsMember({"auto", "scalar", "avx2", "avx512"}))
      ->capture_default_str();
  command->add_option("--scheme", flags->scheme, "Only this scheme");
  command->add_option("--scale-rule", flags->rule, "Only this choice of scales");
  command->add_option("--format", flags->format, "How it is stored")
      ->check(CLI::IsMember({"compressed-tensors", "quark", "fp8"}));
  command->add_option("--n", flags->n, "Rows")->check(whole_number(1, kMostChannels));
  command->add_option("--k", flags->k, "Columns")->check(whole_number(1, kMostChannels));
  command->add_flag("--json", flags->json,
                    "Print one JSON object: threads, n, k, read_gbps, results (scheme, format, "
                    "rule, gweights_per_s, gbps_in, snr_db)");
  command->footer(
      "Weights are Gaussian. Each row is the best of at least five runs that decode BF16, choose "
      "scales, encode,\nmeasure the error and write the bytes to memory; schemes with one scale "
      "for the "
      "matrix read it twice.\n\n" +
      bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
