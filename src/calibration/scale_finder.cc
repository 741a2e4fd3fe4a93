#include "calibration/scale_finder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>

#include "base/log.h"
#include "calibration/layer_jobs.h"
#include "calibration/layer_runner.h"
#include "calibration/site_walk.h"
#include "calibration/window_states.h"

namespace nibble {
namespace {

constexpr int64_t kSampledRows = 256;     // of a site's inputs
constexpr int64_t kSampledWeights = 256;  // rows of a matrix

/// Learns the channels of a site.
class ChannelObserver final : public RowObserver {
 public:
  explicit ChannelObserver(int64_t every) : every_(every) {}

  Then observe(Step& step, const InputRows& rows) override {
    const int64_t k = rows.width;
    rows_.resize(static_cast<size_t>(step.rows() * k));
    step.input_rows(rows, rows_.data());
    statistics.largest.resize(static_cast<size_t>(k), 0.0F);
    statistics.sums.resize(static_cast<size_t>(k), 0.0);
    for (int64_t row = 0; row < step.rows(); ++row, ++seen_) {
      const float* x = rows_.data() + row * k;
      for (int64_t i = 0; i < k; ++i) {
        const float magnitude = std::fabs(x[i]);
        float& largest = statistics.largest[static_cast<size_t>(i)];
        largest = std::max(largest, magnitude);
        statistics.sums[static_cast<size_t>(i)] += static_cast<double>(magnitude);
      }
      if (seen_ % every_ == sampled_at(seen_ / every_)) {
        statistics.sample.insert(statistics.sample.end(), x, x + k);
      }
    }
    return Then::kMultiply;
  }

  ChannelStatistics statistics;

 private:
  /// Which of `every_` neighbouring rows is sampled: another one each time, or all sampled rows
  /// would be the same few positions of windows, and first tokens many of them.
  [[nodiscard]] int64_t sampled_at(int64_t stretch) const {
    constexpr int64_t kPrime = 8191;
    return stretch * kPrime % every_;
  }

  int64_t every_;
  int64_t seen_ = 0;
  std::vector<float> rows_;
};

/// Whether activation(factor * gate..., up / factor) is activation(...) / factor.
bool commutes(GemmInput::Kind activation) {
  return activation == GemmInput::Kind::kSiluMul || activation == GemmInput::Kind::kRelu;
}

class ScaleFinder final {
 public:
  ScaleFinder(const ScaleFinding& finding, LayerRunner& runner)
      : pool_(finding.threads),
        finding_(finding),
        runner_(runner),
        jobs_(finding.plan, runner.config()) {}

  Result<std::vector<LayerFactors>> run() {
    NIBBLE_ASSIGN_OR_RETURN(WindowStates states, WindowStates::create({.runner = runner_,
                                                                       .windows = finding_.windows,
                                                                       .stop = finding_.stop},
                                                                      finding_.beside));
    std::vector<LayerFactors> factors;
    for (int64_t layer = 0; layer < runner_.config().num_layers; ++layer) {
      NIBBLE_ASSIGN_OR_RETURN(LayerFactors found, factors_of(layer, states));
      factors.push_back(std::move(found));
    }
    NIBBLE_LOG(kInfo, "factors: {} of {} products take them", scaled_, sites_);
    log_experts();
    return factors;
  }

 private:
  [[nodiscard]] int64_t rows() const { return std::ssize(finding_.windows.front()); }

  Result<LayerFactors> factors_of(int64_t layer, WindowStates& states) {
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(layer));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(layer));
    const int64_t tokens = rows() * std::ssize(finding_.windows);
    const int64_t every = std::max<int64_t>(1, tokens / kSampledRows);
    std::vector<ChannelObserver> sites(kSites, ChannelObserver(every));
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [&](Site site) { return &sites[static_cast<size_t>(site)]; },
              nullptr);
        }));
    LayerFactors factors;
    const bool dense = !runner_.has_experts();
    note_experts(layer);
    const bool turned = dense && runner_.mlp().turn() != 0;  // factors cannot pass that
    runner_.unload();
    const std::pair<Site, std::vector<float>*> wanted[] = {{Site::kQkv, &factors.qkv},
                                                           {Site::kOutput, &factors.values},
                                                           {Site::kUp, &factors.up},
                                                           {Site::kDown, &factors.down}};
    for (const auto& [site, out] : wanted) {
      const bool mlp = site == Site::kUp || site == Site::kDown;
      const bool passes = site != Site::kDown || (!turned && commutes(runner_.config().activation));
      const bool seen = mlp ? dense : !runner_.has_latent_attention();
      if (seen && passes && !jobs_.of(layer, site).empty()) {
        NIBBLE_ASSIGN_OR_RETURN(
            *out, search(jobs_.of(layer, site), site, sites[static_cast<size_t>(site)].statistics));
      }
    }
    return factors;
  }

  /// Remembers the matrices of a layer that take no factors: gate and up of experts read what the
  /// router reads, and the shared expert, too, and each down has an input of its own.
  void note_experts(int64_t layer) {
    const size_t before = of_experts_.size();
    for (const Site site :
         {Site::kExpertUp, Site::kExpertDown, Site::kSharedUp, Site::kSharedDown}) {
      const bool routed = site == Site::kExpertUp || site == Site::kExpertDown;
      const int64_t experts = routed ? runner_.config().moe.experts : 1;
      for (int64_t expert = 0; expert < experts; ++expert) {
        const std::vector<size_t>& jobs = jobs_.of(layer, site, expert);
        of_experts_.insert(of_experts_.end(), jobs.begin(), jobs.end());
      }
    }
    if (of_experts_.size() > before) {
      expert_layers_.push_back(layer);
    }
  }

  void log_experts() const {
    if (!of_experts_.empty()) {
      NIBBLE_LOG(kInfo,
                 "factors: none for the {} matrices of experts in {} layers, {} to {} ({} and so "
                 "on): their inputs are the router's, too, or one expert's alone",
                 of_experts_.size(), expert_layers_.size(), expert_layers_.front(),
                 expert_layers_.back(), finding_.plan.jobs[of_experts_.front()].name());
    }
  }

  Result<std::vector<float>> search(const std::vector<size_t>& jobs,
                                    Site site,
                                    const ChannelStatistics& statistics) {
    std::vector<std::vector<float>> weights;
    std::vector<MatrixToRound> matrices;
    for (const size_t index : jobs) {
      const PlanJob& job = finding_.plan.jobs[index];
      NIBBLE_ASSIGN_OR_RETURN(std::vector<float> w, sampled_rows(*job.matrix));
      matrices.push_back({.w = nullptr,
                          .n = std::ssize(w) / job.matrix->k(),
                          .k = job.matrix->k(),
                          .format = job.scheme.weight,
                          .encoder = job.encoder});
      weights.push_back(std::move(w));
      matrices.back().w = weights.back().data();
    }
    const QuantScheme& scheme = finding_.plan.jobs[jobs.front()].scheme;
    const int block = scheme.weight.grouped() ? scheme.weight.group_size : finding_.block;
    std::vector<float> factors = search_factors(
        {.rule = finding_.rule,
         .act = scheme.act,
         .blocks = {.block = block, .outlier_share = finding_.outlier_share},
         .site = statistics,
         .matrices = matrices,
         .factor_of = site == Site::kOutput ? values_of_channels() : std::vector<int32_t>()},
        pool_);
    ++sites_;
    if (std::ranges::all_of(factors, [](float factor) { return factor == 1.0F; })) {
      factors.clear();
    } else {
      ++scaled_;
    }
    return factors;
  }

  /// Rows of a matrix, as far apart as makes few of them.
  [[nodiscard]] Result<std::vector<float>> sampled_rows(const SourceMatrix& matrix) const {
    const int64_t every = std::max<int64_t>(1, matrix.n() / kSampledWeights);
    std::vector<float> w;
    for (int64_t row = 0; row < matrix.n(); row += every) {
      w.resize(w.size() + static_cast<size_t>(matrix.k()));
      NIBBLE_RETURN_IF_ERROR(
          decode_once(matrix, finding_.reader, {row, 1}, w.data() + w.size() - matrix.k()));
    }
    return w;
  }

  /// The number among keys' and values' channels of each channel that attention puts out.
  [[nodiscard]] std::vector<int32_t> values_of_channels() const {
    const ModelConfig& config = runner_.config();
    const int64_t group = config.num_heads / config.num_kv_heads;
    std::vector<int32_t> channels;
    for (int64_t head = 0; head < config.num_heads; ++head) {
      for (int64_t i = 0; i < config.head_dim; ++i) {
        channels.push_back(static_cast<int32_t>(head / group * config.head_dim + i));
      }
    }
    return channels;
  }

  ThreadPool pool_;
  const ScaleFinding& finding_;
  LayerRunner& runner_;
  LayerJobs jobs_;
  int64_t sites_ = 0;
  int64_t scaled_ = 0;
  std::vector<size_t> of_experts_;  // jobs that take no factors
  std::vector<int64_t> expert_layers_;
};

}  // namespace

Result<std::vector<LayerFactors>> find_factors(const ScaleFinding& finding) {
  NIBBLE_ASSIGN_OR_RETURN(
      const auto runner,
      LayerRunner::open(finding.model, std::ssize(finding.windows.front()), finding.threads));
  return ScaleFinder(finding, *runner).run();
}

}  // namespace nibble
