#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "base/json.h"
#include "command.h"
#include "quantizer/quantize.h"

namespace nibble {

void add_quantize_command(CLI::App& app, CommandContext& context);

namespace {

constexpr size_t kWorstListed = 5;

struct Flags {
  QuantizeOptions options;
  std::string scheme;
  std::string rule = "best";
  bool force = false;
  bool json = false;
};

std::string scheme_list() {
  std::string names;
  for (const QuantScheme& scheme : all_schemes()) {
    if (scheme.weight.quantized()) {
      names += names.empty() ? "" : ", ";
      names += scheme.name;
    }
  }
  return names;
}

/// A bar that overwrites itself on a terminal, a line per tenth elsewhere.
class ProgressDisplay final {
 public:
  void operator()(const QuantizeProgress& progress) {
    constexpr int64_t kWidth = 40;
    const int64_t total = std::max<int64_t>(progress.bytes_total, 1);
    const int64_t percent = progress.bytes_done * 100 / total;
    if (terminal_) {
      const auto filled = static_cast<size_t>(percent * kWidth / 100);
      const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
      std::fprintf(stderr, "\r[%s] %3d%%%s", bar.c_str(), static_cast<int>(percent),
                   percent == 100 ? "\n" : "");
    } else if (percent / 10 > last_tenth_) {
      last_tenth_ = percent / 10;
      std::fprintf(stderr, "quantized %d%% (%s)\n", static_cast<int>(percent),
                   progress.tensor.c_str());
    }
  }

 private:
  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
  int64_t last_tenth_ = 0;
};

Json report_json(const QuantizeReport& report, const Flags& flags) {
  JsonArray worst;
  for (const QuantizedTensor& tensor : report.tensors) {
    worst.push_back(Json::object({{"name", tensor.name}, {"snr_db", tensor.snr_db}}));
  }
  return Json::object(
      {{"scheme", flags.scheme},
       {"scale_rule", flags.rule},
       {"tensors", static_cast<int64_t>(report.tensors.size())},
       {"bytes_in", report.bytes_in},
       {"bytes_out", report.bytes_out},
       {"seconds", report.seconds},
       {"peak_rss_bytes", report.peak_rss_bytes},
       {"snr_db", Json::object({{"mean", report.snr_db_mean}, {"min", report.snr_db_min}})},
       {"worst_first", std::move(worst)}});
}

void print_report(const QuantizeReport& report, const Flags& flags) {
  constexpr double kMega = 1e6;
  fmt::print(
      "{}: {} tensors, {:.1f} MB -> {:.1f} MB ({:.2f}x) in {:.1f} s, peak memory {:.0f} MB\n",
      flags.options.destination, report.tensors.size(),
      static_cast<double>(report.bytes_in) / kMega, static_cast<double>(report.bytes_out) / kMega,
      static_cast<double>(report.bytes_in) / static_cast<double>(report.bytes_out), report.seconds,
      static_cast<double>(report.peak_rss_bytes) / kMega);
  fmt::print("signal to noise of weights, dB: mean {:.2f}, worst {:.2f}\n", report.snr_db_mean,
             report.snr_db_min);
  for (size_t i = 0; i < std::min(kWorstListed, report.tensors.size()); ++i) {
    fmt::print("  {:6.2f}  {}\n", report.tensors[i].snr_db, report.tensors[i].name);
  }
}

Status run(Flags& flags) {
  QuantizeOptions& options = flags.options;
  NIBBLE_ASSIGN_OR_RETURN(options.scheme, find_scheme(flags.scheme));
  NIBBLE_ASSIGN_OR_RETURN(options.rule, parse_scale_rule(flags.rule));
  options.existing = flags.force ? ExistingOutput::kReplace : ExistingOutput::kRefuse;
  options.progress = ProgressDisplay();
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeReport report, quantize_checkpoint(options));
  if (flags.json) {
    fmt::print("{}\n", report_json(report, flags).dump());
  } else {
    print_report(report, flags);
  }
  return {};
}

}  // namespace

void add_quantize_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "quantize", "Quantize a model folder into a new one that vLLM and transformers load too");
  command->add_option("SRC", flags->options.source, "Folder of the unquantized model")->required();
  command->add_option("DST", flags->options.destination, "Folder to create")->required();
  command->add_option("--scheme", flags->scheme, "One of " + scheme_list())->required();
  command
      ->add_option("--scale-rule", flags->rule,
                   "How scales are chosen: best, absmax, absmax7.5, signed, lsq, lsq_signed, mse")
      ->capture_default_str();
  command->add_option("--ignore", flags->options.ignore,
                      "Module to leave as it is: full name or \"re:PATTERN\"; may be repeated");
  command->add_option("--include", flags->options.include,
                      "Module to quantize although it is an embedding, router or lm_head");
  command->add_option("--shard-size", flags->options.shard_bytes, "Largest weight file, like 5GB")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("5GiB");
  command->add_option("--threads", flags->options.threads, "Worker threads; 0: all cores");
  command->add_flag("--force", flags->force, "Replace DST if it exists");
  command->add_flag("--json", flags->json, "Print the report as one JSON object");
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
