#include "sensitivity.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "arch/config.h"
#include "base/log.h"
#include "flag_checks.h"
#include "progress.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/budget/loss_model.h"
#include "quantizer/model_files.h"
#include "text_flags.h"
#include "variant_meter.h"

namespace nibble {
namespace {

class SensitivityRun final {
 public:
  explicit SensitivityRun(const SensitivityFlags& flags)
      : pool_(flags.model.threads), flags_(flags) {}

  Result<Sensitivity> run() {
    NIBBLE_RETURN_IF_ERROR(open());
    NIBBLE_RETURN_IF_ERROR(read_texts());
    NIBBLE_RETURN_IF_ERROR(judge_all());
    if (!windows_.empty()) {
      NIBBLE_RETURN_IF_ERROR(measure_worst());
    }
    weigh();
    return std::move(out_);
  }

 private:
  Status open() {
    const std::string& dir = flags_.model.model_dir;
    NIBBLE_ASSIGN_OR_RETURN(out_.schemes, parse_scheme_choices(flags_.schemes));
    std::optional<Dialect> asked;
    if (!flags_.format.empty()) {
      const auto dialect = parse_dialect(flags_.format);
      NIBBLE_RETURN_IF_ERROR(dialect.status().with_context("--format"));
      asked = *dialect;
    }
    NIBBLE_ASSIGN_OR_RETURN(out_.dialect, common_dialect(out_.schemes, asked));
    NIBBLE_ASSIGN_OR_RETURN(out_.config, read_config(dir));
    NIBBLE_ASSIGN_OR_RETURN(CheckpointReader reader, CheckpointReader::open(dir));
    out_.reader = std::make_unique<CheckpointReader>(std::move(reader));
    NIBBLE_ASSIGN_OR_RETURN(out_.source, list_source_matrices(*out_.reader, out_.config));
    NIBBLE_ASSIGN_OR_RETURN(std::vector<Candidate> candidates,
                            list_candidates(out_.source, out_.config, out_.schemes));
    for (Candidate& candidate : candidates) {
      NIBBLE_RETURN_IF_ERROR(add_item(std::move(candidate)));
    }
    return {};
  }

  Status add_item(Candidate candidate) {
    SensitivityItem item;
    Status last;
    for (const SchemeChoice& choice : out_.schemes) {
      const auto size = stored_size(candidate, choice, out_.dialect);
      item.sizes.push_back(size.ok() ? std::optional(*size) : std::nullopt);
      last = size.ok() ? last : size.status();
    }
    const bool any = std::ranges::any_of(item.sizes, [](const auto& s) { return s.has_value(); });
    item.candidate = std::move(candidate);
    out_.items.push_back(std::move(item));
    return any ? Status() : last;
  }

  Status read_texts() {
    if (flags_.text.path.empty() && flags_.kld_text.empty()) {
      return {};
    }
    const std::string& dir = flags_.model.model_dir;
    if (!flags_.text.path.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(dir));
      NIBBLE_ASSIGN_OR_RETURN(text_, read_model_text(dir, config, flags_.text));
    }
    if (!flags_.kld_text.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(dir));
      NIBBLE_ASSIGN_OR_RETURN(PlannedText planned,
                              plan_text({.file = flags_.kld_text}, dir, *tokenizer));
      windows_ = std::move(planned.text.windows);
    } else {
      for (const std::vector<int32_t>& window : text_.windows) {
        windows_.push_back({.tokens = window, .first_scored = 1});
      }
    }
    int64_t tokens = 0;
    size_t taken = 0;
    while (taken < windows_.size() && tokens < flags_.measure_tokens) {
      tokens += windows_[taken++].scored();
    }
    windows_.resize(taken);
    return {};
  }

  [[nodiscard]] JudgedMatrix judged(const SensitivityItem& item, const SourceMatrix* matrix) const {
    JudgedMatrix judged{.matrix = matrix, .schemes = {}};
    for (size_t i = 0; i < out_.schemes.size(); ++i) {
      const bool fits = item.sizes[i].has_value() && out_.schemes[i].scheme.has_value();
      judged.schemes.push_back(fits ? &*out_.schemes[i].scheme : nullptr);
    }
    return judged;
  }

  Status judge_all() {
    std::map<std::string, SchemeErrors> by_outputs;
    if (!text_.windows.empty()) {
      std::vector<JudgedMatrix> matrices;
      for (const SensitivityItem& item : out_.items) {
        for (const SourceMatrix* matrix : item.candidate.matrices) {
          matrices.push_back(judged(item, matrix));
        }
      }
      NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags_.model.model_dir));
      ProgressDisplay display("layers", ProgressDisplay::Unit::kItems);
      NIBBLE_ASSIGN_OR_RETURN(
          by_outputs, output_errors(matrices, {.model = flags_.model.model_dir,
                                               .windows = text_.windows,
                                               .how = judging(),
                                               .progress = [&](int64_t layers) {
                                                 display.update(layers, config.num_layers, "");
                                               }}));
    }
    for (SensitivityItem& item : out_.items) {
      item.by_outputs = std::ranges::all_of(
          item.candidate.matrices,
          [&](const SourceMatrix* matrix) { return by_outputs.contains(matrix->module()); });
      item.errors.assign(out_.schemes.size(), std::nullopt);
      for (const SourceMatrix* matrix : item.candidate.matrices) {
        SchemeErrors errors;
        if (item.by_outputs) {
          errors = by_outputs.at(matrix->module());
        } else {
          NIBBLE_ASSIGN_OR_RETURN(errors, weight_errors(judged(item, matrix), judging()));
        }
        add_share(errors, item);
      }
      for (size_t i = 0; i < out_.schemes.size(); ++i) {
        if (!out_.schemes[i].scheme) {
          item.errors[i] = 0;
        }
      }
    }
    std::ranges::stable_sort(out_.items, [](const SensitivityItem& a, const SensitivityItem& b) {
      return a.worst_error() > b.worst_error();
    });
    return {};
  }

  [[nodiscard]] Judging judging() {
    return {.reader = out_.reader.get(), .dialect = out_.dialect, .pool = pool_};
  }

  /// An item's errors are the means of its matrices: each is of one size.
  static void add_share(const SchemeErrors& errors, SensitivityItem& item) {
    const auto count = static_cast<double>(item.candidate.matrices.size());
    for (size_t i = 0; i < errors.size(); ++i) {
      if (errors[i]) {
        item.errors[i] = item.errors[i].value_or(0) + *errors[i] / count;
      }
    }
  }

  /// Of each kind the first and the last layer, which often weigh more than others, and three
  /// between them at equal distances, which stand for the rest.
  void choose_pillars() {
    std::map<std::string, std::set<int64_t>> layers;
    for (const SensitivityItem& item : out_.items) {
      layers[item.candidate.kind].insert(item.candidate.layer);
    }
    for (const auto& [kind, all] : layers) {
      const std::vector<int64_t> in_order(all.begin(), all.end());
      const size_t last = in_order.size() - 1;
      for (size_t quarter = 0; quarter <= 4; ++quarter) {
        const size_t at = quarter * last / 4;
        pillars_[{kind, in_order[at]}] = at > 0 && at < last;
      }
    }
  }

  [[nodiscard]] auto pillar(const SensitivityItem& item) const {
    return pillars_.find({item.candidate.kind, item.candidate.layer});
  }

  /// The worst of all, and the pillars.
  [[nodiscard]] std::vector<SensitivityItem*> to_measure() {
    const auto share =
        static_cast<size_t>(std::ceil(flags_.measure * static_cast<double>(out_.items.size())));
    choose_pillars();
    std::vector<SensitivityItem*> chosen;
    for (size_t i = 0; i < out_.items.size() && share > 0; ++i) {
      const bool wanted = i < share || pillar(out_.items[i]) != pillars_.end();
      if (wanted && out_.items[i].worst_error() > 0) {
        chosen.push_back(&out_.items[i]);
      }
    }
    return chosen;
  }

  Status measure_worst() {
    const std::vector<SensitivityItem*> chosen = to_measure();
    if (chosen.empty()) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const auto meter, VariantMeter::open(flags_.model, windows_, pool_));
    ProgressDisplay display("measured", ProgressDisplay::Unit::kItems);
    int64_t done = 0;
    for (SensitivityItem* item : chosen) {
      NIBBLE_ASSIGN_OR_RETURN(std::vector<ReplacedWeights> replaced, in_worst_scheme(*item));
      auto result = meter->measure(std::move(replaced));
      NIBBLE_RETURN_IF_ERROR(result.status().with_context(item->candidate.name));
      item->kld = result->kl;
      out_.measured_tokens = result->tokens;
      display.update(++done, std::ssize(chosen), item->candidate.name);
    }
    return {};
  }

  Result<std::vector<ReplacedWeights>> in_worst_scheme(const SensitivityItem& item) {
    const QuantScheme& scheme = *out_.schemes[item.worst()].scheme;
    std::vector<ReplacedWeights> replaced;
    for (const SourceMatrix* source : item.candidate.matrices) {
      NIBBLE_ASSIGN_OR_RETURN(const PlainMatrix matrix, read_matrix(*source, out_.reader.get()));
      NIBBLE_ASSIGN_OR_RETURN(QuantTensor codes,
                              nearest_codes(matrix, scheme, out_.dialect, pool_));
      replaced.push_back(
          {.module = source->module(), .weight = std::move(codes), .act = ActSpec(scheme.act)});
    }
    return replaced;
  }

  void weigh() {
    std::vector<KnownLoss> known;
    for (const SensitivityItem& item : out_.items) {
      known.push_back({.kind = item.candidate.kind,
                       .error = item.worst_error(),
                       .kld = item.kld ? std::optional(item.kld->mean) : std::nullopt,
                       .typical = pillar(item) != pillars_.end() && pillar(item)->second});
    }
    const std::vector<double> weights = loss_weights(known);
    for (size_t i = 0; i < weights.size(); ++i) {
      out_.items[i].weight = weights[i];
    }
  }

  ThreadPool pool_;  // first: its lines of cache leave no padding then
  const SensitivityFlags& flags_;
  Sensitivity out_;
  CalibrationText text_;
  std::vector<EvalWindow> windows_;
  std::map<std::pair<std::string, int64_t>, bool> pillars_;  // kind, layer: whether it is typical
};

}  // namespace

size_t SensitivityItem::worst() const {
  size_t worst = 0;
  for (size_t i = 1; i < errors.size(); ++i) {
    worst = errors[i].value_or(0) > errors[worst].value_or(0) ? i : worst;
  }
  return worst;
}

void add_measure_flags(CLI::App& command, SensitivityFlags& flags) {
  command
      .add_option("--schemes", flags.schemes,
                  "Schemes to compare, with commas between; keep leaves a matrix as it is")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--text", flags.kld_text,
                     "Text that KL divergences are measured over (default: that of --calibrate)");
  command
      .add_option("--measure", flags.measure,
                  "Share of the matrices, worst first, whose KL divergence is measured with each "
                  "alone in its worst scheme, and besides of five layers of each kind; 0: none")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command.add_option("--measure-tokens", flags.measure_tokens, "Tokens that this is measured over")
      ->check(whole_number(2))
      ->capture_default_str();
}

void add_sensitivity_flags(CLI::App& command, SensitivityFlags& flags) {
  add_measure_flags(command, flags);
  command.get_option("--schemes")->required();
  command.add_option("--format", flags.format,
                     "How they would be stored: compressed-tensors, quark or fp8 (default: as "
                     "the first scheme, or what all can be stored in)");
  command.add_option("--calibrate", flags.text.path,
                     "Text that the model reads, so that outputs are compared, not weights");
  add_window_flags(command, flags.text);
  command.add_option("--seed", flags.text.seed, "Chooses among the text's windows")
      ->check(whole_number(0))
      ->capture_default_str();
}

Result<Sensitivity> measure_sensitivity(const SensitivityFlags& flags) {
  return SensitivityRun(flags).run();
}

}  // namespace nibble
