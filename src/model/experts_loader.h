#pragma once

#include <functional>
#include <memory>

#include "arch/config.h"
#include "backend/backend.h"
#include "core/expert_share.h"
#include "model/weight_loader.h"

namespace nibble {

/// What loading the experts of a layer needs.
struct ExpertsSource {
  const ModelConfig& config;
  WeightLoader& weights;
  Backend& backend;
  int64_t max_rows = 0;                           // of a step
  ExpertShare share = {};                         // which experts are loaded
  std::function<void(const MappedLinear&)> note;  // called for every matrix that is prepared
};

/// Reads and packs the router and the routed experts of a layer. Errors name file and tensor: those
/// of the reader, kUnsupported for a quantized router, for experts that differ in form and for
/// those that the backend has no kernels for.
Result<std::unique_ptr<PreparedExperts>> load_experts(const ExpertsSource& source, int64_t layer);

}  // namespace nibble
