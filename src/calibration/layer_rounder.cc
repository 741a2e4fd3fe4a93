#include "calibration/layer_rounder.h"

#include "calibration/experts_rounder.h"

namespace nibble {
namespace {

/// What the model without rounding makes of the text in this layer, which nothing was rounded in
/// yet.
Status run_float_model(const LayerParts& parts) {
  LayerRunner& runner = parts.runner;
  NIBBLE_RETURN_IF_ERROR(parts.windows.for_each(
      {.reads = {Kept::kFloatInput},
       .run =
           [&](ForwardContext& context) { runner.attention().forward(runner.hidden(), context); },
       .writes = {Kept::kFloatAttended, Kept::kFloatMiddle}}));
  return parts.windows.for_each({.reads = {Kept::kFloatMiddle},
                                 .run =
                                     [&](ForwardContext& context) {
                                       if (runner.has_experts()) {
                                         runner.experts().forward(runner.hidden(), context);
                                       } else {
                                         runner.mlp().forward(runner.hidden(), context);
                                       }
                                     },
                                 .writes = {Kept::kFloatUp, Kept::kFloatOutput}});
}

Status round_attention(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  if (SiteInputs qkv(parts, layer, Site::kQkv, Kept::kFloatInput); qkv.any()) {
    NIBBLE_RETURN_IF_ERROR(parts.windows.for_each({.reads = {Kept::kInput},
                                                   .run =
                                                       [&](ForwardContext& context) {
                                                         context.observer = qkv.observer();
                                                         runner.attention().project(runner.hidden(),
                                                                                    context);
                                                       },
                                                   .before = qkv.before()}));
    NIBBLE_RETURN_IF_ERROR(qkv.round());
    NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  }
  SiteInputs output(parts, layer, Site::kOutput, Kept::kFloatAttended);
  NIBBLE_RETURN_IF_ERROR(
      parts.windows.for_each({.reads = {Kept::kInput},
                              .run =
                                  [&](ForwardContext& context) {
                                    runner.attention().project(runner.hidden(), context);
                                    runner.attention().attend(context);
                                    if (output.any()) {
                                      context.observer = output.observer();
                                      runner.attention().add_output(runner.hidden(), context);
                                    }
                                  },
                              .writes = {Kept::kAttended},
                              .before = output.before()}));
  if (output.any()) {
    NIBBLE_RETURN_IF_ERROR(output.round());
    NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  }
  return {};
}

Status round_dense(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  SiteInputs up(parts, layer, Site::kUp, Kept::kFloatMiddle);
  NIBBLE_RETURN_IF_ERROR(
      parts.windows.for_each({.reads = {Kept::kInput, Kept::kAttended},
                              .run =
                                  [&](ForwardContext& context) {
                                    runner.attention().add_output(runner.hidden(), context);
                                    if (up.any()) {
                                      context.observer = up.observer();
                                      runner.mlp().project(runner.hidden(), context);
                                    }
                                  },
                              .writes = {Kept::kOutput},
                              .before = up.before()}));
  if (up.any()) {
    NIBBLE_RETURN_IF_ERROR(up.round());
    NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  }
  SiteInputs down(parts, layer, Site::kDown, Kept::kFloatUp);
  NIBBLE_RETURN_IF_ERROR(
      parts.windows.for_each({.reads = {Kept::kOutput},
                              .run =
                                  [&](ForwardContext& context) {
                                    runner.mlp().project(runner.hidden(), context);
                                    if (down.any()) {
                                      context.observer = down.observer();
                                      runner.mlp().add_output(runner.hidden(), context);
                                    }
                                  },
                              .writes = {Kept::kUp},
                              .before = down.before()}));
  if (down.any()) {
    NIBBLE_RETURN_IF_ERROR(down.round());
    NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  }
  return parts.windows.for_each(
      {.reads = {Kept::kOutput, Kept::kUp},
       .run = [&](ForwardContext& context) { runner.mlp().add_output(runner.hidden(), context); },
       .writes = {Kept::kOutput}});
}

}  // namespace

SiteInputs::SiteInputs(const LayerParts& parts, int64_t layer, Site site, Kept wanted)
    : parts_(parts), jobs_(parts.jobs.of(layer, site)), wanted_(wanted) {
  if (!jobs_.empty()) {
    const PlanJob& first = parts.context.plan.jobs[jobs_.front()];
    sums_.emplace(first.matrix->k(), first.scheme.act, parts.with_float());
    observer_.emplace(*sums_, parts.pool);
  }
}

std::function<Status(int64_t window)> SiteInputs::before() {
  if (!sums_ || !sums_->drift) {
    return nullptr;
  }
  return [this](int64_t window) { return observer_->read_wanted(parts_.windows, wanted_, window); };
}

Status round_layer(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  if (parts.with_float() == FloatModel::kYes) {
    NIBBLE_RETURN_IF_ERROR(run_float_model(parts));
  }
  NIBBLE_RETURN_IF_ERROR(round_attention(parts, layer));
  NIBBLE_RETURN_IF_ERROR(runner.has_experts() ? round_experts(parts, layer)
                                              : round_dense(parts, layer));
  runner.unload();
  return parts.windows.finish_layer(layer);
}

Status round_head(const LayerParts& parts) {
  LayerRunner& runner = parts.runner;
  SiteInputs head(parts, runner.config().num_layers, Site::kHead, Kept::kFloatInput);
  if (!head.any()) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Norm norm, runner.final_norm());
  const int64_t hidden = runner.config().hidden_size;
  NIBBLE_RETURN_IF_ERROR(parts.windows.for_each(
      {.reads = {Kept::kInput},
       .run =
           [&](ForwardContext& context) {
             head.observer()->observe(
                 context.step,
                 {.x = runner.hidden(), .stride = hidden, .width = hidden, .input = norm.input()});
           },
       .before = head.before()}));
  return head.round();
}

}  // namespace nibble
