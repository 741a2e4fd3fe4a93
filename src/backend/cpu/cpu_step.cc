#include "backend/cpu/cpu_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/cpu/numbers.h"
#include "base/check.h"

namespace nibble::cpu {

CpuStep::CpuStep(const StepPlan& plan, const Device& device)
    : Step(plan.input, std::ssize(plan.input.tokens), std::ssize(plan.input.logit_rows)),
      device_(device) {
  CHECK_MSG(plan.sampling.rows.empty() && !plan.input.fed, "the CPU samples no tokens");
  positions_.resize(plan.input.tokens.size());
  for (const SequenceSpan& span : plan.input.sequences) {
    const auto first = positions_.begin() + span.q_begin;
    std::iota(first, first + span.q_len, span.kv_len - span.q_len);
  }
}

void CpuStep::normalize(const NormalizeArgs& args) {
  CHECK(is_norm(args.norm.kind));
  for_rows(device_.workspace.pool(), rows(), args.width, [&](int64_t row, int thread) {
    float* buffer = device_.workspace.row(thread);
    device_.kernels.make_input({.x = {args.x + row * args.width, Element::kF32},
                                .k = args.width,
                                .input = args.norm,
                                .silu = {}},
                               buffer);
    device_.kernels.store(buffer, args.width, numbers_of(args.out.at(row * args.width)));
  });
}

void CpuStep::input_rows(const InputRows& args, float* out) {
  for_rows(device_.workspace.pool(), rows(), args.width, [&](int64_t row, int /*thread*/) {
    device_.kernels.make_input({.x = numbers_of(args.x.at(row * args.stride)),
                                .k = args.width,
                                .input = args.input,
                                .silu = {}},
                               out + row * args.width);
  });
}

void CpuStep::add_gated(const GatedAddArgs& args) {
  constexpr int64_t kLanes = 8;
  for_rows(device_.workspace.pool(), rows(), args.width, [&](int64_t row, int thread) {
    float* x = device_.workspace.row(thread);
    device_.kernels.load(numbers_of(args.x.at(row * args.width)), args.width, x);
    float sums[kLanes] = {};
    for (int64_t i = 0; i < args.width; ++i) {
      sums[i % kLanes] += x[i] * args.gate[i];
    }
    const float gate = std::accumulate(std::begin(sums), std::end(sums), 0.0F);
    device_.kernels.add_weighted(numbers_of(args.rows.at(row * args.width)), args.width,
                                 1.0F / (1.0F + std::exp(-gate)), args.y + row * args.width);
  });
}

void CpuStep::take_logit_rows(const float* from, int64_t width, float* to) {
  for (const int32_t row : input().logit_rows) {
    CHECK_MSG(row >= 0 && row < rows(), "logit row {} of {}", row, rows());
    to = std::copy_n(from + row * width, width, to);
  }
}

void CpuStep::sample(float* /*logits*/, int64_t /*vocab*/) {
  CHECK_MSG(false, "the CPU samples no tokens");
}

}  // namespace nibble::cpu
