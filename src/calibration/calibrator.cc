#include "calibration/calibrator.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "arch/family.h"
#include "base/log.h"
#include "calibration/block_files.h"
#include "calibration/calibration_memory.h"
#include "calibration/layer_jobs.h"
#include "calibration/layer_rounder.h"
#include "calibration/layer_runner.h"
#include "calibration/progress_file.h"
#include "calibration/windows.h"

namespace nibble {
namespace {

class Calibrator final : public JobMaker {
 public:
  Calibrator(CalibrationOptions options, const ModelConfig& config, CalibrationText text)
      : options_(std::move(options)), config_(config), text_(std::move(text)) {}

  [[nodiscard]] Json recipe() const override {
    Json recipe = Json::object({{"method", method_name({options_.transforms, options_.rounding})},
                                {"text_xxh3", text_.digest},
                                {"windows", options_.text.windows},
                                {"length", std::ssize(text_.windows.front())},
                                {"seed", static_cast<int64_t>(options_.text.seed)},
                                {"tokens", text_.tokens()}});
    if (!options_.blocks.is_null()) {
      recipe.set("blocks", options_.blocks);
    }
    const std::string& device = options_.backend.device;
    if (device != "cpu") {  // whose codes are others where two are nearly as good
      recipe.set("device", device.substr(0, device.find(':')));
    }
    return recipe;
  }

  [[nodiscard]] Json seconds() const override { return times_.json(); }
  [[nodiscard]] int64_t least_memory(const QuantizePlan& plan, int threads) const override {
    return calibration_memory({.plan = plan,
                               .config = config_,
                               .rounding = options_.rounding,
                               .rows = std::ssize(text_.windows.front()),
                               .piece_weights = options_.piece_weights,
                               .threads = threads});
  }

  Status complete(const QuantizePlan& plan, const std::string& folder) const override {
    return options_.acts.empty() ? Status()
                                 : write_block_files({.plan = plan,
                                                      .config = config_,
                                                      .acts = options_.acts,
                                                      .permuted = permuted(),
                                                      .parts = options_.parts,
                                                      .calibration = recipe()},
                                                     folder);
  }

  Status make(const JobMakerContext& context) override {
    BackendOptions backend = options_.backend;
    backend.cpu.threads = context.threads;
    NIBBLE_ASSIGN_OR_RETURN(
        const auto runner,
        LayerRunner::open(options_.model, std::ssize(text_.windows.front()), backend));
    const LayerJobs jobs(context.plan, runner->config());
    NIBBLE_RETURN_IF_ERROR(check_jobs(context.plan, jobs));
    if (jobs.all_done(context.store)) {
      remove_calibration_files(context.folder);
      return {};
    }
    std::unique_ptr<CalibrationMath> math;
    if (!runner->backend().host_memory()) {
      NIBBLE_ASSIGN_OR_RETURN(math, runner->backend().calibration_math());
    }
    NIBBLE_RETURN_IF_ERROR(round_layers({context, jobs, *runner, math.get()}));
    remove_calibration_files(context.folder);
    return {};
  }

 private:
  [[nodiscard]] bool permuted() const {
    return std::ranges::count(options_.transforms, Transform::kPermute) > 0;
  }

  struct Work {
    const JobMakerContext& context;
    const LayerJobs& jobs;
    LayerRunner& runner;
    CalibrationMath* math;  // null: on the host
  };

  Status round_layers(const Work& work) {
    ThreadPool pool(work.context.threads);
    std::optional<DeviceRounding> device;
    if (work.math != nullptr) {
      device.emplace(*work.math, pool, times_);
    }
    DeviceRounding* on_device = device ? &*device : nullptr;
    JobRounder rounder({.context = work.context,
                        .runner = work.runner,
                        .pool = pool,
                        .times = times_,
                        .piece_weights = options_.piece_weights,
                        .method = options_.rounding,
                        .device = on_device});
    Windows windows(
        {.context = work.context,
         .tokens = text_.windows,
         .runner = work.runner,
         .times = times_,
         .with_float = options_.rounding == Rounding::kGptaq ? FloatModel::kYes : FloatModel::kNo,
         .math = work.math});
    const LayerParts parts{.context = work.context,
                           .jobs = work.jobs,
                           .rounding = options_.rounding,
                           .pool = pool,
                           .runner = work.runner,
                           .windows = windows,
                           .rounder = rounder,
                           .times = times_,
                           .acts = options_.acts,
                           .device = on_device};
    NIBBLE_RETURN_IF_ERROR(windows.open_files());
    NIBBLE_ASSIGN_OR_RETURN(const int64_t first, windows.first_layer(work.jobs));
    for (int64_t layer = first; layer < config_.num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(round_layer(parts, layer));
    }
    NIBBLE_RETURN_IF_ERROR(round_head(parts));
    rounder.report();
    return {};
  }

  /// Nobody sees what latent attention multiplies: it stays as it is.
  [[nodiscard]] Status check_attention(const QuantizePlan& plan) const {
    for (const PlanJob& job : plan.jobs) {
      const bool quantized = job.matrix != nullptr && job.scheme.weight.quantized();
      const auto role = quantized && config_.latent.kv_rank > 0
                            ? role_of(*config_.family, job.name())
                            : std::nullopt;
      if (role && *role >= Role::kQuery && *role <= Role::kLatentUp) {
        return make_error(StatusCode::kUnsupported,
                          "{}: a calibration leaves latent attention as it is; take it out with "
                          "--rule {}=keep, or quantize without --calibrate",
                          job.name(), job.name());
      }
    }
    return {};
  }

  [[nodiscard]] Status check_jobs(const QuantizePlan& plan, const LayerJobs& jobs) const {
    NIBBLE_RETURN_IF_ERROR(check_attention(plan));
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
      if (in_blocks(matrix.scheme.act) && options_.blocks.is_null()) {
        return make_error(StatusCode::kUnsupported,
                          "{}: precisions of blocks are chosen for a whole model; give {} with "
                          "--scheme, and other schemes with --rule",
                          matrix.name(), matrix.scheme.name);
      }
    }
    if (jobs.all().empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--calibrate: the rules leave no matrix of a layer and no head to round; "
                        "leave --calibrate out");
    }
    const int64_t widest = widest_input(plan, jobs);
    NIBBLE_RETURN_IF_ERROR(check_tokens(text_, options_.text.path, widest));
    if (const int64_t tokens = text_.tokens(); tokens < widest) {
      NIBBLE_LOG(kWarning,
                 "{}: {} tokens are fewer than the {} columns of the widest matrix; give {} or "
                 "more",
                 options_.text.path, tokens, widest, tokens_wanted(widest));
    }
    return {};
  }

  CalibrationOptions options_;
  ModelConfig config_;
  CalibrationText text_;
  PartTimes times_;
};

/// Whether the device can be used, before anything is written.
Status check_device(const CalibrationOptions& options) {
  if (options.backend.device == "cpu") {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, open_backend(options.backend));
  if (backend->host_memory()) {
    return {};
  }
  const bool learned =
      options.rounding == Rounding::kAutoround || options.rounding == Rounding::kLwc;
  return learned ? make_error(StatusCode::kUnsupported,
                              "--method {}: is not computed on {}; take gptaq, gptq, imatrix or "
                              "rtn, or --device cpu",
                              rounding_name(options.rounding), backend->name())
                 : Status();
}

}  // namespace

Result<std::unique_ptr<JobMaker>> make_calibrator(const CalibrationOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(options.model));
  NIBBLE_RETURN_IF_ERROR(check_device(options));
  NIBBLE_ASSIGN_OR_RETURN(CalibrationText text,
                          read_model_text(options.model, config, options.text));
  return std::unique_ptr<JobMaker>(std::make_unique<Calibrator>(options, config, std::move(text)));
}

}  // namespace nibble
