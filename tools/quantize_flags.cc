#include "quantize_flags.h"

#include <string>
#include <utility>

#include "flag_checks.h"
#include "quantizer/recipe.h"

namespace nibble {
namespace {

bool given(const QuantizeFlags& flags, const char* flag) {
  const CLI::Option* option =
      flags.command == nullptr ? nullptr : flags.command->get_option_no_throw(flag);
  return option != nullptr && option->count() > 0;
}

/// What a recipe says of calibration, for flags that are not given.
Status take_calibration(const Json& calibration, QuantizeFlags& flags) {
  if (calibration.is_null()) {
    return {};
  }
  if (flags.text.path.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--recipe {}: was made with a text, which the recipe names by its hash only; "
                      "give the same file with --calibrate",
                      flags.recipe);
  }
  const JsonReader reader(calibration, flags.recipe);
  if (!given(flags, "--method")) {
    NIBBLE_ASSIGN_OR_RETURN(flags.method, reader.required_string("method"));
  }
  const std::pair<const char*, int64_t*> numbers[] = {
      {"--calibration-windows", &flags.text.windows}, {"--calibration-length", &flags.text.length}};
  for (const auto& [flag, number] : numbers) {
    if (!given(flags, flag)) {
      NIBBLE_ASSIGN_OR_RETURN(*number,
                              reader.required_int(flag == numbers[0].first ? "windows" : "length"));
    }
  }
  if (!given(flags, "--seed")) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t seed, reader.required_int("seed"));
    flags.text.seed = static_cast<uint64_t>(seed);
  }
  return {};
}

}  // namespace

Status take_recipe(QuantizeFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const PlanOptions recipe, read_recipe(flags.recipe));
  if (!given(flags, "--scheme")) {
    flags.scheme = recipe.rules.scheme.name;
  }
  if (!given(flags, "--scale-rule")) {
    flags.rule = scale_rule_name(recipe.scale_rule);
  }
  if (!given(flags, "--format") && recipe.dialect) {
    flags.format = dialect_name(*recipe.dialect);
  }
  if (!given(flags, "--lm-head") && recipe.rules.head) {
    flags.lm_head = recipe.rules.head->name;
  }
  if (!given(flags, "--others") && recipe.rules.others == OtherMatrices::kDecode) {
    flags.others = "bf16";
  }
  RuleOptions& rules = flags.options.plan.rules;
  for (const auto& [to, from] : {std::pair(&rules.rules, &recipe.rules.rules),
                                 std::pair(&rules.ignore, &recipe.rules.ignore),
                                 std::pair(&rules.include, &recipe.rules.include)}) {
    to->insert(to->end(), from->begin(), from->end());
  }
  return take_calibration(recipe.calibration, flags);
}

Status check_calibration(QuantizeFlags& flags) {
  if (flags.text.path.empty() && !flags.method.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--method {}: needs a text; give one with --calibrate FILE", flags.method);
  }
  if (flags.text.path.empty() && (given(flags, "--calibration-windows") ||
                                  given(flags, "--calibration-length") || given(flags, "--seed"))) {
    return make_error(StatusCode::kInvalidArgument,
                      "--calibration-windows, --calibration-length and --seed: need a text; give "
                      "one with --calibrate FILE");
  }
  if (!flags.text.path.empty() && flags.method.empty()) {
    flags.method = rounding_name(Rounding::kGptq);
  }
  if (!flags.text.path.empty() && !flags.options.plan.rules.rules_file.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--rules {}: with --calibrate the rules become part of the recipe; give them "
                      "by --rule",
                      flags.options.plan.rules.rules_file);
  }
  return {};
}

void add_calibration_flags(CLI::App& command, QuantizeFlags& flags) {
  command.add_option("--calibrate", flags.text.path,
                     "Text that the model reads while it is rounded, so that codes are chosen by "
                     "what they multiply: a text file, or JSON lines with a field \"text\"");
  command.add_option("--method", flags.method,
                     "How: gptq (the default with --calibrate), imatrix or rtn");
  command.add_option("--calibration-windows", flags.text.windows, "Windows of the text, at most")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_option("--calibration-length", flags.text.length, "Tokens of each window")
      ->check(whole_number(2))
      ->default_str("512, or the model's context");
  command.add_option("--seed", flags.text.seed, "Chooses among the text's windows")
      ->check(whole_number(0))
      ->capture_default_str();
  command.add_option("--recipe", flags.recipe,
                     "quantization_recipe.json of an output: its options hold where no flag says "
                     "otherwise");
  flags.command = &command;
}

}  // namespace nibble
