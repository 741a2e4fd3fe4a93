// Latent attention in a step.

#include <algorithm>
#include <iterator>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_step.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

LatentTurn turn_of(const LatentRope& rope) {
  return {.inv_freq = rope.inv_freq,
          .dim = static_cast<int32_t>(rope.dim),
          .factor = rope.attention_factor,
          .interleaved = rope.interleaved};
}

}  // namespace

void CudaStep::append_latent(const LatentAppendArgs& args) {
  CHECK(args.rows.type == DType::kBF16 && args.kv.latent());
  must(cuda::append_latent({.shape = latent_shape_of(args.kv),
                            .step = steps_.buffers_.metadata(args.kv.pool),
                            .pages = args.kv.pages,
                            .rows = args.rows.data,
                            .stride = args.stride,
                            .q_rank = static_cast<int32_t>(args.q_rank),
                            .q_norm = args.q_norm,
                            .latent_norm = args.latent_norm,
                            .norm_eps = args.norm_eps,
                            .turn = turn_of(args.rope)},
                           {steps_.stream_}),
       "appending latents");
}

void CudaStep::rotate_latent_queries(const LatentQueryArgs& args) {
  CHECK(args.q.type == DType::kBF16 && args.out.type == DType::kBF16);
  must(cuda::rotate_latent_queries({.step = steps_.buffers_.metadata(),
                                    .q = args.q.data,
                                    .q_stride = args.q_stride,
                                    .heads = static_cast<int32_t>(args.heads),
                                    .head_dim = static_cast<int32_t>(args.head_dim),
                                    .turn = turn_of(args.rope),
                                    .out = args.out.data,
                                    .out_dim = static_cast<int32_t>(args.out_dim)},
                                   {steps_.stream_}),
       "rotating queries");
}

void CudaStep::attend_latent(const AttentionArgs& args) {
  CHECK(args.q.type == DType::kBF16 && args.out.type == DType::kBF16);
  CHECK(args.sliding_window == 0 && args.sinks == nullptr);
  LatentShape shape = latent_shape_of(args.kv);
  shape.heads = static_cast<int32_t>(args.heads);
  shape.scale = args.scale;
  const size_t index = steps_.latent_plans_.find(shape);
  const LatentPlans::Memory& memory = steps_.latent_plans_[index];
  const LatentLaunch launch{.shape = shape,
                            .step = steps_.buffers_.metadata(args.kv.pool),
                            .plan = memory.plan.as<void>(),
                            .pages = args.kv.pages,
                            .q = args.q.data,
                            .q_stride = args.q_stride,
                            .out = args.out.data,
                            .out_stride = args.out_stride,
                            .workspace = memory.workspace.as<void>()};
  const bool made = plan_absorbed(index, launch);
  // The plan is read early: what comes right behind it must not overlap it.
  must(decode_latent(launch, {.stream = steps_.stream_, .overlap = made}), "attention");
  if (absorbs_prefills()) {
    must(prefill_latent(launch, {steps_.stream_}), "attention");
  }
}

bool CudaStep::plan_absorbed(size_t index, const LatentLaunch& launch) {
  std::vector<int32_t> left_out;
  std::ranges::transform(expanded_, std::back_inserter(left_out), &ExpandedSequence::sequence);
  if (left_out != left_out_) {  // of a layer of another form
    latents_planned_ = 0;
    left_out_ = std::move(left_out);
  }
  CHECK_LT(index, size_t{64});
  const uint64_t bit = uint64_t{1} << index;
  if ((latents_planned_ & bit) != 0) {
    return true;
  }
  StepMetadata step = launch.step;
  if (!left_out_.empty()) {
    step.kv_len = steps_.expanded_->lengths_without(left_out_, step, steps_.stream_);
  }
  must(plan_latent(launch.shape, step, steps_.latent_plans_[index].plan.as<void>(),
                   {steps_.stream_}),
       "attention plan");
  latents_planned_ |= bit;
  return false;
}

bool CudaStep::absorbs_prefills() const {
  const auto several = [](const SequenceSpan& span) { return span.q_len > 1; };
  return std::ranges::count_if(input().sequences, several) > std::ssize(expanded_);
}

std::vector<RowRange> CudaStep::absorbed_rows(const ExpandedLatentArgs& args) {
  expanded_.clear();
  if (!shape_.prefills || steps_.expanded_ == nullptr || !steps_.expanded_->takes(args)) {
    return Step::absorbed_rows(args);
  }
  const std::span<const SequenceSpan> spans = input().sequences;
  for (size_t i = 0; i < spans.size(); ++i) {
    const ExpandedSequence sequence{.sequence = static_cast<int32_t>(i),
                                    .first_row = spans[i].q_begin,
                                    .rows = spans[i].q_len,
                                    .kv_len = spans[i].kv_len};
    if (is_expanded(args.heads, sequence)) {
      expanded_.push_back(sequence);
    }
  }
  return rows_beside(expanded_, rows());
}

void CudaStep::attend_expanded(const ExpandedLatentArgs& args) {
  if (!expanded_.empty()) {
    steps_.expanded_->run(args, expanded_, steps_.buffers_.metadata(args.kv.pool), steps_.stream_);
  }
}

}  // namespace nibble::cuda
