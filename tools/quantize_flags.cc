#include "quantize_flags.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "base/file.h"
#include "calibration/calibrator.h"
#include "calibration/transform_chain.h"
#include "flag_checks.h"
#include "model_flags.h"
#include "quantize_blocks.h"
#include "quantizer/recipe.h"
#include "quantizer/work_folder.h"
#include "text_flags.h"

namespace nibble {
namespace {

bool applies(const Method& method, Transform transform) {
  return std::ranges::find(method.transforms, transform) != method.transforms.end();
}

/// Whether --online-rotation and the method go together; names what it does in the method.
Status check_online_rotation(QuantizeFlags& flags) {
  Method method;
  if (!flags.method.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(method, parse_method(flags.method));
  }
  if (!flags.online_rotation) {
    return applies(method, Transform::kTurn)
               ? make_error(
                     StatusCode::kInvalidArgument,
                     "--method {}: turn is computed while the model runs, which few programs "
                     "do; allow it by --online-rotation",
                     flags.method)
               : Status();
  }
  const auto rotate = std::ranges::find(method.transforms, Transform::kRotate);
  if (rotate == method.transforms.end()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--online-rotation: goes with a method that rotates, like --method "
                      "rotate,gptq");
  }
  const std::string_view says = dialect_name(Dialect::kCompressedTensors);
  if (!flags.format.empty() && flags.format != says) {
    return make_error(StatusCode::kInvalidArgument,
                      "--format {}: cannot say that inputs are turned while the model runs, as "
                      "--online-rotation needs; choose --format {}",
                      flags.format, says);
  }
  if (!applies(method, Transform::kTurn)) {
    method.transforms.insert(rotate + 1, Transform::kTurn);
    flags.method = method_name(method);
  }
  return {};
}

/// What a recipe says of activations in blocks, for flags that are not given.
Status take_blocks(const Json& recipe, QuantizeFlags& flags) {
  const JsonReader reader(recipe, flags.recipe);
  BlockFlags& blocks = flags.blocks;
  if (!flag_given(flags, "--block")) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t block, reader.required_int("block"));
    blocks.block = static_cast<int>(block);
  }
  if (!flag_given(flags, "--permute")) {
    NIBBLE_ASSIGN_OR_RETURN(blocks.permute, reader.required_string("permute"));
  }
  if (!flag_given(flags, "--outlier-share") && !flag_given(flags, "--max-kld")) {
    const bool by_divergence = recipe.find("max_kld") != nullptr;
    const char* share = recipe.find("outlier_share") != nullptr ? "outlier_share" : "a8_share";
    NIBBLE_ASSIGN_OR_RETURN((by_divergence ? blocks.max_kld : blocks.outlier_share),
                            reader.required_double(by_divergence ? "max_kld" : share));
  }
  return {};
}

/// What a recipe says of calibration, for flags that are not given.
Status take_calibration(const Json& calibration, QuantizeFlags& flags) {
  if (calibration.is_null()) {
    return {};
  }
  const JsonReader reader(calibration, flags.recipe);
  if (!flag_given(flags, "--method")) {
    NIBBLE_ASSIGN_OR_RETURN(flags.method, reader.required_string("method"));
    const auto method = parse_method(flags.method);
    flags.online_rotation =
        flags.online_rotation || (method.ok() && applies(*method, Transform::kTurn));
  }
  if (!flag_given(flags, "--seed")) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t seed, reader.required_int("seed"));
    flags.text.seed = static_cast<uint64_t>(seed);
  }
  if (calibration.find("text_xxh3") == nullptr) {
    return {};
  }
  if (flags.text.path.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--recipe {}: was made with a text, which the recipe names by its hash only; "
                      "give the same file with --calibrate",
                      flags.recipe);
  }
  if (const Json* blocks = calibration.find("blocks"); blocks != nullptr) {
    NIBBLE_RETURN_IF_ERROR(take_blocks(*blocks, flags));
  }
  const std::pair<const char*, int64_t*> numbers[] = {
      {"--calibration-windows", &flags.text.windows}, {"--calibration-length", &flags.text.length}};
  for (const auto& [flag, number] : numbers) {
    if (!flag_given(flags, flag)) {
      NIBBLE_ASSIGN_OR_RETURN(*number,
                              reader.required_int(flag == numbers[0].first ? "windows" : "length"));
    }
  }
  return {};
}

/// The recipe of a method without a text.
Json recipe_without_text(const Method& method, uint64_t seed) {
  return Json::object({{"method", method_name(method)}, {"seed", static_cast<int64_t>(seed)}});
}

/// Without --force nothing is transformed for a destination that is taken.
Status check_destination(const QuantizeOptions& options) {
  const bool taken =
      options.existing == ExistingOutput::kRefuse && std::filesystem::exists(options.destination);
  return taken ? make_error(StatusCode::kAlreadyExists,
                            "{}: exists already; choose another name or give --force to replace it",
                            options.destination)
               : Status();
}

}  // namespace

bool flag_given(const QuantizeFlags& flags, const char* flag) {
  const CLI::Option* option =
      flags.command == nullptr ? nullptr : flags.command->get_option_no_throw(flag);
  return option != nullptr && option->count() > 0;
}

Status take_recipe(QuantizeFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const PlanOptions recipe, read_recipe(flags.recipe));
  if (!flag_given(flags, "--scheme")) {
    flags.scheme = recipe.rules.scheme.name;
  }
  if (!flag_given(flags, "--scale-rule")) {
    flags.rule = scale_rule_name(recipe.scale_rule);
  }
  if (!flag_given(flags, "--format") && recipe.dialect) {
    flags.format = dialect_name(*recipe.dialect);
  }
  if (!flag_given(flags, "--lm-head") && recipe.rules.head) {
    flags.lm_head = recipe.rules.head->name;
  }
  if (!flag_given(flags, "--others") && recipe.rules.others == OtherMatrices::kDecode) {
    flags.others = "bf16";
  }
  RuleOptions& rules = flags.options.plan.rules;
  for (const auto& [to, from] : {std::pair(&rules.rules, &recipe.rules.rules),
                                 std::pair(&rules.ignore, &recipe.rules.ignore),
                                 std::pair(&rules.include, &recipe.rules.include)}) {
    to->insert(to->end(), from->begin(), from->end());
  }
  bool as_chosen = true;  // nothing that a budget decided is said otherwise
  for (const char* flag : {"--scheme", "--format", "--lm-head", "--others", "--rule", "--rules",
                           "--ignore", "--include"}) {
    as_chosen = as_chosen && !flag_given(flags, flag);
  }
  if (as_chosen) {
    flags.options.plan.budget = recipe.budget;
  }
  return take_calibration(recipe.calibration, flags);
}

Status check_calibration(QuantizeFlags& flags) {
  bool random = false;
  if (!flags.method.empty()) {
    const auto method = parse_method(flags.method);
    NIBBLE_RETURN_IF_ERROR(method.status().with_context("--method"));
    random = !method->transforms.empty();
    if (flags.text.path.empty() && method->needs_text()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--method {}: needs a text; give one with --calibrate FILE", flags.method);
    }
  }
  if (flags.text.path.empty() &&
      (flag_given(flags, "--calibration-windows") || flag_given(flags, "--calibration-length") ||
       (flag_given(flags, "--seed") && !random))) {
    return make_error(StatusCode::kInvalidArgument,
                      "--calibration-windows, --calibration-length and --seed: need a text; give "
                      "one with --calibrate FILE");
  }
  if (flags.text.path.empty() && flags.calibrate_kv) {
    return make_error(
        StatusCode::kInvalidArgument,
        "--calibrate-kv: needs a text; give one with --calibrate FILE, or call nibble "
        "calibrate-kv afterwards");
  }
  if (flags.text.path.empty() && flags.backend.device != "cpu") {
    return make_error(
        StatusCode::kInvalidArgument,
        "--device {}: computes calibrations alone; give a text with --calibrate FILE, "
        "or leave it out",
        flags.backend.device);
  }
  if (flags.text.path.empty() && flags.strict) {
    return make_error(StatusCode::kInvalidArgument,
                      "--strict: says what becomes of matrices that a text says too little about; "
                      "give one with --calibrate FILE");
  }
  flags.options.fallbacks = flags.strict ? Fallbacks::kRefused : Fallbacks::kRecorded;
  if (!flags.text.path.empty() && flags.method.empty()) {
    flags.method = rounding_name(Rounding::kGptq);
  }
  if (!flags.method.empty() || flags.online_rotation) {
    NIBBLE_RETURN_IF_ERROR(check_online_rotation(flags));
  }
  return {};
}

Status QuantizeMethod::prepare(QuantizeFlags& flags) {
  Status status = prepare_parts(flags);
  clear_if_refused(status);
  return status;
}

Status QuantizeMethod::prepare_parts(QuantizeFlags& flags) {
  if (flags.method.empty()) {
    return {};
  }
  QuantizeOptions& options = flags.options;
  NIBBLE_ASSIGN_OR_RETURN(Method method, parse_method(flags.method));
  if (in_blocks(flags) && flags.blocks.permute == "fold" && !applies(method, Transform::kPermute)) {
    method.transforms.push_back(Transform::kPermute);
  }
  if (method.rounding != Rounding::kRtn || !flags.text.path.empty()) {
    NIBBLE_RETURN_IF_ERROR(check_rounding(method.rounding, options.plan.rules.scheme));
  }
  if (!method.transforms.empty()) {
    if (options.share.kind != QuantizeShare::Kind::kWhole) {
      return make_error(StatusCode::kInvalidArgument,
                        "--method {}: transforms the whole model first; leave --part and --finish "
                        "out",
                        flags.method);
    }
    NIBBLE_RETURN_IF_ERROR(check_destination(options));
    destination_ = options.destination;
    NIBBLE_ASSIGN_OR_RETURN(std::string model,
                            make_transformed({.quantize = options,
                                              .transforms = method.transforms,
                                              .text = flags.text,
                                              .seed = flags.text.seed,
                                              .blocks = expected_blocks(flags)}));
    options.source_name = std::exchange(options.source, std::move(model));
  }
  if (flags.text.path.empty()) {
    options.plan.calibration = recipe_without_text(method, flags.text.seed);
    return {};
  }
  SiteActs acts;
  if (in_blocks(flags)) {
    NIBBLE_ASSIGN_OR_RETURN(acts, choose_blocks(flags));
  }
  NIBBLE_ASSIGN_OR_RETURN(calibrator_, make_calibrator({.model = options.source,
                                                        .text = flags.text,
                                                        .rounding = method.rounding,
                                                        .transforms = method.transforms,
                                                        .acts = std::move(acts),
                                                        .parts = flags.blocks.parts,
                                                        .blocks = flags.blocks.chosen,
                                                        .backend = flags.backend}));
  options.maker = calibrator_.get();
  return {};
}

void QuantizeMethod::clear_if_refused(const Status& status) const {
  const bool refused =
      status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kUnsupported;
  if (refused && !destination_.empty() && !file_exists(WorkFolder::path_of(destination_))) {
    remove_transformed(destination_);
  }
}

void QuantizeMethod::finish() const {
  if (!destination_.empty()) {
    remove_transformed(destination_);
  }
}

void add_calibration_flags(CLI::App& command, QuantizeFlags& flags) {
  command.add_option("--calibrate", flags.text.path,
                     "Text that the model reads while it is rounded, so that codes are chosen by "
                     "what they multiply: a text file, or JSON lines with a field \"text\"");
  command.add_option("--method", flags.method,
                     "How: a chain like rotate,gptq. First what changes the weights but not the "
                     "model: rotate, which needs no text, smooth, awq, permute; then how they are "
                     "rounded: gptq (the default with --calibrate), gptaq, autoround, lwc, imatrix "
                     "or rtn");
  add_window_flags(command, flags.text);
  command
      .add_option("--seed", flags.text.seed,
                  "Chooses among the text's windows, and the signs of rotations")
      ->check(whole_number(0))
      ->capture_default_str();
  command.add_flag("--online-rotation", flags.online_rotation,
                   "With rotate in --method: inputs of the MLPs' down projections are turned by a "
                   "Hadamard matrix while the model runs, which config.json says in "
                   "transform_config");
  command.add_flag(
      "--calibrate-kv", flags.calibrate_kv,
      "With --calibrate: then lets DST read the same text, as nibble calibrate-kv does");
  add_device_flags(command, flags.backend.device, flags.backend.cuda_library);
  command.add_flag("--strict", flags.strict,
                   "With --calibrate: fail, without DST, if the method could not be applied to a "
                   "matrix (inputs that are no numbers, an expert with few rows), instead of "
                   "recording what was done");
  command.add_option("--recipe", flags.recipe,
                     "quantization_recipe.json of an output: its options hold where no flag says "
                     "otherwise");
  flags.command = &command;
}

}  // namespace nibble
