#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/thread_pool.h"
#include "calibration/job_rounder.h"
#include "calibration/layer_jobs.h"
#include "calibration/layer_runner.h"
#include "calibration/site_observer.h"
#include "calibration/windows.h"

namespace nibble {

/// What rounding the matrices of a layer works with.
struct LayerParts {
  const JobMakerContext& context;
  const LayerJobs& jobs;
  Rounding rounding;
  ThreadPool& pool;
  LayerRunner& runner;
  Windows& windows;
  JobRounder& rounder;

  [[nodiscard]] FloatModel with_float() const {
    return rounding == Rounding::kGptaq ? FloatModel::kYes : FloatModel::kNo;
  }
};

/// The rows of one site while a pass over the windows collects them; nobody's where the plan rounds
/// none of its matrices.
class SiteInputs final {
 public:
  /// wanted: what the model without rounding has in their place.
  SiteInputs(const LayerParts& parts, int64_t layer, Site site, Kept wanted);

  [[nodiscard]] bool any() const { return sums_.has_value(); }
  /// Null where there are none.
  [[nodiscard]] SiteObserver* observer() { return observer_ ? &*observer_ : nullptr; }
  /// Pass::before.
  [[nodiscard]] std::function<Status(int64_t window)> before();
  /// Rounds the site's matrices.
  Status round() { return parts_.rounder.round(jobs_, *sums_, parts_.rounding); }

 private:
  const LayerParts& parts_;
  const std::vector<size_t>& jobs_;
  Kept wanted_;
  std::optional<InputSums> sums_;
  std::optional<SiteObserver> observer_;
};

/// Rounds a layer: q, k and v, then the output of attention, gate and up, and down, each reading
/// what the rounded ones before it make.
Status round_layer(const LayerParts& parts, int64_t layer);

/// Rounds the output head, after all layers.
Status round_head(const LayerParts& parts);

}  // namespace nibble
