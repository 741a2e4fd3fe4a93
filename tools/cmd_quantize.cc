#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "command.h"
#include "flag_checks.h"
#include "gguf/split.h"
#include "kv_calibration.h"
#include "model/tensor_check.h"
#include "output.h"
#include "progress.h"
#include "quantize_blocks.h"
#include "quantize_budget.h"
#include "quantize_flags.h"
#include "stop_on_signal.h"

namespace nibble {

void add_quantize_command(CLI::App& app, CommandContext& context);
void add_import_command(CLI::App& app, CommandContext& context);

namespace {

using Flags = QuantizeFlags;

constexpr size_t kWorstListed = 5;

std::string scheme_list() {
  std::string names;
  for (const QuantScheme& scheme : all_schemes()) {
    names += names.empty() ? "" : ", ";
    names += scheme.name;
  }
  return names;
}

double mega(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

// What is known to hurt a small model, and what to take instead; empty: nothing. One scale for each
// row of 4-bit codes multiplies the perplexity of one of 135 million parameters by more than three
// (docs/quantization.md).
std::string advice(const QuantizeReport& report, const Flags& flags) {
  constexpr int64_t kSmallModel = 1'000'000'000;
  const WeightFormat& format = flags.options.plan.rules.scheme.weight;
  int64_t weights = 0;
  for (const QuantizedTensor& tensor : report.tensors) {
    weights += tensor.n * tensor.k;
  }
  if (format.code != WeightCode::kInt4 || format.scale_per != ScalePer::kChannel || weights == 0 ||
      weights >= kSmallModel) {
    return {};
  }
  const std::string_view instead = scheme_name(
      {.code = WeightCode::kInt8, .scale_per = ScalePer::kChannel, .scale_dtype = DType::kBF16},
      ActFormat::kFloat);
  return fmt::format(
      "{} has one scale for a row of 4-bit weights, which a model of {:.0f} million weights does "
      "not "
      "bear without training for it; compare with --scheme {}",
      flags.scheme, static_cast<double>(weights) / 1e6, instead);
}

/// How many matrices were rounded by each method, and what that did to the error of the outputs.
std::string kept_text(const QuantizeReport& report) {
  std::map<std::string, int64_t> kept;
  double ratios = 0;
  int64_t counted = 0;
  for (const QuantizedTensor& tensor : report.tensors) {
    if (!tensor.calibration) {
      continue;
    }
    ++kept[tensor.calibration->rounding];
    if (tensor.calibration->error > 0 && tensor.calibration->rtn_error > 0) {
      ratios += std::log(tensor.calibration->error / tensor.calibration->rtn_error);
      ++counted;
    }
  }
  std::string text;
  for (const auto& [name, count] : kept) {
    text += fmt::format("{}{} matrices by {}", text.empty() ? "rounded: " : ", ", count, name);
  }
  if (counted > 0) {
    text += fmt::format("; squared error of outputs {:.3f} times that of the nearest codes",
                        std::exp(ratios / static_cast<double>(counted)));
  }
  return text;
}

/// Matrices that the method could not be applied to, by reason.
std::map<std::string, int64_t> fallbacks_of(const QuantizeReport& report) {
  std::map<std::string, int64_t> counts;
  for (const QuantizedTensor& tensor : report.tensors) {
    if (tensor.calibration && !tensor.calibration->fallback.empty()) {
      ++counts[tensor.calibration->fallback];
    }
  }
  return counts;
}

std::string fallback_text(const QuantizeReport& report) {
  std::string text;
  for (const auto& [reason, count] : fallbacks_of(report)) {
    text += fmt::format("{}{} for {}", text.empty() ? "fell back: " : ", ", count, reason);
  }
  return text.empty() ? text : text + fmt::format(" (marked in {})\n", kReportName);
}

Json fallback_json(const QuantizeReport& report) {
  Json json = Json::object({});
  for (const auto& [reason, count] : fallbacks_of(report)) {
    json.set(reason, count);
  }
  return json;
}

/// `runs`: whether this program loads what was made, else why not.
Json report_json(const QuantizeReport& report,
                 const Flags& flags,
                 const Status& runs,
                 Json calibration_seconds) {
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
       {"calibration_seconds", std::move(calibration_seconds)},
       {"peak_rss_bytes", report.peak_rss_bytes},
       {"already_there", report.already_there},
       {"runs", runs.ok()},
       {"why_not", runs.ok() ? Json() : Json(runs.message())},
       {"advice", advice(report, flags)},
       {"snr_db", Json::object({{"mean", report.snr_db_mean}, {"min", report.snr_db_min}})},
       {"fallbacks", fallback_json(report)},
       {"budget", flags.options.plan.budget},
       {"blocks", flags.blocks.chosen},
       {"worst_first", std::move(worst)}});
}

Json part_json(const QuantizeReport& report, const Flags& flags) {
  return Json::object({{"part", flags.part},
                       {"bytes_in", report.bytes_in},
                       {"bytes_out", report.bytes_out},
                       {"shards_done", report.shards_done},
                       {"shards_total", report.shards_total},
                       {"seconds", report.seconds},
                       {"peak_rss_bytes", report.peak_rss_bytes}});
}

void print_report(const QuantizeReport& report, const Flags& flags) {
  if (report.already_there) {
    print_out(fmt::format("{}: is there already, made from the same source with the same options\n",
                          flags.options.destination));
    return;
  }
  if (report.tensors.empty()) {
    print_out(fmt::format("{}: all tensors are as they were, in {:.1f} s, peak memory {:.0f} MB\n",
                          flags.options.destination, report.seconds, mega(report.peak_rss_bytes)));
    return;
  }
  print_out(fmt::format(
      "{}: {} tensors, {:.1f} MB -> {:.1f} MB ({:.2f}x) in {:.1f} s, peak memory {:.0f} MB\n"
      "signal to noise of weights, dB: mean {:.2f}, worst {:.2f}\n",
      flags.options.destination, report.tensors.size(), mega(report.bytes_in),
      mega(report.bytes_out), mega(report.bytes_in) / mega(report.bytes_out), report.seconds,
      mega(report.peak_rss_bytes), report.snr_db_mean, report.snr_db_min));
  if (const std::string kept = kept_text(report); !kept.empty()) {
    print_out(kept + "\n");
  }
  print_out(flags.blocks.summary + fallback_text(report));
  const size_t listed = std::min(kWorstListed, report.tensors.size());
  for (size_t i = 0; i < listed; ++i) {
    print_out(fmt::format("  {:6.2f}  {}\n", report.tensors[i].snr_db, report.tensors[i].name));
  }
  if (listed < report.tensors.size()) {
    print_out(fmt::format("  and {} better ones (all are in {})\n", report.tensors.size() - listed,
                          kReportName));
  }
}

void print_part(const QuantizeReport& report, const Flags& flags) {
  print_out(fmt::format(
      "part {}: {} of {} weight files, {:.1f} MB -> {:.1f} MB, in {:.1f} s, peak memory {:.0f} MB; "
      "when all parts are done, --finish completes {}\n",
      flags.part, report.shards_done, report.shards_total, mega(report.bytes_in),
      mega(report.bytes_out), report.seconds, mega(report.peak_rss_bytes),
      flags.options.destination));
}

// One line a tensor: "action name bytes -> bytes file; rule".
void print_plan(const Json& plan) {
  for (const Json& tensor : plan.find("tensors")->as_array()) {
    const std::string& rule = tensor.find("rule")->as_string();
    print_out(fmt::format("{:<14} {} {} {} -> {} bytes, {}{}{}\n",
                          tensor.find("action")->as_string(), tensor.find("name")->as_string(),
                          tensor.find("source")->as_string(), tensor.find("bytes_in")->as_int(),
                          tensor.find("bytes_out")->as_int(), tensor.find("file")->as_string(),
                          rule.empty() ? "" : "; ", rule));
  }
  print_out(fmt::format("{} tensors, {:.1f} MB -> {:.1f} MB in {} weight files; rules: {}\n",
                        plan.find("tensors")->as_array().size(),
                        mega(plan.find("bytes_in")->as_int()),
                        mega(plan.find("bytes_out")->as_int()), plan.find("shards")->as_int(),
                        plan.find("rules")->as_string()));
}

Result<QuantizeShare> parse_share(const Flags& flags) {
  QuantizeShare share;
  if (flags.finish) {
    share.kind = QuantizeShare::Kind::kFinish;
    return share;
  }
  if (flags.part.empty()) {
    return share;
  }
  share.kind = QuantizeShare::Kind::kPart;
  const char* end = flags.part.data() + flags.part.size();
  const auto [slash, error] = std::from_chars(flags.part.data(), end, share.part);
  if (error == std::errc() && slash != end && *slash == '/') {
    const auto [last, second_error] = std::from_chars(slash + 1, end, share.parts);
    if (second_error == std::errc() && last == end && share.parts >= 1 && share.part >= 1 &&
        share.part <= share.parts) {
      return share;
    }
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--part {}: not of the form I/N with I from 1 to N", flags.part);
}

Status fill_options(Flags& flags) {
  QuantizeOptions& options = flags.options;
  if (!flags.recipe.empty() && flags.budget.empty()) {
    NIBBLE_RETURN_IF_ERROR(take_recipe(flags));
  } else if (flags.scheme.empty() && flags.budget.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--scheme: is needed, or a --recipe, or a --budget with --schemes; one of {}",
                      scheme_list());
  }
  NIBBLE_RETURN_IF_ERROR(check_calibration(flags));
  NIBBLE_RETURN_IF_ERROR(check_budget_flags(flags));
  if (flags.budget.empty()) {
    const auto scheme = find_scheme(flags.scheme);
    NIBBLE_RETURN_IF_ERROR(scheme.status().with_context("--scheme"));
    options.plan.rules.scheme = *scheme;
  }
  NIBBLE_RETURN_IF_ERROR(settle_blocks(flags));
  if (!flags.lm_head.empty()) {
    const auto head = find_scheme(flags.lm_head);
    NIBBLE_RETURN_IF_ERROR(head.status().with_context("--lm-head"));
    if (in_blocks(head->act)) {
      return make_error(StatusCode::kUnsupported,
                        "--lm-head {}: the head's rows are not rounded in blocks; choose another "
                        "scheme for it",
                        flags.lm_head);
    }
    options.plan.rules.head = *head;
  }
  const auto rule = parse_scale_rule(flags.rule);
  NIBBLE_RETURN_IF_ERROR(rule.status().with_context("--scale-rule"));
  options.plan.scale_rule = *rule;
  if (!flags.format.empty()) {
    const auto dialect = parse_dialect(flags.format);
    NIBBLE_RETURN_IF_ERROR(dialect.status().with_context("--format"));
    options.plan.dialect = *dialect;
  }
  if (!flags.kv_cache.empty()) {
    const auto kv_cache = parse_kv_cache_scheme(flags.kv_cache);
    NIBBLE_RETURN_IF_ERROR(kv_cache.status().with_context("--kv-cache-scheme"));
    options.plan.kv_cache = *kv_cache;
  }
  options.plan.rules.others =
      flags.others == "keep" ? OtherMatrices::kKeep : OtherMatrices::kDecode;
  options.existing = flags.force ? ExistingOutput::kReplace : ExistingOutput::kRefuse;
  NIBBLE_ASSIGN_OR_RETURN(options.share, parse_share(flags));
  return {};
}

std::string more_text(const QuantizeProgress& progress) {
  std::string text = fmt::format("{}/{} tensors", progress.tensors_done, progress.tensors_total);
  if (!progress.worst_tensor.empty()) {
    text += fmt::format(", worst {:.1f} dB {}", progress.worst_snr_db, progress.worst_tensor);
  }
  return text;
}

Result<QuantizeReport> quantize_by(const QuantizeMethod& method, const QuantizeOptions& options) {
  auto report = quantize_checkpoint(options);
  if (report.ok()) {
    method.finish();
  } else {
    method.clear_if_refused(report.status());
  }
  return report;
}

Status run(Flags& flags) {
  NIBBLE_RETURN_IF_ERROR(fill_options(flags));
  QuantizeOptions& options = flags.options;
  NIBBLE_RETURN_IF_ERROR(check_model_tensors(options.source));
  if (flags.calibrate_kv) {
    NIBBLE_RETURN_IF_ERROR(check_kv_calibration(options.source));
  }
  if (!flags.budget.empty()) {
    NIBBLE_RETURN_IF_ERROR(choose_for_budget(flags));
    if (!flags.json) {
      print_out(flags.choice);
    }
  }
  if (flags.dry_run) {
    NIBBLE_ASSIGN_OR_RETURN(const Json plan, describe_plan(options));
    if (flags.json) {
      print_out(plan.dump() + "\n");
    } else {
      print_plan(plan);
    }
    return {};
  }
  const StopOnSignal stop;
  options.stop = &stop.flag();
  QuantizeMethod method;
  NIBBLE_RETURN_IF_ERROR(method.prepare(flags));
  ProgressDisplay display("quantized", ProgressDisplay::Unit::kBytes);
  options.progress = [&display](const QuantizeProgress& progress) {
    display.start_from(progress.bytes_before);
    display.update(progress.bytes_done, progress.bytes_total, progress.tensor, more_text(progress));
  };
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeReport report, quantize_by(method, options));
  if (options.share.kind == QuantizeShare::Kind::kPart && !report.already_there) {
    if (flags.json) {
      print_out(part_json(report, flags).dump() + "\n");
    } else {
      print_part(report, flags);
    }
    return {};
  }
  const Status runs = check_loadable(options.destination);
  if (flags.calibrate_kv && runs.ok()) {
    NIBBLE_RETURN_IF_ERROR(calibrate_kv_if_missing({.model = options.destination,
                                                    .text = flags.text,
                                                    .threads = options.threads,
                                                    .stop = &stop.flag()}));
  }
  if (flags.json) {
    print_out(report_json(report, flags, runs, method.seconds()).dump() + "\n");
    return {};
  }
  print_report(report, flags);
  if (const std::string text = advice(report, flags); !text.empty()) {
    print_out(text + "\n");
  }
  if (!runs.ok()) {
    print_out(fmt::format("{} is complete, but nibble does not run it: {}\n", options.destination,
                          runs.message()));
  }
  return {};
}

void add_selection_flags(CLI::App& command, Flags& flags) {
  RuleOptions& rules = flags.options.plan.rules;
  command.add_option("--scheme", flags.scheme, "One of " + scheme_list());
  command.add_option("--lm-head", flags.lm_head,
                     "Scheme of the output head, also where it is the embeddings' table, which "
                     "stays as it is; without this the head is not quantized");
  command
      .add_option("--scale-rule", flags.rule,
                  "How scales are chosen: best, absmax, absmax7.5, signed, lsq, lsq_signed, mse")
      ->capture_default_str();
  command.add_option("--format", flags.format,
                     "How it is stored: compressed-tensors, quark or fp8; the scheme decides if "
                     "this is not given");
  command.add_option("--kv-cache-scheme", flags.kv_cache,
                     "What config.json says about the KV cache: none or fp8; without this fp8 "
                     "where the source has scales for it (k_scale, v_scale)");
  command
      .add_option("--rule", rules.rules,
                  "PATTERN=SCHEME or PATTERN=keep for some modules: a full name, a pattern with *, "
                  "? and [a-c], or "
                  "\"re:PATTERN\"; the first that matches decides; may be repeated")
      ->allow_extra_args(false);
  command.add_option("--rules", rules.rules_file,
                     "File with more of them, one a line; # begins a comment");
  command
      .add_option("--others", flags.others,
                  "What becomes of quantized matrices that the model's rules leave out: keep or "
                  "bf16")
      ->check(CLI::IsMember({"keep", "bf16"}))
      ->capture_default_str();
  command
      .add_option("--ignore", rules.ignore,
                  "Module to leave as it is: a pattern like those of --rule; may be repeated")
      ->allow_extra_args(false);
  command
      .add_option("--include", rules.include,
                  "Module to quantize although it is an embedding, router or lm_head; may be "
                  "repeated")
      ->allow_extra_args(false);
}

void add_work_flags(CLI::App& command, Flags& flags) {
  QuantizeOptions& options = flags.options;
  command.add_option("--shard-size", options.plan.shard_bytes, "Largest weight file, like 5GB")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number(1))
      ->default_str("5GiB");
  command.add_option("--memory", options.memory, "Memory that is never exceeded, like 512MiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(whole_number(1))
      ->default_str("2GiB, or what a calibration needs");
  command.add_option("--threads", options.threads, "Worker threads; 0: all cores")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  CLI::Option* part = command.add_option("--part", flags.part,
                                         "I/N: make only the I-th of N shares of the weight files");
  command.add_flag("--finish", flags.finish, "Complete DST when all parts are done")
      ->excludes(part);
  command.add_option("--min-snr", options.min_snr_db,
                     "Fail, without DST, if a tensor's signal to noise is below this, in dB");
  command.add_flag("--dry-run", flags.dry_run, "Only print what would become of every tensor");
  command.add_flag("--force", flags.force, "Replace DST if it exists, and other unfinished work");
}

}  // namespace

void add_quantize_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "quantize", "Quantize a model folder into a new one that vLLM and transformers load too");
  command->add_option("SRC", flags->options.source, "Folder of the model, or GGUF file")
      ->required();
  command->add_option("DST", flags->options.destination, "Folder to create")->required();
  add_selection_flags(*command, *flags);
  add_calibration_flags(*command, *flags);
  add_budget_flags(*command, *flags);
  add_block_flags(*command, *flags);
  add_work_flags(*command, *flags);
  command->add_flag("--json", flags->json,
                    "Print one JSON object: scheme, tensors, bytes_in, bytes_out, seconds, "
                    "peak_rss_bytes, snr_db, ...");
  command->footer(
      "Embeddings, norms, routers and lm_head stay as they are unless --include or --lm-head name "
      "them. DST appears\nwhole or not at all; until then the work is in DST.partial, and the same "
      "command "
      "continues it after\na crash, a full disk or Ctrl-C.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

void add_import_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  flags->scheme = "bf16";
  CLI::App* command = app.add_subcommand(
      "import", "Make a Hugging Face folder of a GGUF file: weights in BF16, config and tokenizer");
  command->add_option("FILE", flags->options.source, "GGUF file; of a split set the first")
      ->required();
  command->add_option("DST", flags->options.destination, "Folder to create")->required();
  command
      ->add_option("--scheme", flags->scheme, "Another scheme than bf16: one of " + scheme_list())
      ->capture_default_str();
  add_work_flags(*command, *flags);
  command->add_flag("--json", flags->json, "Print one JSON object, as quantize does");
  command->footer(
      "The same as quantize FILE DST --scheme bf16. Every command that takes a model "
      "folder takes the GGUF file, too.\n\n" +
      app.get_footer());
  command->callback([flags, &context] {
    context.action = [flags]() -> Status {
      const std::string& source = flags->options.source;
      return gguf::is_gguf_path(source)
                 ? run(*flags)
                 : make_error(StatusCode::kInvalidArgument,
                              "{} is no GGUF file; a folder is taken as it is, or by quantize",
                              source);
    };
  });
}

}  // namespace nibble
