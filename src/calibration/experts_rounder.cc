#include "calibration/experts_rounder.h"

#include <algorithm>
#include <utility>

#include <fmt/ranges.h>

#include "arch/family.h"
#include "base/log.h"
#include "base/process.h"
#include "calibration/device_experts.h"
#include "calibration/expert_sums.h"
#include "calibration/float_inputs.h"

namespace nibble {
namespace {

/// Notes the rows that all experts are shown.
class Recorder final : public ExpertObserver {
 public:
  explicit Recorder(int64_t k) : k_(k) {}
  [[nodiscard]] bool wants(int32_t /*expert*/) const override { return true; }
  void observe(int32_t /*expert*/, std::span<const int64_t> of, const float* rows) override {
    seen.insert(seen.end(), rows, rows + std::ssize(of) * k_);
  }

  std::vector<float> seen;

 private:
  int64_t k_;
};

/// The experts of one layer.
class ExpertsRounder final {
 public:
  ExpertsRounder(const LayerParts& parts, int64_t layer)
      : parts_(parts), runner_(parts.runner), layer_(layer), float_(parts) {}

  Status round() {
    NIBBLE_RETURN_IF_ERROR(parts_.windows.for_each(
        {.reads = before_attention_ends(parts_),
         .run = [&](ForwardContext& context) { finish_attention(parts_, context); },
         .writes = {Kept::kOutput}}));
    if (with_float()) {
      NIBBLE_RETURN_IF_ERROR(float_.reserve());
    }
    if (with_float() && any(Site::kExpertDown)) {
      NIBBLE_RETURN_IF_ERROR(parts_.device == nullptr ? record_float_rows()
                                                      : record_float_rows_on_device(parts_));
    }
    NIBBLE_RETURN_IF_ERROR(round_shared_up());
    NIBBLE_RETURN_IF_ERROR(round_part(ExpertPart::kGateUp));
    NIBBLE_RETURN_IF_ERROR(load_mlp(parts_, layer_));
    NIBBLE_RETURN_IF_ERROR(round_shared_down());
    NIBBLE_RETURN_IF_ERROR(round_part(ExpertPart::kDown));
    NIBBLE_RETURN_IF_ERROR(load_mlp(parts_, layer_));
    return parts_.windows.for_each(
        {.reads = {Kept::kOutput},
         .run =
             [&](ForwardContext& context) { runner_.experts().forward(runner_.hidden(), context); },
         .writes = {Kept::kOutput}});
  }

 private:
  static Site site_of(ExpertPart part) {
    return part == ExpertPart::kGateUp ? Site::kExpertUp : Site::kExpertDown;
  }
  [[nodiscard]] bool any(Site site) const { return !parts_.jobs.of(layer_, site).empty(); }
  [[nodiscard]] bool with_float() const { return parts_.with_float() == FloatModel::kYes; }
  [[nodiscard]] int64_t experts() const { return runner_.config().moe.experts; }
  [[nodiscard]] int64_t hidden() const { return runner_.config().hidden_size; }

  // What down would multiply without rounding: by the experts that tokens choose here, while these
  // are as the source has them.
  Status record_float_rows() {
    Recorder recorder(runner_.config().moe.width);
    const auto show = [&](ForwardContext& context) {
      recorder.seen.clear();
      runner_.experts().routed().show_rows({.x = float_.normalize(context),
                                            .chosen_by = context.scratch[ScratchName::kNormed],
                                            .x_stride = hidden(),
                                            .m = context.rows,
                                            .part = ExpertPart::kDown},
                                           recorder);
    };
    return for_each({.run = show, .wanted = Kept::kFloatMiddle, .after = [&](int64_t window) {
                       return parts_.windows.write(Kept::kFloatExperts, window,
                                                   std::as_bytes(std::span(recorder.seen)));
                     }});
  }

  Status round_shared_up() {
    NIBBLE_ASSIGN_OR_RETURN(
        const auto up, SiteInputs::create(parts_, layer_, Site::kSharedUp, Kept::kFloatMiddle));
    if (!up->any()) {
      return {};
    }
    const auto show = [&](ForwardContext& context) {
      if (with_float()) {
        up->set_wanted(float_.normalize(context).data);
      }
      context.observer = up->observer();
      runner_.experts().project_shared(context);
    };
    NIBBLE_RETURN_IF_ERROR(for_each({.run = show, .wanted = Kept::kFloatMiddle}));
    return up->round();
  }

  Status round_shared_down() {
    NIBBLE_ASSIGN_OR_RETURN(const auto down,
                            SiteInputs::create(parts_, layer_, Site::kSharedDown, Kept::kFloatUp));
    if (!down->any()) {
      return {};
    }
    NIBBLE_RETURN_IF_ERROR(
        parts_.windows.for_each({.reads = {Kept::kOutput},
                                 .run =
                                     [&](ForwardContext& context) {
                                       runner_.experts().normalize(runner_.hidden(), context);
                                       runner_.experts().project_shared(context);
                                       context.observer = down->observer();
                                       runner_.experts().add_shared(runner_.hidden(), context);
                                     },
                                 .before = down->before()}));
    return down->round();
  }

  Status round_part(ExpertPart part) {
    const Site site = site_of(part);
    if (!any(site)) {
      return {};
    }
    if (parts_.device != nullptr) {
      return round_experts_on_device(parts_, layer_, part);
    }
    const PlanJob& first = parts_.context.plan.jobs[parts_.jobs.of(layer_, site).front()];
    const ExpertSums::Form form{first.matrix->k(), forms_of(first, site), parts_.with_float()};
    const std::vector<ExpertRange> ranges = cut(form, first.matrix->n());
    LayerSums all(form);
    few_.clear();
    for (size_t i = 0; ranges.size() > 1 && i < ranges.size(); ++i) {  // all, before the first
      ExpertSums sums(ranges[i], form, parts_.pool);
      NIBBLE_RETURN_IF_ERROR(collect(part, sums));
      all.add(sums, ranges[i]);
    }
    for (const ExpertRange& range : ranges) {
      ExpertSums sums(range, form, parts_.pool);
      NIBBLE_RETURN_IF_ERROR(collect(part, sums));
      if (ranges.size() == 1) {
        all.add(sums, range);
      }
      for (int64_t expert = range.begin; expert < range.end; ++expert) {
        NIBBLE_RETURN_IF_ERROR(round_expert({site, expert}, sums.of(expert), all));
      }
    }
    report_few(parts_, {layer_, part, form.k}, few_);
    return {};
  }

  /// How rows enter the product: alike for all experts, unless their blocks are their own.
  [[nodiscard]] std::vector<RowForm> forms_of(const PlanJob& first, Site site) const {
    std::vector<RowForm> forms;
    for (int64_t expert = 0; expert < experts(); ++expert) {
      const ActSpec* act = parts_.acts.find({layer_, site, expert});
      if (act == nullptr) {
        return {RowForm(first.scheme.act)};
      }
      forms.emplace_back(*act, first.scheme.weight);
    }
    return forms;
  }

  /// Sums over the rows of all experts of the layer.
  struct LayerSums {
    explicit LayerSums(const ExpertSums::Form& form) : sums(form.k, form.of(0), form.with_float) {}
    void add(ExpertSums& of, const ExpertRange& range) {
      for (int64_t expert = range.begin; expert < range.end; ++expert) {
        sums.add_sums(of.of(expert), 1);
        rows += of.of(expert).gram.rows();
      }
    }

    InputSums sums;
    int64_t rows = 0;
  };
  struct ExpertSite {
    Site site;
    int64_t expert;
  };

  Status round_expert(const ExpertSite& which, InputSums& sums, const LayerSums& all) {
    const std::vector<size_t>& jobs = parts_.jobs.of(layer_, which.site, which.expert);
    if (jobs.empty()) {
      return {};
    }
    const int64_t k = sums.gram.k();
    Rounding rounding = parts_.rounding;
    if (rounding != Rounding::kRtn && rounding != Rounding::kImatrix &&
        sums.gram.rows() < k / kFewestRowsShare) {
      rounding = Rounding::kImatrix;
      few_.push_back(which.expert);
    }
    sums.add_sums(all.sums, layer_share(k, all.rows));
    return parts_.rounder.round(jobs, sums, rounding);
  }

  /// Experts whose sums have room at the same time, beside what rounding a matrix takes.
  [[nodiscard]] std::vector<ExpertRange> cut(const ExpertSums::Form& form, int64_t n) const {
    const int64_t sums = InputSums::bytes(form.k, form.with_float);
    const int64_t rounding = 3 * sums + 16 * n * form.k;
    const int64_t room = parts_.context.memory - rss_bytes() - rounding;
    const int64_t count = std::clamp<int64_t>(room / ExpertSums::bytes_of_one(form), 1, experts());
    std::vector<ExpertRange> ranges;
    for (int64_t begin = 0; begin < experts(); begin += count) {
      ranges.push_back({begin, std::min(begin + count, experts())});
    }
    return ranges;
  }

  Status collect(ExpertPart part, ExpertSums& sums) {
    const bool down = part == ExpertPart::kDown;
    const auto show = [&](ForwardContext& context) {
      if (with_float() && down) {
        sums.set_wanted_in_order(float_.rows());
      } else if (with_float()) {
        wanted_.resize(static_cast<size_t>(context.rows * hidden()));
        context.step.input_rows(
            {.x = float_.normalize(context), .stride = hidden(), .width = hidden(), .input = {}},
            wanted_.data());
        sums.set_wanted_by_row(wanted_.data());
      }
      const ConstActivations x = context.scratch[ScratchName::kNormed];
      runner_.experts().routed().show_rows(
          {.x = x, .chosen_by = x, .x_stride = hidden(), .m = context.rows, .part = part}, sums);
    };
    NIBBLE_RETURN_IF_ERROR(
        for_each({.run = show, .wanted = down ? Kept::kFloatExperts : Kept::kFloatMiddle}));
    sums.finish();
    return {};
  }

  /// A pass that begins with the rows that experts read, in the scratch kNormed.
  struct NormedPass {
    std::function<void(ForwardContext& context)> run;
    Kept wanted;  // with the float model, in float_
    std::function<Status(int64_t window)> after = nullptr;
  };
  Status for_each(const NormedPass& normed) {
    Windows::Pass pass{.reads = {Kept::kOutput}, .run = [&](ForwardContext& context) {
                         runner_.experts().normalize(runner_.hidden(), context);
                         normed.run(context);
                       }};
    pass.after = normed.after;
    if (with_float()) {
      pass.before = [&](int64_t window) { return float_.read(normed.wanted, window); };
    }
    return parts_.windows.for_each(pass);
  }

  const LayerParts& parts_;
  LayerRunner& runner_;
  int64_t layer_;
  FloatInputs float_;
  std::vector<float> wanted_;
  std::vector<int64_t> few_;  // experts with too few rows for the method
};

}  // namespace

void report_few(const LayerParts& parts,
                const ExpertProduct& product,
                const std::vector<int64_t>& few) {
  if (!few.empty()) {
    NIBBLE_LOG(
        kInfo,
        "{}*: experts with fewer than {} rows, whose {} is rounded by imatrix: {} of {} ({})",
        layer_prefix(*parts.runner.config().family, product.layer), product.k / kFewestRowsShare,
        product.part == ExpertPart::kGateUp ? "gate and up" : "down", few.size(),
        parts.runner.config().moe.experts, fmt::join(few, ", "));
  }
}

Status round_experts(const LayerParts& parts, int64_t layer) {
  return ExpertsRounder(parts, layer).round();
}

}  // namespace nibble
