#include "backend/cuda/cuda_steps.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_step.h"

namespace nibble::cuda {
namespace {

/// Scales of caches are none of a plan's business.
bool same(const AttentionShape& a, const AttentionShape& b) {
  return a.kv.code == b.kv.code && a.kv.page_size == b.kv.page_size &&
         a.kv.kv_heads == b.kv.kv_heads && a.kv.head_dim == b.kv.head_dim && a.heads == b.heads &&
         a.sliding_window == b.sliding_window && a.scale == b.scale;
}

StepShape shape_of(const StepInput& input) {
  const auto one = [](const SequenceSpan& s) { return s.q_len == 1; };
  // Tokens that are proposed to follow one another come as spans of one row with the same pages.
  const auto continues = [](const SequenceSpan& a, const SequenceSpan& b) {
    return a.pages == b.pages;
  };
  return {
      .rows = std::ssize(input.tokens),
      .logit_rows = std::ssize(input.logit_rows),
      .decodes = std::ranges::any_of(input.sequences, one),
      .prefills = !std::ranges::all_of(input.sequences, one),
      .chained = std::ranges::adjacent_find(input.sequences, continues) != input.sequences.end()};
}

}  // namespace

size_t AttentionPlans::find(const AttentionShape& shape) {
  const auto found =
      std::ranges::find_if(plans_, [&](const Plan& plan) { return same(plan.shape, shape); });
  if (found != plans_.end()) {
    return static_cast<size_t>(found - plans_.begin());
  }
  const size_t bytes = attention_plan_bytes(shape, static_cast<int32_t>(limits_.sequences),
                                            static_cast<int32_t>(limits_.rows));
  auto plan = allocate_device(bytes, "the plan of attention");
  must(plan.status());
  const size_t workspace = attention_workspace_bytes(shape);
  if (workspace > workspace_.size()) {
    auto memory = allocate_zeroed(workspace, "attention");
    must(memory.status());
    retired_.push_back(std::move(workspace_));
    workspace_ = std::move(memory).value();
  }
  plans_.push_back({.shape = shape, .memory = std::move(plan).value()});
  return plans_.size() - 1;
}

StepLimits both(const StepLimits& a, const StepLimits& b) {
  return {.rows = std::max(a.rows, b.rows),
          .sequences = std::max(a.sequences, b.sequences),
          .logit_rows = std::max(a.logit_rows, b.logit_rows),
          .positions = std::max(a.positions, b.positions),
          .pools = std::max(a.pools, b.pools),
          .input_width = std::max(a.input_width, b.input_width),
          .top_k = std::max(a.top_k, b.top_k),
          .hidden = std::max(a.hidden, b.hidden),
          .expert_width = std::max(a.expert_width, b.expert_width),
          .shared_width = std::max(a.shared_width, b.shared_width),
          .scaled_pairs = std::max(a.scaled_pairs, b.scaled_pairs),
          .latent_heads = std::max(a.latent_heads, b.latent_heads),
          .latent_row = std::max(a.latent_row, b.latent_row),
          .latent_key = std::max(a.latent_key, b.latent_key),
          .latent_value = std::max(a.latent_value, b.latent_value)};
}

Result<std::unique_ptr<CudaSteps>> CudaSteps::create(const StepLimits& limits,
                                                     Recording recording,
                                                     const Place& place) {
  std::unique_ptr<CudaSteps> steps(new CudaSteps(limits, recording, place));
  NIBBLE_ASSIGN_OR_RETURN(steps->buffers_, StepBuffers::create(limits));
  NIBBLE_ASSIGN_OR_RETURN(steps->sampler_,
                          StepSampler::create(std::max(limits.sequences, limits.logit_rows)));
  if (const auto sizes = ExpandedLatents::sizes(limits); sizes.heads > 0) {
    NIBBLE_ASSIGN_OR_RETURN(steps->expanded_, ExpandedLatents::create(sizes));
  }
  return steps;
}

int64_t CudaSteps::record_key(const StepPlan& plan, const StepShape& shape) const {
  const int32_t longest = buffers_.metadata().longest;
  const int64_t length = longest <= kShorterAttention ? 0 : longest <= kShortAttention ? 1 : 2;
  const int64_t sampling = plan.sampling.rows.empty() ? 0 : 1 + sampler_.kind();
  constexpr int64_t kLengths = 3;
  constexpr int64_t kSamplings = StepSampler::kKinds + 1;
  return ((2 * plan.program + (shape.chained ? 1 : 0)) * kSamplings + sampling) * kLengths + length;
}

void CudaSteps::run(const StepPlan& plan, const StepLayers& layers) {
  const StepInput& input = plan.input;
  warming_up_ = input.warm_up;
  StepShape shape = shape_of(input);
  const bool record = recording_ == Recording::kDecodeSteps && shape.decodes && !shape.prefills &&
                      shape.rows == shape.logit_rows && std::ranges::is_sorted(input.logit_rows);
  if (record) {
    shape.rows = StepRecorder::bucket(shape.rows, std::min(limits_.rows, limits_.sequences));
    shape.logit_rows = shape.rows;
  }
  if (shape.rows > 0) {  // else it samples what the step before has computed
    must(buffers_.write(plan, shape, stream_));
  }
  const bool samples = !plan.sampling.rows.empty();
  if (samples) {
    must(sampler_.start(plan.sampling));
    must(sampler_.upload(shape.logit_rows, stream_));
  }
  rows_.there = record ? buffers_.rows_there() : nullptr;
  const auto issue = [&] {
    scaled_rope_.begin_step();
    branch_.reset();
    CudaStep step(plan, shape, *this);
    layers(step);
    step.finish();
  };
  if (record) {
    must(recorder_.run(record_key(plan, shape), shape.rows, issue));
  } else {
    issue();
  }
  rows_.there = nullptr;
  if (samples) {
    must(sampler_.download(stream_));
  }
}

void CudaSteps::report_ranges() { warming_up_ ? static_ranges_.forget() : static_ranges_.report(); }

void CudaSteps::finish(std::span<SampledRow> out) {
  must(sampler_.finish(out));
  report_ranges();
}

}  // namespace nibble::cuda
