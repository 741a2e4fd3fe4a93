#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/thread_pool.h"
#include "calibration/device_rounder.h"
#include "calibration/job_rounder.h"
#include "calibration/layer_jobs.h"
#include "calibration/layer_runner.h"
#include "calibration/site_acts.h"
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
  PartTimes& times;
  const SiteActs& acts;
  DeviceRounding* device = nullptr;  // null: all is done on the host

  [[nodiscard]] FloatModel with_float() const {
    return rounding == Rounding::kGptaq ? FloatModel::kYes : FloatModel::kNo;
  }
};

/// The rows of one site while a pass over the windows collects them; nobody's where the plan rounds
/// none of its matrices.
class SiteInputs final {
 public:
  /// wanted: what the model without rounding has in their place. kResourceExhausted on a device.
  static Result<std::unique_ptr<SiteInputs>> create(const LayerParts& parts,
                                                    int64_t layer,
                                                    Site site,
                                                    Kept wanted);

  [[nodiscard]] bool any() const { return !jobs_.empty(); }
  /// Null where there are none.
  [[nodiscard]] RowObserver* observer();
  /// What its rows of this step are without rounding, where the layer computes; valid until the
  /// next.
  void set_wanted(const void* rows);
  /// Pass::before.
  [[nodiscard]] std::function<Status(int64_t window)> before();
  /// Rounds the site's matrices.
  Status round();

 private:
  SiteInputs(const LayerParts& parts, const std::vector<size_t>& jobs, Kept wanted)
      : parts_(parts), jobs_(jobs), wanted_(wanted) {}

  const LayerParts& parts_;
  const std::vector<size_t>& jobs_;
  Kept wanted_;
  std::optional<InputSums> sums_;  // on the host
  std::optional<SiteObserver> observer_;
  std::unique_ptr<SiteMath> site_;  // on a device
  std::optional<DeviceObserver> device_observer_;
};

/// LayerRunner::load_mlp(), timed.
Status load_mlp(const LayerParts& parts, int64_t layer);

/// In a pass that reads before_attention_ends(): attention onto hidden().
[[nodiscard]] std::vector<Kept> before_attention_ends(const LayerParts& parts);
void finish_attention(const LayerParts& parts, ForwardContext& context);

/// Rounds a layer: q, k and v, then the output of attention, gate and up, and down, each reading
/// what the rounded ones before it make.
Status round_layer(const LayerParts& parts, int64_t layer);

/// Rounds the output head, after all layers.
Status round_head(const LayerParts& parts);

}  // namespace nibble
