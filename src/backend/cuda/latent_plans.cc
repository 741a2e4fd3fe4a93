#include "backend/cuda/latent_plans.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kPlannedRopeDim = 64;  // of rows whose kernels have plans

}  // namespace

size_t LatentPlans::find(const LatentShape& shape) {
  const auto found =
      std::ranges::find_if(plans_, [&](const Memory& memory) { return memory.shape == shape; });
  if (found != plans_.end()) {
    return static_cast<size_t>(found - plans_.begin());
  }
  auto plan = allocate_device(latent_plan_bytes(shape, static_cast<int32_t>(limits_.sequences),
                                                static_cast<int32_t>(limits_.rows)),
                              "the plan of attention");
  must(plan.status());
  auto workspace = allocate_device(
      latent_workspace_bytes(shape, static_cast<int32_t>(limits_.sequences)) + 1, "attention");
  must(workspace.status());
  plans_.push_back({shape, std::move(plan).value(), std::move(workspace).value()});
  return plans_.size() - 1;
}

int64_t LatentPlans::bytes(const StepLimits& limits) {
  if (limits.latent_heads == 0) {
    return 0;
  }
  const auto bytes_in = [&](KvCode code) {
    const LatentShape shape{.code = code,
                            .row_dim = static_cast<int32_t>(limits.latent_row),
                            .rope_dim = kPlannedRopeDim,
                            .heads = static_cast<int32_t>(limits.latent_heads)};
    return static_cast<int64_t>(
        latent_plan_bytes(shape, static_cast<int32_t>(limits.sequences),
                          static_cast<int32_t>(limits.rows)) +
        latent_workspace_bytes(shape, static_cast<int32_t>(limits.sequences)));
  };
  return std::max({bytes_in(KvCode::kBf16), bytes_in(KvCode::kInt8), bytes_in(KvCode::kInt4)});
}

}  // namespace nibble::cuda
