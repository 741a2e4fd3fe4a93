#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/algorithms/rounding.h"
#include "quantizer/pipeline.h"
#include "quantizer/plan.h"
#include "quantizer/shard_store.h"

namespace nibble {

/// What a JobMaker works with.
struct JobMakerContext {
  const QuantizePlan& plan;
  ShardStore& store;
  std::string folder;  // of the work, for files named "calibration-..."
  int threads = 1;
  int64_t memory = 0;                                     // resident bytes
  const std::atomic<bool>* stop = nullptr;                // may become true at any time
  std::function<void(const QuantizeProgress&)> progress;  // may be empty
  QuantizeProgress begin;                                 // what is done before
};

/// Makes some jobs of a plan before all others are streamed: those whose codes depend on more than
/// their own weights. What it makes depends on the plan and its recipe alone; files of its own are
/// gone when it is done.
class JobMaker {
 public:
  virtual ~JobMaker() = default;
  /// All that decides what it makes: part of the plan's hash, and kept with the output.
  [[nodiscard]] virtual Json recipe() const = 0;
  /// kCancelled when stopped; what was stored stays stored.
  virtual Status make(const JobMakerContext& context) = 0;
};

/// Encodes a matrix that was rounded, writes it and records the job.
///   w  [n, k]: the source's weights
Status store_rounded(const JobMakerContext& context,
                     size_t job,
                     const std::vector<float>& w,
                     const RoundedMatrix& rounded);

}  // namespace nibble
