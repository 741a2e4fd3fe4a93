#include "calibration/device_experts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "backend/expert_drifts.h"
#include "base/check.h"
#include "calibration/expert_sums.h"
#include "calibration/experts_rounder.h"
#include "calibration/float_inputs.h"
#include "quantizer/algorithms/factor.h"

namespace nibble {
namespace {

/// Of the device's memory: what rounding, copies and the library of products take beside sums.
constexpr int64_t kRoundingRoom = int64_t{2} << 30;
/// Of it, what factors take that are made at the same time.
constexpr int64_t kFactorRoom = int64_t{512} << 20;

bool by_columns(Rounding rounding) {
  return rounding == Rounding::kGptq || rounding == Rounding::kGptaq;
}

/// Of the layer that is loaded.
ExpertDrifts& drifts_of(LayerRunner& runner) {
  auto* drifts = dynamic_cast<ExpertDrifts*>(&runner.experts().routed());
  CHECK_MSG(drifts != nullptr, "this device computes no drifts of experts' rows");
  return *drifts;
}

class DeviceExperts final {
 public:
  DeviceExperts(const LayerParts& parts, int64_t layer, ExpertPart part)
      : parts_(parts), layer_(layer), part_(part), float_(parts) {
    const PlanJob& first = parts.context.plan.jobs[parts.jobs.of(layer, site()).front()];
    k_ = first.matrix->k();
    act_ = first.scheme.act;
  }

  Status round() {
    const std::vector<ExpertRange> ranges = cut();
    if (with_drift()) {
      NIBBLE_RETURN_IF_ERROR(float_.reserve());
    }
    NIBBLE_ASSIGN_OR_RETURN(all_, make_site());
    for (size_t i = 0; ranges.size() > 1 && i < ranges.size(); ++i) {  // all, before the first
      NIBBLE_RETURN_IF_ERROR(collect(ranges[i]));
      add_to_layer(ranges[i]);
    }
    for (const ExpertRange& range : ranges) {
      NIBBLE_RETURN_IF_ERROR(collect(range));
      if (ranges.size() == 1) {
        add_to_layer(range);
      }
      all_->finish();
      for (int64_t begin = range.begin; begin < range.end; begin += at_once()) {
        const ExpertRange some{begin, std::min(begin + at_once(), range.end)};
        NIBBLE_RETURN_IF_ERROR(factor(some));
        for (int64_t expert = some.begin; expert < some.end; ++expert) {
          parts_.rounder.expect(job_behind({expert, range.end}));
          NIBBLE_RETURN_IF_ERROR(round_expert(expert));
        }
      }
    }
    report_few(parts_, {layer_, part_, k_}, few_);
    return {};
  }

 private:
  [[nodiscard]] Site site() const { return gate_up() ? Site::kExpertUp : Site::kExpertDown; }
  [[nodiscard]] CalibrationMath& math() const { return parts_.device->math(); }
  [[nodiscard]] bool with_drift() const { return parts_.with_float() == FloatModel::kYes; }
  [[nodiscard]] Result<std::unique_ptr<SiteMath>> make_site() const {
    NIBBLE_ASSIGN_OR_RETURN(auto site, math().make_site(k_, act_));
    if (with_drift()) {
      NIBBLE_RETURN_IF_ERROR(site->expect_drift());
    }
    return site;
  }
  [[nodiscard]] int64_t experts() const { return parts_.runner.config().moe.experts; }
  [[nodiscard]] std::unique_ptr<SiteMath>& sums_of(int64_t expert) {
    return sums_[static_cast<size_t>(expert)];
  }

  /// Experts whose factors are made at the same time.
  [[nodiscard]] int64_t at_once() const {
    return std::clamp<int64_t>(kFactorRoom / CalibrationMath::site_bytes(k_), 1, experts());
  }
  /// Experts whose sums have room on the device at the same time.
  [[nodiscard]] std::vector<ExpertRange> cut() const {
    const int64_t room = parts_.runner.backend().free_memory() - kRoundingRoom;
    const int64_t bytes = CalibrationMath::site_bytes(k_) * (with_drift() ? 2 : 1);
    const int64_t count = std::clamp<int64_t>(room / bytes - 2, 1, experts());
    std::vector<ExpertRange> ranges;
    for (int64_t begin = 0; begin < experts(); begin += count) {
      ranges.push_back({begin, std::min(begin + count, experts())});
    }
    return ranges;
  }

  Status collect(const ExpertRange& range) {
    sums_.clear();
    sums_.resize(static_cast<size_t>(experts()));
    std::vector<SiteMath*> places(sums_.size());
    for (int64_t expert = range.begin; expert < range.end; ++expert) {
      NIBBLE_ASSIGN_OR_RETURN(sums_of(expert), make_site());
      places[static_cast<size_t>(expert)] = sums_of(expert).get();
    }
    LayerRunner& runner = parts_.runner;
    const int64_t hidden = runner.config().hidden_size;
    Windows::Pass pass{
        .reads = {Kept::kOutput}, .run = [&](ForwardContext& context) {
          runner.experts().normalize(runner.hidden(), context);
          const ConstActivations x = context.scratch[ScratchName::kNormed];
          const ExpertView view{
              .x = x, .chosen_by = x, .x_stride = hidden, .m = context.rows, .part = part_};
          if (with_drift()) {
            drifts_of(runner).add_rows_and_drifts(view, places, wanted(context));
          } else {
            runner.experts().routed().add_rows(view, places);
          }
        }};
    if (with_drift()) {
      pass.before = [&](int64_t window) {
        return float_.read(gate_up() ? Kept::kFloatMiddle : Kept::kFloatExperts, window);
      };
    }
    return parts_.windows.for_each(pass);
  }

  [[nodiscard]] bool gate_up() const { return part_ == ExpertPart::kGateUp; }
  /// What the window's rows would be, as ExpertDrifts takes them.
  const void* wanted(const ForwardContext& context) {
    return gate_up() ? float_.normalize(context).data : float_.rows();
  }

  void add_to_layer(const ExpertRange& range) {
    for (int64_t expert = range.begin; expert < range.end; ++expert) {
      all_->add_sums(*sums_of(expert), 1);
      all_rows_ += sums_of(expert)->rows();
    }
  }

  /// The first job of the experts behind the first of a range.
  [[nodiscard]] std::optional<size_t> job_behind(const ExpertRange& range) const {
    for (int64_t expert = range.begin + 1; expert < range.end; ++expert) {
      const std::vector<size_t>& jobs = parts_.jobs.of(layer_, site(), expert);
      if (!jobs.empty()) {
        return jobs.front();
      }
    }
    return std::nullopt;
  }

  Status round_expert(int64_t expert) {
    const std::vector<size_t>& jobs = parts_.jobs.of(layer_, site(), expert);
    std::unique_ptr<SiteMath> sums = std::move(sums_of(expert));
    if (jobs.empty()) {
      return {};
    }
    Rounding rounding = parts_.rounding;
    if (has_few(*sums)) {
      rounding = Rounding::kImatrix;
      few_.push_back(expert);
    }
    return parts_.rounder.round(jobs, *sums, rounding);
  }

  /// Whether an expert's rows say too little for the method.
  [[nodiscard]] bool has_few(const SiteMath& sums) const {
    return by_columns(parts_.rounding) && sums.rows() < k_ / kFewestRowsShare;
  }

  /// Completes the sums of some experts by those of the layer, and factors them at once: what
  /// DeviceRounder asks for first.
  Status factor(const ExpertRange& range) {
    std::vector<CalibrationMath::SiteToFactor> sites;
    for (int64_t expert = range.begin; expert < range.end; ++expert) {
      if (parts_.jobs.of(layer_, site(), expert).empty()) {
        continue;
      }
      SiteMath& sums = *sums_of(expert);
      sums.add_sums(*all_, layer_share(k_, all_rows_));
      if (!by_columns(parts_.rounding) || has_few(sums)) {
        continue;
      }
      const std::vector<float> diagonal = sums.finish();
      if (std::ranges::all_of(diagonal, [](float sum) { return std::isfinite(sum); })) {
        const Damping damping = damping_steps(diagonal).front();
        sites.push_back({&sums, column_order(diagonal), {damping.added, damping.floor}});
      }
    }
    // Algorithms depend on how many there are, and this may not depend on free memory.
    while (!sites.empty() && std::ssize(sites) < at_once()) {
      sites.push_back(sites.back());
    }
    return math().factor_ahead(sites);
  }

  const LayerParts& parts_;
  int64_t layer_;
  ExpertPart part_;
  int64_t k_ = 0;
  ActFormat act_ = ActFormat::kFloat;
  FloatInputs float_;
  std::unique_ptr<SiteMath> all_;  // of the rows of all experts
  int64_t all_rows_ = 0;
  std::vector<std::unique_ptr<SiteMath>> sums_;  // by expert; null: not of this pass
  std::vector<int64_t> few_;                     // experts with too few rows for the method
};

}  // namespace

Status round_experts_on_device(const LayerParts& parts, int64_t layer, ExpertPart part) {
  CHECK(parts.device != nullptr);
  return DeviceExperts(parts, layer, part).round();
}

Status record_float_rows_on_device(const LayerParts& parts) {
  LayerRunner& runner = parts.runner;
  FloatInputs inputs(parts);
  NIBBLE_RETURN_IF_ERROR(inputs.reserve());
  std::vector<std::byte> staged(static_cast<size_t>(parts.windows.bytes(Kept::kFloatExperts)));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer kept, runner.backend().allocate(staged.size()));
  return parts.windows.for_each(
      {.reads = {Kept::kOutput},
       .run =
           [&](ForwardContext& context) {
             runner.experts().normalize(runner.hidden(), context);
             drifts_of(runner).keep_down_rows({.x = inputs.normalize(context),
                                               .chosen_by = context.scratch[ScratchName::kNormed],
                                               .x_stride = runner.config().hidden_size,
                                               .m = context.rows,
                                               .part = ExpertPart::kDown},
                                              kept.as<void>());
           },
       .before = [&](int64_t window) { return inputs.read(Kept::kFloatMiddle, window); },
       .after =
           [&](int64_t window) {
             parts.device->math().download(staged, kept.as<void>());
             return parts.windows.write(Kept::kFloatExperts, window, staged);
           }});
}

}  // namespace nibble
