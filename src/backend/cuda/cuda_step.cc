#include "backend/cuda/cuda_step.h"

#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "base/check.h"

namespace nibble::cuda {

CudaStep::CudaStep(const StepPlan& plan, const StepShape& shape, CudaSteps& steps)
    : Step(plan.input, shape.rows, shape.logit_rows),
      steps_(steps),
      shape_(shape),
      to_sample_(!plan.sampling.rows.empty()) {}

void CudaStep::rope_append_kv(const RopeAppendArgs& args) {
  CHECK(!append_.has_value());
  CHECK(kv_format(args.kv.code).turned || args.kv.basis == KvBasis{});
  RopeAppendLaunch launch{.shape = {.kv = layout_of(args.kv),
                                    .heads = static_cast<int32_t>(args.heads),
                                    .k_scale = args.kv.scales.k,
                                    .v_scale = args.kv.scales.v,
                                    .form = args.form},
                          .step = steps_.buffers_.metadata(args.kv.pool),
                          .pages = args.kv.pages,
                          .residual = residual_of(args.kv),
                          .qkv = args.qkv.data,
                          .qkv_stride = args.stride,
                          .inv_freq = args.inv_freq,
                          .attention_factor = args.attention_factor,
                          .q_norm = args.q_norm,
                          .k_norm = args.k_norm,
                          .norm_eps = args.norm_eps,
                          .basis = args.kv.basis};
  if (kv_format(args.kv.code).per == KvParameters::kPerChannel) {
    auto counter = steps_.static_ranges_.counter();
    must(counter.status());
    launch.far_outside = *counter;
  }
  const auto context =
      steps_.scaled_rope_.prepare(args, steps_.limits_.rows, steps_.stream_, launch);
  must(context.status());
  // A row that continues another reads what that appends.
  if (!shape_.prefills && !shape_.chained && !decode_reads_plan(launch.shape, launch.step)) {
    append_ = {launch, *context};
  } else {
    must(rope_append(launch, *context), "rope");
  }
}

void CudaStep::attention(const AttentionArgs& args) {
  if (args.kv.latent()) {
    return attend_latent(args);
  }
  CHECK(args.q.type == DType::kBF16 && args.out.type == DType::kBF16);
  CHECK(args.sinks == nullptr ||
        (args.kv.basis.key_mean == nullptr && args.kv.basis.value_mean == nullptr));
  const AttentionShape shape{.kv = layout_of(args.kv),
                             .heads = static_cast<int32_t>(args.heads),
                             .sliding_window = static_cast<int32_t>(args.sliding_window),
                             .scale = args.scale,
                             .k_scale = args.kv.scales.k,
                             .v_scale = args.kv.scales.v,
                             .form = args.form};
  const size_t index = steps_.attention_plans_.find(shape);
  void* plan = steps_.attention_plans_.plan(index);
  const AttentionLaunch launch{.shape = shape,
                               .step = steps_.buffers_.metadata(args.kv.pool),
                               .plan = plan,
                               .pages = args.kv.pages,
                               .residual = residual_of(args.kv),
                               .q = args.q.data,
                               .q_stride = args.q_stride,
                               .out = args.out.data,
                               .out_stride = args.out_stride,
                               .sinks = args.sinks,
                               .basis = args.kv.basis,
                               .workspace = steps_.attention_plans_.workspace()};
  if (const auto append = std::exchange(append_, std::nullopt)) {
    CHECK(append->launch.pages == args.kv.pages && append->launch.qkv == args.q.data);
    must(append_decode_attention(append->launch, launch, append->context), "attention");
    turn_back(launch);
    return;
  }
  CHECK_LT(index, size_t{64});
  const uint64_t bit = uint64_t{1} << index;
  const bool made = (planned_ & bit) != 0;
  const bool planned = shape_.prefills || decode_reads_plan(shape, launch.step);
  // The plan is read early, and so are all keys but those of a row's own tile: what comes right
  // behind the plan, or behind the appends of rows that continue one another, must not overlap it.
  const LaunchContext context{.stream = steps_.stream_,
                              .overlap = (made || !planned) && !shape_.chained};
  if (planned && !made) {
    must(plan_attention(shape, launch.step, plan, {steps_.stream_}), "attention plan");
    planned_ |= bit;
  }
  if (shape_.decodes) {
    must(decode_attention(launch, context), "attention");
  }
  if (shape_.prefills) {
    must(prefill_attention(launch, context), "attention");
  }
  turn_back(launch);
}

ResidualKeys CudaStep::residual_of(const KvView& kv) const {
  return kv_has_residual(kv.code)
             ? ResidualKeys{kv.residual, steps_.buffers_.metadata(kv.residual_pool).page_table}
             : ResidualKeys();
}

void CudaStep::turn_back(const AttentionLaunch& launch) const {
  if (launch.basis.changes_results()) {
    must(turn_back_heads(launch, {steps_.stream_}), "attention");
  }
}

void CudaStep::normalize(const NormalizeArgs& args) {
  CHECK(args.out.type == DType::kBF16);
  must(norm_quantize({.x = args.x,
                      .norm = args.norm,
                      .rows = rows(),
                      .n = args.width,
                      .out = {ActFormat::kBf16, args.out.data, nullptr}},
                     {steps_.stream_}),
       "norm");
}

void CudaStep::add_gated(const GatedAddArgs& args) {
  CHECK(args.x.type == DType::kBF16 && args.rows.type == DType::kBF16);
  must(add_gated_rows({.x = args.x.data,
                       .gate = args.gate,
                       .rows = args.rows.data,
                       .count = rows(),
                       .n = args.width,
                       .y = args.y},
                      {steps_.stream_}),
       "adding a gated expert");
}

float* CudaStep::begin_branch(int64_t width) {
  StepBranch& branch = steps_.branch_;
  if (!branch.takes(rows())) {
    return nullptr;
  }
  CHECK_LE(static_cast<size_t>(rows() * width) * sizeof(float), branch.results().size());
  branch.begin();
  return branch.results().as<float>();
}

void CudaStep::take_logit_rows(const float* from, int64_t width, float* to) {
  // The rows of a table in F32 whose tokens are the wanted rows.
  must(gather_embeddings({.table = from,
                          .dtype = DType::kF32,
                          .vocab = rows(),
                          .tokens = steps_.buffers_.logit_rows(),
                          .rows = logit_rows(),
                          .n = width,
                          .out = to},
                         {steps_.stream_}),
       "taking logit rows");
}

void CudaStep::sample(float* logits, int64_t vocab) {
  CHECK(std::exchange(to_sample_, false));
  // A step that is fed by this one has as many rows as this has sequences.
  int32_t* const next =
      logit_rows() <= steps_.limits_.sequences ? steps_.buffers_.next_tokens() : nullptr;
  must(steps_.sampler_.sample(logits, vocab, logit_rows(), next, steps_.stream_));
}

void CudaStep::finish() const {
  CHECK_MSG(!steps_.branch_.open() && !steps_.branch_.ended(),
            "a branch whose results nobody took");
  CHECK_MSG(!append_.has_value(), "an append without the attention of its layer");
  CHECK_MSG(!to_sample_, "a step whose tokens were not sampled");
}

}  // namespace nibble::cuda
