#include <map>
#include <memory>
#include <string>

#include "base/json.h"
#include "command.h"
#include "flag_checks.h"
#include "output.h"
#include "progress.h"
#include "quant/scheme.h"
#include "synthetic/dummy.h"

namespace nibble {

void add_make_dummy_command(CLI::App& app, CommandContext& context);

namespace {

struct Flags {
  DummyOptions options;
  std::string dtype = "auto";
  std::string scheme;
  std::string others;
  bool tiny = false;
  bool force = false;
  bool json = false;
};

void print_report(const DummyReport& report, const Flags& flags) {
  if (flags.json) {
    const Json json = Json::object({{"architecture", report.architecture},
                                    {"dtype", dtype_name(report.dtype)},
                                    {"layers", report.layers},
                                    {"tensors", report.tensors},
                                    {"parameters", report.parameters},
                                    {"bytes", report.bytes},
                                    {"seconds", report.seconds},
                                    {"peak_rss_bytes", report.peak_rss_bytes}});
    print_out(json.dump() + "\n");
    return;
  }
  print_out(fmt::format(
      "{}: {}, {} layers, {:.1f} million parameters in {}, {:.1f} MB in {:.1f} s, peak memory "
      "{:.0f} MB\n",
      flags.options.destination, report.architecture, report.layers,
      static_cast<double>(report.parameters) / 1e6, dtype_name(report.dtype),
      static_cast<double>(report.bytes) / 1e6, report.seconds,
      static_cast<double>(report.peak_rss_bytes) / 1e6));
}

Status run(Flags& flags) {
  static const std::map<std::string, DType> kTypes = {
      {"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f32", DType::kF32}};
  DummyOptions& options = flags.options;
  if (const auto found = kTypes.find(flags.dtype); found != kTypes.end()) {
    options.dtype = found->second;
  }
  if (!flags.scheme.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(options.scheme, find_scheme(flags.scheme));
  }
  if (!flags.others.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(options.others, find_scheme(flags.others));
  }
  options.widths = flags.tiny ? DummyWidths::kTiny : DummyWidths::kOfConfig;
  options.existing = flags.force ? ExistingOutput::kReplace : ExistingOutput::kRefuse;
  ProgressDisplay display("written", ProgressDisplay::Unit::kBytes);
  options.progress = [&display](int64_t done, int64_t total) { display.update(done, total, ""); };
  NIBBLE_ASSIGN_OR_RETURN(const DummyReport report, make_dummy_checkpoint(options));
  print_report(report, flags);
  return {};
}

}  // namespace

void add_make_dummy_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("make-dummy", "Write a model with random weights, to measure speed with");
  DummyOptions& options = flags->options;
  command->add_option("--config", options.config, "config.json of a known architecture; it decides")
      ->required();
  command->add_option("--out", options.destination, "Folder to create")->required();
  command->add_option("--layers", options.layers, "Layers to keep; all if not given")
      ->check(whole_number(1));
  command->add_option("--seed", options.seed, "The same seed gives the same weights")
      ->check(whole_number(0))
      ->capture_default_str();
  command
      ->add_option("--dtype", flags->dtype,
                   "Type of the weights, unquantized but for --scheme; auto: as the config says")
      ->check(CLI::IsMember({"auto", "bf16", "f16", "f32"}))
      ->capture_default_str();
  command->add_option("--scheme", flags->scheme,
                      "Store what nibble quantize would quantize in this scheme, as it does, "
                      "instead of as the config says");
  command->add_option(
      "--attention-scheme", flags->others,
      "Of a mixture of experts: store attention, shared experts and dense layers in "
      "this scheme; routed experts are as --scheme or the config says");
  command->add_flag("--tiny", flags->tiny,
                    "Hidden states of 64 and all else to match, with as many layers and experts");
  command->add_option("--shard-size", options.shard_bytes, "Largest weight file, like 5GB")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number(1))
      ->default_str("5GiB");
  command->add_option("--threads", options.threads, "Worker threads; 0: one per core")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command->add_flag("--force", flags->force, "Replace the folder if it exists");
  command->add_flag("--json", flags->json,
                    "Print one JSON object: architecture, dtype, layers, tensors, parameters, "
                    "bytes, seconds, peak_rss_bytes");
  command->footer(
      "Norms are 1, all other weights Gaussian with deviation 0.02. The tokenizer has one token "
      "per byte;\nother tokens decode to nothing. DeepSeek V3, Kimi K2 and K2.5, Qwen3-MoE and "
      "gpt-oss keep the\nquantization of their config (INT4 groups, FP8 blocks, MXFP4) unless "
      "--dtype names a type.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
