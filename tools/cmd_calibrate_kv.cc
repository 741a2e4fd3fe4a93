#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "command.h"
#include "flag_checks.h"
#include "kv_calibration.h"
#include "output.h"
#include "progress.h"
#include "stop_on_signal.h"
#include "text_flags.h"

namespace nibble {

void add_calibrate_kv_command(CLI::App& app, CommandContext& context);

namespace {

constexpr std::string_view kBest = "best";

struct Flags {
  KvCalibrationOptions options;
  std::string form{kBest};
  bool force = false;
  bool json = false;
};

std::vector<std::string> form_names() {
  std::vector<std::string> names{std::string(kBest)};
  for (const HeadForm form : kHeadForms) {
    names.emplace_back(head_form_name(form));
  }
  return names;
}

/// {"keys": {"plain": 0.03, ...}, ...} of the errors' means over layers, where they were measured.
Json errors_json(const KvSidecar& sidecar, KvSidecar::Half KvSidecar::Layer::*half) {
  Json json = Json(JsonObject());
  for (const HeadForm form : kHeadForms) {
    double sum = 0;
    for (const KvSidecar::Layer& layer : sidecar.layers) {
      sum += (layer.*half).errors.at(head_form_index(form));
    }
    if (sum > 0) {
      json.set(std::string(head_form_name(form)), sum / static_cast<double>(sidecar.layers.size()));
    }
  }
  return json;
}

void print_errors(const Json& errors, const char* what) {
  for (const auto& [form, error] : errors.as_object()) {
    print_out(fmt::format("  {:<8} {:<16} {:.5f}\n", what, form, error.as_double()));
  }
}

void print_report(const KvSidecar& sidecar, const Flags& flags) {
  const std::string path = kv_sidecar_path(flags.options.model);
  const Json keys = errors_json(sidecar, &KvSidecar::Layer::keys);
  const Json values = errors_json(sidecar, &KvSidecar::Layer::values);
  if (flags.json) {
    print_out(Json::object({{"file", path},
                            {"forms", describe(sidecar)},
                            {"tokens", sidecar.calibration.find("tokens")->as_int()},
                            {"errors", Json::object({{"keys", keys}, {"values", values}})}})
                  .dump() +
              "\n");
    return;
  }
  print_out(fmt::format("{}: {}\n", path, describe(sidecar)));
  if (flags.form == kBest) {
    print_out("squared error of attention over INT4 codes, mean over layers:\n");
    print_errors(keys, "keys");
    print_errors(values, "values");
  }
}

Result<KvSidecar> calibrate_with_progress(KvCalibrationOptions options) {
  ProgressDisplay display("calibrated", ProgressDisplay::Unit::kItems);
  options.progress = [&display](int64_t done, int64_t layers) {
    display.update(done, layers, fmt::format("layer {}", done - 1));
  };
  return calibrate_kv(options);
}

Status run(Flags& flags) {
  const std::string path = kv_sidecar_path(flags.options.model);
  if (file_exists(path) && !flags.force) {
    return make_error(StatusCode::kAlreadyExists, "{}: exists already; give --force to replace it",
                      path);
  }
  if (flags.form != kBest) {
    flags.options.form = find_head_form(flags.form);
  }
  const StopOnSignal stop;
  flags.options.stop = &stop.flag();
  NIBBLE_ASSIGN_OR_RETURN(const KvSidecar sidecar, calibrate_with_progress(flags.options));
  print_report(sidecar, flags);
  return {};
}

}  // namespace

Status calibrate_kv_if_missing(const KvCalibrationOptions& options) {
  const std::string path = kv_sidecar_path(options.model);
  if (file_exists(path)) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const KvSidecar sidecar, calibrate_with_progress(options));
  NIBBLE_LOG(kInfo, "{}: {}", path, describe(sidecar));
  return {};
}

void add_calibrate_kv_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "calibrate-kv", "Let a model read a text, so that its INT4 KV cache loses less");
  command->add_option("MODEL", flags->options.model, "Model folder, or GGUF file")->required();
  command
      ->add_option("--calibrate", flags->options.text.path,
                   "The text: a text file, or JSON lines with a field \"text\"")
      ->required();
  add_window_flags(*command, flags->options.text);
  command->add_option("--seed", flags->options.text.seed, "Chooses among the text's windows")
      ->check(whole_number(0))
      ->capture_default_str();
  command
      ->add_option("--form", flags->form,
                   "What is done to keys and values in front of INT4 codes: best chooses in each "
                   "layer by measured errors")
      ->check(CLI::IsMember(form_names()))
      ->capture_default_str();
  command->add_option("--threads", flags->options.threads, "Worker threads; 0: all cores")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command->add_flag("--force", flags->force, "Replace what an earlier run wrote");
  command->add_flag("--json", flags->json, "Print one JSON object: file, forms, tokens, errors");
  command->footer(
      "Writes nibble_kv.json into the folder (beside a GGUF file FILE.nibble_kv.json), which "
      "commands with\n--kv-cache-dtype int4 read: the mean of each channel of keys and values, and "
      "for every layer whether\nit is taken off, and heads are turned, before they are coded. The "
      "weights stay as they are.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
