#include "quantize_budget.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "kept_choice.h"
#include "quantizer/algorithms/method.h"
#include "quantizer/digest.h"
#include "quantizer/journal.h"
#include "quantizer/model_files.h"
#include "quantizer/plan_hash.h"
#include "quantizer/work_folder.h"

namespace nibble {
namespace {

constexpr std::array<const char*, 8> kDecidedByBudget = {
    "--scheme", "--rule", "--rules", "--ignore", "--include", "--recipe", "--part", "--finish"};

std::string contradiction(const std::string& flag) {
  if (flag == "--scheme") {
    return "the budget chooses a scheme for each matrix; name those that it may take with "
           "--schemes, or leave --budget out";
  }
  if (flag == "--recipe") {
    return "the recipe says what was chosen; leave one of the two out";
  }
  if (flag == "--part" || flag == "--finish") {
    return "parts would each choose for themselves; choose with nibble sensitivity --write-rules "
           "and give all parts these --rules";
  }
  return "the budget decides for each matrix; leave one of the two out, or choose with nibble "
         "sensitivity --write-rules and edit these rules";
}

Result<Json> digest_of_file(const std::string& path) {
  if (path.empty()) {
    return Json();
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string content, read_file(path));
  return Json(digest_text(digest_of(content)));
}

Json json_or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

/// Whether a transform gives the model a head of its own, which is not counted in the source.
bool unties_head(const QuantizeFlags& flags) {
  const auto method = parse_method(flags.method);
  return method.ok() && std::ranges::count(method->transforms, Transform::kRotate) > 0;
}

/// The flags that decide the choice. A text is named by its hash.
Result<Json> asked_by(const QuantizeFlags& flags) {
  JsonArray schemes;
  for (const std::string& scheme : flags.judged.schemes) {
    schemes.emplace_back(scheme);
  }
  NIBBLE_ASSIGN_OR_RETURN(Json calibrate, digest_of_file(flags.text.path));
  NIBBLE_ASSIGN_OR_RETURN(Json text, digest_of_file(flags.judged.kld_text));
  Json asked = Json::object({{"budget", flags.budget},
                             {"schemes", std::move(schemes)},
                             {"format", json_or_null(flags.format)},
                             {"lm_head", json_or_null(flags.lm_head)},
                             {"others", flags.others},
                             {"measure", flags.judged.measure},
                             {"measure_tokens", flags.judged.measure_tokens},
                             {"text", std::move(text)},
                             {"calibrate", std::move(calibrate)}});
  if (!flags.text.path.empty()) {
    asked.set("calibration_windows", flags.text.windows);
    asked.set("calibration_length", flags.text.length);
    asked.set("seed", static_cast<int64_t>(flags.text.seed));
  }
  if (unties_head(flags)) {
    asked.set("method", "rotate");
  }
  return asked;
}

/// "--budget 4.5bpw there, 5bpw here": the first of the flags that differ.
std::string difference(const Json& there, const Json& here) {
  for (const auto& [name, value] : here.as_object()) {
    const Json* other = there.find(name);
    if (other == nullptr || other->dump() != value.dump()) {
      std::string flag = "--" + name;
      std::ranges::replace(flag, '_', '-');
      return fmt::format("{} {} there, {} here", flag, other == nullptr ? "null" : other->dump(),
                         value.dump());
    }
  }
  return "other flags there";
}

class BudgetRun final {
 public:
  explicit BudgetRun(QuantizeFlags& flags) : flags_(flags) {}

  Status run() {
    QuantizeOptions& options = flags_.options;
    NIBBLE_ASSIGN_OR_RETURN(destination_, WorkFolder::destination_of(options.destination));
    NIBBLE_ASSIGN_OR_RETURN(now_.asked, asked_by(flags_));
    NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(options.source));
    NIBBLE_ASSIGN_OR_RETURN(now_.source, source_hash(reader));
    NIBBLE_ASSIGN_OR_RETURN(const bool known, known_already());
    if (!known) {
      NIBBLE_RETURN_IF_ERROR(measure(reader));
    }
    flags_.scheme = now_.choice.main_scheme;
    NIBBLE_ASSIGN_OR_RETURN(options.plan.rules.scheme, find_scheme(flags_.scheme));
    flags_.format = dialect_name(now_.dialect);
    options.plan.dialect = now_.dialect;
    options.plan.rules.rules = now_.choice.rules;
    options.plan.budget = now_.recipe();
    flags_.choice = choice_text(now_.choice, flags_.budget);
    return {};
  }

 private:
  /// Takes what an earlier run chose by the same flags. Errors where one stands in the way.
  Result<bool> known_already() {
    const bool replace = flags_.options.existing == ExistingOutput::kReplace;
    if (file_exists(destination_)) {
      NIBBLE_ASSIGN_OR_RETURN(const auto made, read_recipe_choice(destination_));
      if (made && made->asked.dump() == now_.asked.dump()) {
        take(*made);
        return true;
      }
      if (!replace && !flags_.dry_run) {
        return make_error(StatusCode::kAlreadyExists,
                          "{}: exists already; choose another name or give --force to replace it",
                          destination_);
      }
    }
    auto kept = read_kept_choice(destination_);
    if (kept.ok() && *kept && (*kept)->source == now_.source &&
        (*kept)->asked.dump() == now_.asked.dump()) {
      NIBBLE_LOG(kInfo, "{}: goes on with what was chosen there",
                 WorkFolder::path_of(destination_));
      take(**kept);
      return true;
    }
    if (!replace && !flags_.dry_run) {
      NIBBLE_RETURN_IF_ERROR(kept.status());
      NIBBLE_RETURN_IF_ERROR(check_nothing_in_the_way(*kept));
    }
    return false;
  }

  void take(const KeptChoice& known) {
    now_.choice = known.choice;
    now_.dialect = known.dialect;
  }

  [[nodiscard]] Status check_nothing_in_the_way(const std::optional<KeptChoice>& kept) const {
    const std::string folder = WorkFolder::path_of(destination_);
    std::string why;
    if (kept) {
      why = kept->source == now_.source ? difference(kept->asked, now_.asked)
                                        : "of a source that changed since";
    } else {
      NIBBLE_ASSIGN_OR_RETURN(const JournalContent journal,
                              read_journal(fmt::format("{}/{}", folder, journal_name(1, 1))));
      if (journal.jobs.empty()) {
        return {};
      }
      why = "without --budget";
    }
    return make_error(StatusCode::kInvalidArgument,
                      "{}: holds unfinished work with other options: {}; give the same options to "
                      "continue it, or delete the folder, or give --force",
                      folder, why);
  }

  Status measure(const CheckpointReader& reader) {
    const QuantizeOptions& options = flags_.options;
    NIBBLE_ASSIGN_OR_RETURN(Budget budget, parse_budget(flags_.budget));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t head, bytes_of_new_head(reader));
    budget.bytes -= budget.bits > 0 ? 0 : head;
    SensitivityFlags& judged = flags_.judged;
    judged.model.model_dir = options.source;
    judged.model.threads = options.threads;
    judged.model.device = "cpu";  // where the rest is done, so that all machines choose alike
    judged.format = flags_.format;
    judged.text = flags_.text;
    NIBBLE_ASSIGN_OR_RETURN(const Sensitivity known, measure_sensitivity(judged));
    NIBBLE_ASSIGN_OR_RETURN(now_.choice, choose_schemes(known, budget, options.plan));
    now_.choice.bytes += head;
    now_.dialect = known.dialect;
    if (now_.choice.main_scheme.empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--budget {}: the model as it is fits; give less, or leave keep out of "
                        "--schemes",
                        flags_.budget);
    }
    return flags_.dry_run ? Status() : keep_choice(now_, destination_);
  }

  /// Bytes of the head that the output has and the source does not: of the embeddings' table once
  /// more, unless --lm-head gives it codes.
  [[nodiscard]] Result<int64_t> bytes_of_new_head(const CheckpointReader& reader) const {
    if (!unties_head(flags_) || !flags_.lm_head.empty()) {
      return 0;
    }
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(reader.path()));
    return config.tie_word_embeddings
               ? config.vocab_size * config.hidden_size * dtype_bits(config.dtype) / 8
               : 0;
  }

  QuantizeFlags& flags_;
  std::string destination_;
  KeptChoice now_;
};

}  // namespace

void add_budget_flags(CLI::App& command, QuantizeFlags& flags) {
  command.add_option("--budget", flags.budget,
                     "Instead of --scheme: choose a scheme for each matrix so that the predicted "
                     "loss is least, as nibble sensitivity does: bits per quantized weight, like "
                     "4.5bpw, or bytes of the weight files, like 6GiB");
  add_measure_flags(command, flags.judged);
}

Status check_budget_flags(const QuantizeFlags& flags) {
  if (flags.budget.empty()) {
    for (const std::string flag : {"--schemes", "--text", "--measure", "--measure-tokens"}) {
      const bool measured =
          flag_given(flags, "--max-kld") && (flag == "--text" || flag == "--measure-tokens");
      if (flag_given(flags, flag.c_str()) && !measured) {
        return make_error(StatusCode::kInvalidArgument, "{}: needs a --budget", flag);
      }
    }
    return {};
  }
  for (const char* flag : kDecidedByBudget) {
    if (flag_given(flags, flag)) {
      return make_error(StatusCode::kInvalidArgument, "{} and --budget: {}", flag,
                        contradiction(flag));
    }
  }
  NIBBLE_RETURN_IF_ERROR(parse_budget(flags.budget).status());
  if (flags.judged.schemes.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--budget: needs the schemes that it may take; give them with --schemes "
                      "A,B,...");
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto schemes, parse_scheme_choices(flags.judged.schemes));
  if (flags.text.path.empty()) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Method method, parse_method(flags.method));
  for (const SchemeChoice& choice : schemes) {
    if (choice.scheme) {
      NIBBLE_RETURN_IF_ERROR(
          check_rounding(method.rounding, *choice.scheme).with_context("--schemes"));
    }
  }
  return {};
}

Status choose_for_budget(QuantizeFlags& flags) { return BudgetRun(flags).run(); }

}  // namespace nibble
