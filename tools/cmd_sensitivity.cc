#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "base/json.h"
#include "budget_choice.h"
#include "command.h"
#include "output.h"
#include "sensitivity.h"

namespace nibble {

void add_sensitivity_command(CLI::App& app, CommandContext& context);

namespace {

constexpr size_t kListed = 40;

struct Flags {
  SensitivityFlags what;
  std::string budget;
  std::string rules;
  std::string json;
};

Json item_json(const SensitivityItem& item, const Sensitivity& all) {
  Json errors = Json::object({});
  Json bits = Json::object({});
  Json bytes = Json::object({});
  const auto weights = static_cast<double>(item.candidate.weights());
  for (size_t i = 0; i < all.schemes.size(); ++i) {
    if (item.sizes[i] && item.errors[i]) {
      errors.set(all.schemes[i].name, *item.errors[i]);
      bits.set(all.schemes[i].name, item.sizes[i]->bits / weights);
      bytes.set(all.schemes[i].name, item.sizes[i]->bytes);
    }
  }
  Json json = Json::object({{"name", item.candidate.name},
                            {"kind", item.candidate.kind},
                            {"tied", item.candidate.tied},
                            {"weights", item.candidate.weights()},
                            {"by", item.by_outputs ? "outputs" : "weights"},
                            {"errors", std::move(errors)},
                            {"bits_per_weight", std::move(bits)},
                            {"bytes", std::move(bytes)},
                            {"nats_per_error", item.weight}});
  if (item.kld) {
    json.set("kld", item.kld->mean);
    json.set("kld_error", item.kld->error);
    json.set("kld_scheme", all.schemes[item.worst()].name);
  }
  return json;
}

Json choice_json(const BudgetChoice& choice, const Sensitivity& all, const std::string& budget) {
  Json schemes = Json::object({});
  for (size_t i = 0; i < all.items.size(); ++i) {
    schemes.set(all.items[i].candidate.name, all.schemes[choice.chosen[i]].name);
  }
  return Json::object({{"budget", budget},
                       {"predicted", choice.loss},
                       {"bound", choice.bound},
                       {"bits_per_weight", choice.bits},
                       {"bytes", choice.bytes},
                       {"scheme", choice.main_scheme},
                       {"schemes", std::move(schemes)}});
}

std::string table_text(const Sensitivity& all) {
  std::string text = fmt::format("{:>9} {:>7}", "KLD", "");
  for (const SchemeChoice& choice : all.schemes) {
    text += fmt::format(" {:>15}", choice.name);
  }
  text += "  relative squared error of outputs (w: of weights)\n";
  const size_t listed = std::min(kListed, all.items.size());
  for (size_t row = 0; row < listed; ++row) {
    const SensitivityItem& item = all.items[row];
    text += item.kld
                ? fmt::format("{:9.6f} {:>7}", item.kld->mean,
                              fmt::format("+-{:.0f} %", 100 * item.kld->error / item.kld->mean))
                : std::string(17, ' ');
    for (size_t i = 0; i < all.schemes.size(); ++i) {
      text += item.errors[i] ? fmt::format(" {:15.7f}", *item.errors[i])
                             : fmt::format(" {:>15}", "does not fit");
    }
    text += fmt::format(" {} {}\n", item.by_outputs ? " " : "w", item.candidate.name);
  }
  if (listed < all.items.size()) {
    text += fmt::format("and {} better ones\n", all.items.size() - listed);
  }
  return text;
}

std::string rules_text(const BudgetChoice& choice, const Sensitivity& all, const Flags& flags) {
  std::string text = fmt::format(
      "# {:.3f} bits per weight, predicted KL divergence {:.6f}: for\n"
      "# nibble quantize {} DST --scheme {} --format {} --rules {}\n",
      choice.bits, choice.loss, flags.what.model.model_dir, choice.main_scheme,
      dialect_name(all.dialect), flags.rules);
  for (const std::string& rule : choice.rules) {
    text += rule + "\n";
  }
  return text;
}

Status run(const Flags& flags) {
  const auto start = std::chrono::steady_clock::now();
  if (flags.budget.empty() && !flags.rules.empty()) {
    return make_error(StatusCode::kInvalidArgument, "--write-rules: needs a --budget");
  }
  std::optional<Budget> budget;
  if (!flags.budget.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(budget, parse_budget(flags.budget));
  }
  NIBBLE_ASSIGN_OR_RETURN(const Sensitivity all, measure_sensitivity(flags.what));
  std::optional<BudgetChoice> choice;
  if (budget) {
    NIBBLE_ASSIGN_OR_RETURN(choice, choose_schemes(all, *budget));
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!flags.json.empty()) {
    JsonArray items;
    for (const SensitivityItem& item : all.items) {
      items.push_back(item_json(item, all));
    }
    Json json = Json::object({{"model", flags.what.model.model_dir},
                              {"format", dialect_name(all.dialect)},
                              {"measured_tokens", all.measured_tokens},
                              {"seconds", seconds},
                              {"matrices", std::move(items)}});
    if (choice) {
      json.set("choice", choice_json(*choice, all, flags.budget));
    }
    NIBBLE_RETURN_IF_ERROR(write_text_file(flags.json, json.dump_pretty() + "\n"));
  }
  print_out(table_text(all));
  if (choice) {
    print_out(choice_text(*choice, flags.budget));
    if (!flags.rules.empty()) {
      NIBBLE_RETURN_IF_ERROR(write_text_file(flags.rules, rules_text(*choice, all, flags)));
      print_out(fmt::format("nibble quantize {} DST --scheme {} --format {} --rules {}\n",
                            flags.what.model.model_dir, choice->main_scheme,
                            dialect_name(all.dialect), flags.rules));
    }
  }
  print_out(fmt::format("{:.1f} s\n", seconds));
  return {};
}

}  // namespace

void add_sensitivity_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "sensitivity", "What rounding costs each matrix of a model, and schemes for a budget");
  add_model_flags(*command, flags->what.model);
  add_sensitivity_flags(*command, flags->what);
  command->add_option("--budget", flags->budget,
                      "Choose a scheme for each matrix so that the predicted loss is least: bits "
                      "per quantized weight, like 4.5bpw, or bytes of the weight files, like 6GiB");
  command->add_option("--write-rules", flags->rules,
                      "Write the choice to this file, which nibble quantize reads by --rules");
  command->add_option("--json", flags->json, "Write all figures to this JSON file");
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
