#include "calibration/calibrator.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "arch/family.h"
#include "base/log.h"
#include "calibration/layer_rounder.h"
#include "calibration/layer_runner.h"
#include "calibration/progress_file.h"

namespace nibble {
namespace {

constexpr int64_t kLeastShare = 4;  // of the widest matrix's columns: fewer tokens say nothing

class Calibrator final : public JobMaker {
 public:
  Calibrator(CalibrationOptions options, const ModelConfig& config, CalibrationText text)
      : options_(std::move(options)), config_(config), text_(std::move(text)) {}

  [[nodiscard]] Json recipe() const override {
    return Json::object({{"method", method_name({options_.transforms, options_.rounding})},
                         {"text_xxh3", text_.digest},
                         {"windows", options_.text.windows},
                         {"length", std::ssize(text_.windows.front())},
                         {"seed", static_cast<int64_t>(options_.text.seed)},
                         {"tokens", text_.tokens()}});
  }

  Status make(const JobMakerContext& context) override {
    const LayerJobs jobs(context.plan, config_);
    NIBBLE_RETURN_IF_ERROR(check_jobs(context.plan, jobs));
    if (jobs.all_done(context.store)) {
      remove_calibration_files(context.folder);
      return {};
    }
    ThreadPool pool(context.threads);
    NIBBLE_ASSIGN_OR_RETURN(
        const auto runner,
        LayerRunner::open(options_.model, std::ssize(text_.windows.front()), context.threads));
    LayerRounder rounder({.context = context,
                          .jobs = jobs,
                          .windows = text_.windows,
                          .rounding = options_.rounding,
                          .pool = pool,
                          .runner = *runner});
    NIBBLE_RETURN_IF_ERROR(rounder.open_files());
    NIBBLE_ASSIGN_OR_RETURN(const int64_t first, rounder.first_layer());
    for (int64_t layer = first; layer < config_.num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(rounder.round_layer(layer));
    }
    rounder.report();
    remove_calibration_files(context.folder);
    return {};
  }

 private:
  [[nodiscard]] Status check_jobs(const QuantizePlan& plan, const LayerJobs& jobs) const {
    int64_t widest = 0;
    size_t found = 0;
    for (size_t job = 0; job < plan.jobs.size(); ++job) {
      if (jobs.contains(job)) {
        const PlanJob& matrix = plan.jobs[job];
        NIBBLE_RETURN_IF_ERROR(
            check_rounding(options_.rounding, matrix.scheme).with_context(matrix.name()));
        if (!matrix.encoder->takes_given_rows()) {
          return make_error(StatusCode::kUnsupported,
                            "--method {}: the scale rule of {} takes no values that are chosen "
                            "beforehand; leave --scale-rule out",
                            rounding_name(options_.rounding), matrix.name());
        }
        widest = std::max(widest, matrix.matrix->k());
        ++found;
      }
    }
    if (found == 0) {
      return make_error(StatusCode::kInvalidArgument,
                        "--calibrate: the rules leave no matrix of attention or a dense MLP to "
                        "round; leave --calibrate out");
    }
    const int64_t tokens = text_.tokens();
    if (tokens < widest / kLeastShare) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: {} tokens in windows of {} say too little about matrices of {} "
                        "columns; at least {} are needed, and {} are better",
                        options_.text.path, tokens, text_.windows.front().size(), widest,
                        widest / kLeastShare, kLeastShare * widest);
    }
    if (tokens < widest) {
      NIBBLE_LOG(kWarning,
                 "{}: {} tokens are fewer than the {} columns of the widest matrix; give {} or "
                 "more",
                 options_.text.path, tokens, widest, kLeastShare * widest);
    }
    return {};
  }

  CalibrationOptions options_;
  ModelConfig config_;
  CalibrationText text_;
};

}  // namespace

Result<std::unique_ptr<JobMaker>> make_calibrator(const CalibrationOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(options.model));
  NIBBLE_ASSIGN_OR_RETURN(CalibrationText text,
                          read_model_text(options.model, config, options.text));
  return std::unique_ptr<JobMaker>(std::make_unique<Calibrator>(options, config, std::move(text)));
}

}  // namespace nibble
