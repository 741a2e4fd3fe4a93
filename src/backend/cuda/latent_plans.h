#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/latent.h"
#include "backend/cuda/memory.h"
#include "backend/step.h"

namespace nibble::cuda {

/// Plans of latent attention, one for each kind of layers, at addresses that recorded steps keep.
class LatentPlans final {
 public:
  explicit LatentPlans(const StepLimits& limits) : limits_(limits) {}

  struct Memory {
    LatentShape shape;
    DeviceBuffer plan;
    DeviceBuffer workspace;
  };
  /// Number of the plan for layers of this shape; allocated when the shape first occurs.
  size_t find(const LatentShape& shape);
  /// What one plan takes with its workspace in steps of these sizes; 0 without latent attention.
  [[nodiscard]] static int64_t bytes(const StepLimits& limits);
  [[nodiscard]] const Memory& operator[](size_t index) const { return plans_[index]; }

 private:
  StepLimits limits_;
  std::vector<Memory> plans_;
};

[[nodiscard]] inline LatentShape latent_shape_of(const KvView& kv) {
  return {.code = kv.code,
          .page_size = static_cast<int32_t>(kv.page_size),
          .row_dim = static_cast<int32_t>(kv.head_dim),
          .rope_dim = static_cast<int32_t>(kv.rope_dim())};
}

}  // namespace nibble::cuda
