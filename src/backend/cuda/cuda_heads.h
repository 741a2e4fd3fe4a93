#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/packed_matrices.h"
#include "backend/prepared_heads.h"
#include "quant/quant_view.h"

namespace nibble::cuda {

/// The matrices of all heads in BF16, multiplied at once: by few_heads.h, or a batch of cuBLASLt's.
class CudaHeads final : public PreparedHeads {
 public:
  /// Whether matrices are of a form that can be multiplied so.
  [[nodiscard]] static bool takes(std::span<const QuantView> heads);
  /// Returns while the last matrices are on their way. kResourceExhausted.
  static Result<std::unique_ptr<PreparedHeads>> create(std::span<const QuantView> heads,
                                                       const GemmContext& context);

  void run(const HeadsArgs& args) override;
  void run_transposed(const HeadsArgs& args) override;
  [[nodiscard]] bool has_transposed() const override { return true; }
  [[nodiscard]] int64_t weight_bytes() const override {
    return static_cast<int64_t>(weights_.size());
  }

 private:
  CudaHeads(std::span<const QuantView> heads,
            std::shared_ptr<CublasLt> library,
            cudaStream_t stream)
      : count_(std::ssize(heads)),
        n_(heads.front().n),
        k_(heads.front().k),
        library_(std::move(library)),
        stream_(stream) {}

  void multiply(const CublasLtProblem& problem, const HeadsArgs& args);

  int64_t count_, n_, k_;
  std::shared_ptr<CublasLt> library_;
  cudaStream_t stream_;
  DeviceBuffer weights_;  // [count, n, k] bf16
};

}  // namespace nibble::cuda
