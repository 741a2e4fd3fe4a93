#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "calibration/layer_runner.h"
#include "calibration/state_file.h"
#include "quantizer/job_maker.h"

namespace nibble {

/// Matrices of a layer with one input.
enum class Site : uint8_t { kQkv, kOutput, kUp, kDown };
inline constexpr size_t kSites = 4;

/// The jobs of a plan that calibration makes, by layer and site.
class LayerJobs final {
 public:
  LayerJobs(const QuantizePlan& plan, const ModelConfig& config);

  [[nodiscard]] const std::vector<size_t>& of(int64_t layer, Site site) const {
    return jobs_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)];
  }
  [[nodiscard]] bool contains(size_t job) const { return all_.contains(job); }
  [[nodiscard]] bool all_done(const ShardStore& store) const;
  [[nodiscard]] bool layer_done(int64_t layer, const ShardStore& store) const;

 private:
  std::vector<std::vector<size_t>> jobs_;
  std::set<size_t> all_;
};

/// Rounds the layers of a model in their order.
class LayerRounder final {
 public:
  struct Parts {
    const JobMakerContext& context;
    const LayerJobs& jobs;
    const std::vector<std::vector<int32_t>>& windows;
    Rounding rounding;
    ThreadPool& pool;
    LayerRunner& runner;
  };

  explicit LayerRounder(const Parts& parts);

  Status open_files();
  /// Where to go on: the first layer, with the embeddings as its inputs, unless an earlier run left
  /// the inputs of a later one.
  Result<int64_t> first_layer();
  Status round_layer(int64_t layer);
  /// Says in the log what was kept of how many matrices.
  void report() const;

 private:
  class SiteObserver;
  struct Work {
    std::function<Status(int64_t window)> before;
    std::function<void(ForwardContext& context)> run;
    std::function<Status(int64_t window)> after;
  };

  [[nodiscard]] int64_t rows() const { return std::ssize(parts_.windows.front()); }
  [[nodiscard]] bool stopped() const {
    return parts_.context.stop != nullptr && *parts_.context.stop;
  }
  Status for_windows(const Work& work);
  Status embed_all();
  Status round_attention(int64_t layer);
  Status round_dense(int64_t layer);
  Status run_experts();
  Status finish_layer(int64_t layer);
  Status round_site(int64_t layer, Site site, Gram& gram);
  Status round_job(size_t job, const SiteStatistics& site);
  Status substitute(size_t job, const RoundedMatrix& rounded);
  /// What sees the site's rows, or null where the plan rounds none of it.
  std::unique_ptr<SiteObserver> observer_of(int64_t layer, Site site);

  Parts parts_;
  std::vector<StateFile> states_;   // two: a layer's inputs, and what it makes of them
  size_t input_ = 0;                // which holds the inputs
  std::vector<StateFile> between_;  // kAttended, kUp
  QuantizeProgress progress_;
  std::map<std::string, int64_t> kept_;  // matrices by rounding
};

}  // namespace nibble
