#include "calibration/transform_chain.h"

#include <filesystem>
#include <memory>
#include <utility>

#include "base/cpu_topology.h"
#include "base/log.h"
#include "calibration/calibration_text.h"
#include "calibration/layer_jobs.h"
#include "calibration/order_finder.h"
#include "calibration/scale_finder.h"
#include "calibration/split_parts.h"
#include "calibration/transformed_model.h"
#include "quantizer/model_files.h"
#include "quantizer/plan_config.h"
#include "quantizer/work_folder.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

std::string folder_prefix(const std::string& destination) {
  const auto name = WorkFolder::destination_of(destination);
  return (name.ok() ? *name : destination) + ".transformed-";
}

class Chain final {
 public:
  explicit Chain(const ChainOptions& options)
      : options_(options),
        threads_(options.quantize.threads > 0 ? options.quantize.threads : usable_cores()) {}

  Result<std::string> run() {
    std::string model = options_.quantize.source;
    NIBBLE_RETURN_IF_ERROR(check_text(model));
    for (size_t i = 0; i < options_.transforms.size(); ++i) {
      std::string next = folder_prefix(options_.quantize.destination) + std::to_string(i + 1);
      NIBBLE_RETURN_IF_ERROR(
          apply(options_.transforms[i], model, next)
              .with_context(fmt::format("method {}", transform_name(options_.transforms[i]))));
      if (i > 0) {
        std::error_code ignored;
        fs::remove_all(model, ignored);  // the one before
      }
      model = std::move(next);
    }
    return model;
  }

 private:
  /// What calibration would refuse behind the transforms, before any of them is made.
  [[nodiscard]] Status check_text(const std::string& model) const {
    if (options_.text.path.empty()) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(model));
    NIBBLE_ASSIGN_OR_RETURN(const Json json, read_config(model));
    NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                            make_plan(reader, json, options_.quantize.plan));
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(model));
    NIBBLE_ASSIGN_OR_RETURN(const CalibrationText text,
                            read_model_text(model, config, options_.text));
    return check_tokens(text, options_.text.path, widest_input(plan, LayerJobs(plan, config)));
  }

  Status apply(Transform transform, const std::string& model, const std::string& next) {
    NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(model));
    NIBBLE_ASSIGN_OR_RETURN(const Json json, read_config(model));
    NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                            make_plan(reader, json, options_.quantize.plan));
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(model));
    if (transform == Transform::kTurn && !source_transforms(json).is_null()) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: its config.json has a transform_config already; leave "
                        "--online-rotation out",
                        model);
    }
    CalibrationText text;
    if (needs_text(transform)) {
      NIBBLE_ASSIGN_OR_RETURN(text, read_model_text(model, config, options_.text));
    }
    TransformedModel wanted{.source = model, .destination = next, .threads = threads_};
    wanted.stop = options_.quantize.stop;
    wanted.stamp = Json::object({{"source", plan.hash},
                                 {"transform", transform_name(transform)},
                                 {"seed", static_cast<int64_t>(options_.seed)},
                                 {"text_xxh3", text.digest},
                                 {"windows", std::ssize(text.windows)},
                                 {"tokens", text.tokens()}});
    if (acts_in_blocks()) {
      wanted.stamp.set("block", options_.blocks.block);
      wanted.stamp.set("outlier_share", options_.blocks.outlier_share);
    }
    if (has_stamp(next, wanted.stamp)) {
      NIBBLE_LOG(kInfo, "{}: is there from an earlier run", next);
      return {};
    }
    for (const PlanJob& job : plan.jobs) {
      if (job.matrix != nullptr && job.scheme.weight.quantized()) {
        wanted.precise.insert(job.name());
      }
    }
    NIBBLE_LOG(kInfo, "{}: {} into {}", model, transform_name(transform), next);
    NIBBLE_ASSIGN_OR_RETURN(const auto change,
                            make(transform, {model, reader, plan, config, text, next}));
    wanted.transform = change.get();
    return write_transformed_model(wanted);
  }

  struct Stage {
    const std::string& model;
    const CheckpointReader& reader;
    const QuantizePlan& plan;
    const ModelConfig& config;
    const CalibrationText& text;
    const std::string& next;
  };

  Result<std::unique_ptr<ModelTransform>> make(Transform transform, const Stage& stage) {
    if (transform == Transform::kRotate) {
      return make_rotation(stage.config, options_.seed);
    }
    if (transform == Transform::kTurn) {
      return make_turn(stage.config);
    }
    if (transform == Transform::kPermute) {
      NIBBLE_ASSIGN_OR_RETURN(ChannelOrders orders, find_orders({.model = stage.model,
                                                                 .windows = stage.text.windows,
                                                                 .parts = parts_of(stage.config),
                                                                 .beside = stage.next,
                                                                 .threads = threads_,
                                                                 .stop = options_.quantize.stop}));
      return make_permutation(stage.config, std::move(orders));
    }
    NIBBLE_ASSIGN_OR_RETURN(
        auto factors, find_factors({.model = stage.model,
                                    .reader = stage.reader,
                                    .plan = stage.plan,
                                    .windows = stage.text.windows,
                                    .rule = transform == Transform::kAwq ? FactorRule::kMean
                                                                         : FactorRule::kLargest,
                                    .outlier_share = options_.blocks.outlier_share,
                                    .block = options_.blocks.block,
                                    .beside = stage.next,
                                    .threads = threads_,
                                    .stop = options_.quantize.stop}));
    return make_scaling(stage.config, std::move(factors));
  }

  [[nodiscard]] bool acts_in_blocks() const {
    return in_blocks(options_.quantize.plan.rules.scheme.act);
  }

  /// That devices which share the model have of what attention's output and down multiply.
  [[nodiscard]] int64_t parts_of(const ModelConfig& config) const {
    return acts_in_blocks() ? split_parts(config, options_.blocks.block) : 1;
  }

  const ChainOptions& options_;
  int threads_;
};

}  // namespace

Result<std::string> make_transformed(const ChainOptions& options) { return Chain(options).run(); }

void remove_transformed(const std::string& destination) {
  const fs::path prefix = folder_prefix(destination);
  std::vector<fs::path> found;
  std::error_code error;
  const fs::path parent = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(prefix.filename().string())) {
      found.push_back(it->path());
    }
  }
  for (const fs::path& path : found) {
    fs::remove_all(path, error);
  }
}

}  // namespace nibble
