#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "command.h"
#include "flag_checks.h"
#include "output.h"
#include "progress.h"
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
  const auto mega = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  print_out(fmt::format(
      "{}: {} tensors, {:.1f} MB -> {:.1f} MB ({:.2f}x) in {:.1f} s, peak memory {:.0f} MB\n"
      "signal to noise of weights, dB: mean {:.2f}, worst {:.2f}\n",
      flags.options.destination, report.tensors.size(), mega(report.bytes_in),
      mega(report.bytes_out), mega(report.bytes_in) / mega(report.bytes_out), report.seconds,
      mega(report.peak_rss_bytes), report.snr_db_mean, report.snr_db_min));
  const size_t listed = std::min(kWorstListed, report.tensors.size());
  for (size_t i = 0; i < listed; ++i) {
    print_out(fmt::format("  {:6.2f}  {}\n", report.tensors[i].snr_db, report.tensors[i].name));
  }
  if (listed < report.tensors.size()) {
    print_out(
        fmt::format("  and {} better ones (--json lists all)\n", report.tensors.size() - listed));
  }
}

Status run(Flags& flags) {
  QuantizeOptions& options = flags.options;
  const auto scheme = find_scheme(flags.scheme);
  NIBBLE_RETURN_IF_ERROR(scheme.status().with_context("--scheme"));
  options.scheme = *scheme;
  const auto rule = parse_scale_rule(flags.rule);
  NIBBLE_RETURN_IF_ERROR(rule.status().with_context("--scale-rule"));
  options.rule = *rule;
  options.existing = flags.force ? ExistingOutput::kReplace : ExistingOutput::kRefuse;
  ProgressDisplay display("quantized", ProgressDisplay::Unit::kBytes);
  options.progress = [&display](const QuantizeProgress& progress) {
    display.update(progress.bytes_done, progress.bytes_total, progress.tensor);
  };
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeReport report, quantize_checkpoint(options));
  if (flags.json) {
    print_out(report_json(report, flags).dump() + "\n");
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
  command
      ->add_option("--ignore", flags->options.ignore,
                   "Module to leave as it is: full name or \"re:PATTERN\"; may be repeated")
      ->allow_extra_args(false);
  command
      ->add_option(
          "--include", flags->options.include,
          "Module to quantize although it is an embedding, router or lm_head; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--shard-size", flags->options.shard_bytes, "Largest weight file, like 5GB")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number(1))
      ->default_str("5GiB");
  command->add_option("--threads", flags->options.threads, "Worker threads; 0: all cores")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command->add_flag("--force", flags->force, "Replace DST if it exists");
  command->add_flag("--json", flags->json,
                    "Print one JSON object: scheme, tensors, bytes_in, bytes_out, seconds, "
                    "peak_rss_bytes, snr_db, ...");
  command->footer(
      "Embeddings, norms, routers and lm_head stay as they are unless --include names them. DST "
      "appears\nwhole or not at all; a run that is killed leaves DST.tmp-PID, which the next run "
      "removes.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
