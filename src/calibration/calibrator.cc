#include "calibration/calibrator.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "arch/family.h"
#include "base/log.h"
#include "calibration/calibration_memory.h"
#include "calibration/layer_rounder.h"
#include "calibration/layer_runner.h"
#include "calibration/progress_file.h"
#include "calibration/windows.h"

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

  [[nodiscard]] int64_t least_memory(const QuantizePlan& plan, int threads) const override {
    return calibration_memory({.plan = plan,
                               .config = config_,
                               .rounding = options_.rounding,
                               .rows = std::ssize(text_.windows.front()),
                               .piece_weights = options_.piece_weights,
                               .threads = threads});
  }

  Status make(const JobMakerContext& context) override {
    NIBBLE_ASSIGN_OR_RETURN(
        const auto runner,
        LayerRunner::open(options_.model, std::ssize(text_.windows.front()), context.threads));
    const LayerJobs jobs(context.plan, runner->config());
    NIBBLE_RETURN_IF_ERROR(check_jobs(context.plan, jobs));
    if (jobs.all_done(context.store)) {
      remove_calibration_files(context.folder);
      return {};
    }
    ThreadPool pool(context.threads);
    JobRounder rounder({.context = context,
                        .runner = *runner,
                        .pool = pool,
                        .piece_weights = options_.piece_weights,
                        .method = options_.rounding});
    Windows windows(
        {.context = context,
         .tokens = text_.windows,
         .runner = *runner,
         .with_float = options_.rounding == Rounding::kGptaq ? FloatModel::kYes : FloatModel::kNo});
    const LayerParts parts{.context = context,
                           .jobs = jobs,
                           .rounding = options_.rounding,
                           .pool = pool,
                           .runner = *runner,
                           .windows = windows,
                           .rounder = rounder};
    NIBBLE_RETURN_IF_ERROR(windows.open_files());
    NIBBLE_ASSIGN_OR_RETURN(const int64_t first, windows.first_layer(jobs));
    for (int64_t layer = first; layer < config_.num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(round_layer(parts, layer));
    }
    NIBBLE_RETURN_IF_ERROR(round_head(parts));
    rounder.report();
    remove_calibration_files(context.folder);
    return {};
  }

 private:
  [[nodiscard]] Status check_jobs(const QuantizePlan& plan, const LayerJobs& jobs) const {
    int64_t widest = 0;
    for (const size_t job : jobs.all()) {
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
    }
    if (jobs.all().empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--calibrate: the rules leave no matrix of a layer and no head to round; "
                        "leave --calibrate out");
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
