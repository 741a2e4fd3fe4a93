#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// Products of every expert of a layer with every row of a step, whatever the rows chose:
/// y[e, r] = x[r], or x[e, r], · the weights of expert e. All pointers are device memory.
struct AllExpertsLaunch {
  const void* x = nullptr;          // [rows, k], or [experts, rows, k]
  const float* x_scales = nullptr;  // likewise, one for each row, for the forms that have scales
  int64_t x_expert_rows = 0;        // rows from one expert's x to the next's: `rows`, or 0, one x
  const void* packed = nullptr;     // weights of the first expert, as pack() left them
  int64_t expert_bytes = 0;         // from one expert's to the next's, a multiple of 128
  const float* bias = nullptr;      // [experts, n], or none
  void* y = nullptr;                // [experts, rows, n]
  GemmResult result = GemmResult::kBf16;
  int64_t experts = 0;
  int64_t rows = 0;
};

/// Kernels that compute all experts for all rows, to compare with: the host needs to know nothing
/// of the choice, and experts that no row chose are read all the same.
class AllExpertsGemm : public GemmKernel {
 public:
  /// Most rows of a launch, whose results grow by experts and rows.
  static constexpr int64_t kMostRows = 256;
  static constexpr int64_t kMostSlots = 16384;  // rows of all experts
  [[nodiscard]] static constexpr int64_t most_rows(int64_t experts) {
    return std::clamp<int64_t>(kMostSlots / experts, 1, kMostRows);
  }

  virtual cudaError_t run_all(const AllExpertsLaunch& args, const LaunchContext& context) const = 0;
  /// Whether a graph of run_all() does what it does.
  [[nodiscard]] virtual bool recordable() const = 0;
};

}  // namespace nibble::cuda
