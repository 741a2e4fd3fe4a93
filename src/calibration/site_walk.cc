#include "calibration/site_walk.h"

namespace nibble {
namespace {

void walk_experts(LayerRunner& runner,
                  ForwardContext& context,
                  const SiteWatch& watch,
                  ExpertObserver* experts) {
  Moe& moe = runner.experts();
  context.observer = nullptr;
  moe.normalize(runner.hidden(), context);
  if (RowObserver* rows = watch(Site::kExpertUp)) {
    const int64_t hidden = runner.config().hidden_size;
    rows->observe(context.step, {.x = context.scratch[ScratchName::kNormed],
                                 .stride = hidden,
                                 .width = hidden,
                                 .input = {}});
  }
  if (experts != nullptr) {
    moe.routed().show_rows({.x = context.scratch[ScratchName::kNormed],
                            .chosen_by = context.scratch[ScratchName::kNormed],
                            .x_stride = runner.config().hidden_size,
                            .m = context.rows,
                            .part = ExpertPart::kDown},
                           *experts);
  }
  moe.add_experts(runner.hidden(), context);
  if (moe.has_shared()) {
    context.observer = watch(Site::kSharedUp);
    moe.project_shared(context);
    context.observer = watch(Site::kSharedDown);
    moe.add_shared(runner.hidden(), context);
  }
}

}  // namespace

void walk_sites(LayerRunner& runner,
                ForwardContext& context,
                const SiteWatch& watch,
                ExpertObserver* experts) {
  if (runner.has_latent_attention()) {
    context.observer = nullptr;
    runner.add_attention(context);
  } else {
    Attention& attention = runner.attention();
    context.observer = watch(Site::kQkv);
    attention.project(runner.hidden(), context);
    context.observer = nullptr;
    attention.attend(context);
    context.observer = watch(Site::kOutput);
    attention.add_output(runner.hidden(), context);
  }
  if (runner.has_experts()) {
    return walk_experts(runner, context, watch, experts);
  }
  context.observer = watch(Site::kUp);
  runner.mlp().project(runner.hidden(), context);
  context.observer = watch(Site::kDown);
  runner.mlp().add_output(runner.hidden(), context);
}

}  // namespace nibble
