#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "bench/cuda/bench_timer.h"
#include "bench/cuda/schedules/mixed_product.h"

namespace nibble::cuda {

/// Random operands of a product: weights as in a file and packed for the kernel, and activations.
class MixedData final {
 public:
  /// copies: of the packed weights, so that a benchmark does not find them in the L2 cache.
  static Result<MixedData> make(const MixedProblem& problem, size_t copies, cudaStream_t stream);

  /// The operands in one of the orders of weights, number `copy` of its copies.
  [[nodiscard]] MixedOperands operands(WeightOrder order, size_t copy) const;
  [[nodiscard]] const MixedProblem& problem() const { return problem_; }
  [[nodiscard]] const void* codes() const { return codes_.as<void>(); }
  [[nodiscard]] MixedReference reference(double* y, double* size) const;

 private:
  Status pack(size_t copies, cudaStream_t stream);

  MixedProblem problem_;
  size_t int8_bytes_ = 0, copy_bytes_ = 0;
  DeviceMemory codes_, int8_blocks_, bf16_blocks_, int8_x_, nibbles_x_, bf16_x_, x_scales_,
      weight_scales_, y_;
  DeviceMemory packed_[2];  // by WeightOrder
};

/// Whether a form of the kernel reads weights in rows.
[[nodiscard]] inline WeightOrder order_of(MixedForm form) {
  return form == MixedForm::kNoInterleave ? WeightOrder::kPlain : WeightOrder::kInterleaved;
}

}  // namespace nibble::cuda
