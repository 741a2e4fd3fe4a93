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
       .run = [&](ForwardContext& context) { runner.add_attention(context); },
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

/// Of the parts of a layer, timed.
Status load_attention(const LayerParts& parts, int64_t layer) {
  return parts.times.time(CalibrationPart::kLoad,
                          [&] { return parts.runner.load_attention(layer); });
}

Status round_attention(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  if (runner.has_latent_attention()) {
    return {};  // stays as it is
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto qkv,
                          SiteInputs::create(parts, layer, Site::kQkv, Kept::kFloatInput));
  if (qkv->any()) {
    NIBBLE_RETURN_IF_ERROR(parts.windows.for_each({.reads = {Kept::kInput},
                                                   .run =
                                                       [&](ForwardContext& context) {
                                                         context.observer = qkv->observer();
                                                         runner.attention().project(runner.hidden(),
                                                                                    context);
                                                       },
                                                   .before = qkv->before()}));
    NIBBLE_RETURN_IF_ERROR(qkv->round());
    NIBBLE_RETURN_IF_ERROR(load_attention(parts, layer));
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto output,
                          SiteInputs::create(parts, layer, Site::kOutput, Kept::kFloatAttended));
  if (!output->any() && !parts.windows.keeps(Kept::kAttended)) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(
      parts.windows.for_each({.reads = {Kept::kInput},
                              .run =
                                  [&](ForwardContext& context) {
                                    runner.attention().project(runner.hidden(), context);
                                    runner.attention().attend(context);
                                    if (output->any()) {
                                      context.observer = output->observer();
                                      runner.attention().add_output(runner.hidden(), context);
                                    }
                                  },
                              .writes = {Kept::kAttended},
                              .before = output->before()}));
  if (output->any()) {
    NIBBLE_RETURN_IF_ERROR(output->round());
    NIBBLE_RETURN_IF_ERROR(load_attention(parts, layer));
  }
  return {};
}

Status round_dense(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  NIBBLE_ASSIGN_OR_RETURN(const auto up,
                          SiteInputs::create(parts, layer, Site::kUp, Kept::kFloatMiddle));
  NIBBLE_RETURN_IF_ERROR(parts.windows.for_each({.reads = before_attention_ends(parts),
                                                 .run =
                                                     [&](ForwardContext& context) {
                                                       finish_attention(parts, context);
                                                       if (up->any()) {
                                                         context.observer = up->observer();
                                                         runner.mlp().project(runner.hidden(),
                                                                              context);
                                                       }
                                                     },
                                                 .writes = {Kept::kOutput},
                                                 .before = up->before()}));
  if (up->any()) {
    NIBBLE_RETURN_IF_ERROR(up->round());
    NIBBLE_RETURN_IF_ERROR(load_mlp(parts, layer));
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto down,
                          SiteInputs::create(parts, layer, Site::kDown, Kept::kFloatUp));
  if (down->any() || parts.windows.keeps(Kept::kUp)) {
    NIBBLE_RETURN_IF_ERROR(
        parts.windows.for_each({.reads = {Kept::kOutput},
                                .run =
                                    [&](ForwardContext& context) {
                                      runner.mlp().project(runner.hidden(), context);
                                      if (down->any()) {
                                        context.observer = down->observer();
                                        runner.mlp().add_output(runner.hidden(), context);
                                      }
                                    },
                                .writes = {Kept::kUp},
                                .before = down->before()}));
  }
  if (down->any()) {
    NIBBLE_RETURN_IF_ERROR(down->round());
    NIBBLE_RETURN_IF_ERROR(load_mlp(parts, layer));
  }
  return parts.windows.for_each({.reads = {Kept::kOutput, Kept::kUp},
                                 .run =
                                     [&](ForwardContext& context) {
                                       if (!parts.windows.keeps(Kept::kUp)) {
                                         runner.mlp().project(runner.hidden(), context);
                                       }
                                       runner.mlp().add_output(runner.hidden(), context);
                                     },
                                 .writes = {Kept::kOutput}});
}

}  // namespace

Status load_mlp(const LayerParts& parts, int64_t layer) {
  return parts.times.time(CalibrationPart::kLoad, [&] { return parts.runner.load_mlp(layer); });
}

std::vector<Kept> before_attention_ends(const LayerParts& parts) {
  return parts.runner.has_latent_attention() ? std::vector{Kept::kInput}
                                             : std::vector{Kept::kInput, Kept::kAttended};
}

void finish_attention(const LayerParts& parts, ForwardContext& context) {
  LayerRunner& runner = parts.runner;
  if (runner.has_latent_attention()) {
    return runner.add_attention(context);
  }
  if (!parts.windows.keeps(Kept::kAttended)) {
    runner.attention().project(runner.hidden(), context);
    runner.attention().attend(context);
  }
  runner.attention().add_output(runner.hidden(), context);
}

Result<std::unique_ptr<SiteInputs>> SiteInputs::create(const LayerParts& parts,
                                                       int64_t layer,
                                                       Site site,
                                                       Kept wanted) {
  const std::vector<size_t>& jobs = parts.jobs.of(layer, site);
  std::unique_ptr<SiteInputs> inputs(new SiteInputs(parts, jobs, wanted));
  if (jobs.empty()) {
    return inputs;
  }
  const PlanJob& first = parts.context.plan.jobs[jobs.front()];
  const int64_t k = first.matrix->k();
  if (parts.device != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(inputs->site_, parts.device->math().make_site(k, first.scheme.act));
    if (parts.with_float() == FloatModel::kYes) {
      NIBBLE_RETURN_IF_ERROR(inputs->site_->expect_drift());
    }
    inputs->device_observer_.emplace(
        *inputs->site_, DeviceObserver::Parts{parts.runner.backend(), parts.device->math()});
  } else {
    const ActSpec* act = parts.acts.find({layer, site});
    inputs->sums_.emplace(
        k, RowForm(act != nullptr ? *act : ActSpec(first.scheme.act), first.scheme.weight),
        parts.with_float());
    inputs->observer_.emplace(*inputs->sums_, parts.pool, parts.times);
  }
  return inputs;
}

RowObserver* SiteInputs::observer() {
  if (device_observer_) {
    return &*device_observer_;
  }
  return observer_ ? &*observer_ : nullptr;
}

void SiteInputs::set_wanted(const void* rows) {
  if (device_observer_) {
    device_observer_->set_wanted(rows);
  } else {
    observer_->set_wanted(rows);
  }
}

std::function<Status(int64_t window)> SiteInputs::before() {
  if (!any() || parts_.with_float() == FloatModel::kNo) {
    return nullptr;
  }
  if (device_observer_) {
    return [this](int64_t window) {
      return device_observer_->read_wanted(parts_.windows, wanted_, window);
    };
  }
  return [this](int64_t window) { return observer_->read_wanted(parts_.windows, wanted_, window); };
}

Status SiteInputs::round() {
  if (site_ != nullptr) {
    return parts_.rounder.round(jobs_, *site_, parts_.rounding);
  }
  return parts_.rounder.round(jobs_, *sums_, parts_.rounding);
}

Status round_layer(const LayerParts& parts, int64_t layer) {
  LayerRunner& runner = parts.runner;
  NIBBLE_RETURN_IF_ERROR(load_attention(parts, layer));
  NIBBLE_RETURN_IF_ERROR(load_mlp(parts, layer));
  if (parts.with_float() == FloatModel::kYes) {
    NIBBLE_RETURN_IF_ERROR(run_float_model(parts));
  }
  NIBBLE_RETURN_IF_ERROR(round_attention(parts, layer));
  NIBBLE_RETURN_IF_ERROR(runner.has_experts() ? round_experts(parts, layer)
                                              : round_dense(parts, layer));
  runner.unload();
  NIBBLE_RETURN_IF_ERROR(parts.times.time(CalibrationPart::kStates,
                                          [&] { return parts.windows.finish_layer(layer); }));
  parts.times.finish_layer(layer);
  return {};
}

Status round_head(const LayerParts& parts) {
  LayerRunner& runner = parts.runner;
  NIBBLE_ASSIGN_OR_RETURN(const auto head, SiteInputs::create(parts, runner.config().num_layers,
                                                              Site::kHead, Kept::kFloatInput));
  if (!head->any()) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Norm norm, runner.final_norm());
  const int64_t hidden = runner.config().hidden_size;
  NIBBLE_RETURN_IF_ERROR(parts.windows.for_each(
      {.reads = {Kept::kInput},
       .run =
           [&](ForwardContext& context) {
             head->observer()->observe(
                 context.step,
                 {.x = runner.hidden(), .stride = hidden, .width = hidden, .input = norm.input()});
           },
       .before = head->before()}));
  return head->round();
}

}  // namespace nibble
