#include "calibration/calibration_memory.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "arch/family.h"
#include "calibration/input_sums.h"
#include "calibration/layer_jobs.h"

namespace nibble {
namespace {

// Stacks, buffers of files, code; and blocks below 32 MiB that are free again, but not the system's
// (bound_free_memory()). Measured: 25 to 32 MiB beside what is counted here
// (tests/e2e/test_cli_calibration_memory.py).
constexpr int64_t kSlack = int64_t{64} << 20;
constexpr int64_t kArena = int64_t{128} << 20;  // of which packed weights are cut (BufferArena)
constexpr int64_t kRowsOfThread = 64;  // of a matrix, that a thread rounds or judges at once
constexpr int64_t kCopiesOfRows = 5;   // weights, sums, values, errors, products

/// How the bytes of a layer's weights change while its sites are rounded, in their order.
class LayerBytes final {
 public:
  LayerBytes(const CalibrationNeed& need, const LayerJobs& jobs, int64_t layer)
      : element_(need.config.dtype == DType::kBF16 ? 2 : 4) {
    std::map<std::string, Site, std::less<>> sites;
    for (size_t site = 0; site < kSites; ++site) {
      const bool routed = Site{static_cast<uint8_t>(site)} == Site::kExpertUp ||
                          Site{static_cast<uint8_t>(site)} == Site::kExpertDown;
      for (int64_t expert = 0; expert < (routed ? need.config.moe.experts : 1); ++expert) {
        for (const size_t job : jobs.of(layer, Site{static_cast<uint8_t>(site)}, expert)) {
          sites.emplace(need.plan.jobs[job].name(), Site{static_cast<uint8_t>(site)});
          const PlanJob& planned = need.plan.jobs[job];
          codes_[site] += 2 * planned.bytes_out();  // once more where a kernel has packed them
        }
      }
    }
    const std::string prefix = layer_prefix(*need.config.family, layer);
    for (const auto& matrix : need.plan.source.matrices) {
      if (matrix->module().starts_with(prefix)) {
        const auto found = sites.find(matrix->module());
        const int64_t bytes = element_ * matrix->n() * matrix->k();
        (found == sites.end() ? kept_ : plain_[static_cast<size_t>(found->second)]) += bytes;
      }
    }
  }

  /// While a site is rounded.
  [[nodiscard]] int64_t at(Site site) const {
    int64_t bytes = kept_;
    int64_t plain = kept_;
    for (size_t i = 0; i < kSites; ++i) {
      const bool rounded = i < static_cast<size_t>(site);
      plain += plain_.at(i);
      bytes += rounded ? codes_.at(i) : std::max(plain_.at(i), codes_.at(i) / 2);
    }
    return bytes + std::min(kArena, 2 * plain);  // what was loaded before lies in the same block
  }

 private:
  int64_t element_;
  int64_t kept_ = 0;
  std::array<int64_t, kSites> plain_{};
  std::array<int64_t, kSites> codes_{};
};

/// What rounding the matrices of one input takes.
int64_t site_bytes(const CalibrationNeed& need, const PlanJob& job, Site site) {
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  const bool columns = need.rounding != Rounding::kRtn && need.rounding != Rounding::kImatrix;
  const bool drift = need.rounding == Rounding::kGptaq;
  const bool routed = site == Site::kExpertUp || site == Site::kExpertDown;
  const int64_t sums = InputSums::bytes(k, drift ? FloatModel::kYes : FloatModel::kNo);
  const int64_t square = 4 * k * k;
  const int64_t made = (columns ? square : 0) + (drift ? square : 0);
  const int64_t piece = std::min(n, piece_rows(job, need.piece_weights)) * k * 4;
  const int64_t values = (drift ? 4 : 3) * piece;  // weights, nearest and chosen values, W D
  const int64_t threads = need.threads * kRowsOfThread * kCopiesOfRows * 4 * k;
  const int64_t rows = need.rows * k * 4 * (drift ? 2 : 1);
  return sums * (routed ? 2 : 1) + std::max(rows, made + values + threads);
}

}  // namespace

int64_t calibration_memory(const CalibrationNeed& need) {
  const LayerJobs jobs(need.plan, need.config);
  int64_t most = 0;
  for (int64_t layer = 0; layer <= need.config.num_layers; ++layer) {
    const LayerBytes weights(need, jobs, layer);
    for (size_t i = 0; i < kSites; ++i) {
      const Site site{static_cast<uint8_t>(i)};
      for (const size_t job : jobs.of(layer, site)) {
        most = std::max(most, weights.at(site) + site_bytes(need, need.plan.jobs[job], site));
      }
    }
  }
  const ModelConfig& config = need.config;
  const int64_t width = std::max(config.intermediate_size, config.moe.width);
  const int64_t forward = need.rows * 4 * (6 * config.hidden_size + 3 * width);
  return most + forward + kSlack;
}

}  // namespace nibble
