#include "backend/cpu/cpu_step.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace nibble::cpu {

CpuStep::CpuStep(const StepPlan& plan, CpuAttention& attention)
    : Step(plan.input, std::ssize(plan.input.tokens), std::ssize(plan.input.logit_rows)),
      attention_(attention) {
  CHECK_MSG(plan.sampling.rows.empty() && !plan.input.fed, "the CPU samples no tokens");
  positions_.resize(plan.input.tokens.size());
  for (const SequenceSpan& span : plan.input.sequences) {
    const auto first = positions_.begin() + span.q_begin;
    std::iota(first, first + span.q_len, span.kv_len - span.q_len);
  }
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
