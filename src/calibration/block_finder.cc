#include "calibration/block_finder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/thread_pool.h"
#include "calibration/channel_sizes.h"
#include "calibration/layer_runner.h"
#include "calibration/site_walk.h"
#include "calibration/split_parts.h"
#include "calibration/window_states.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/gram.h"
#include "quantizer/algorithms/output_error.h"

namespace nibble {
namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 24;  // of a matrix that is judged, at a time

/// Learns how large the channels of a site are.
class SizesObserver final : public RowObserver {
 public:
  Then observe(Step& step, const InputRows& rows) override {
    rows_.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, rows_.data());
    sizes.add(rows_.data(), step.rows(), rows.width);
    return Then::kMultiply;
  }

  ChannelSizes sizes{OrderKey::kMeanSquare};

 private:
  std::vector<float> rows_;
};

/// What is known of the rows of a site.
struct SiteRows final : public RowObserver {
  SiteRows(const FoundSite& site, int64_t k, const BlockForm& form, ThreadPool& threads)
      : found(site), pool(threads), gram(k), errors(k, form) {}

  Then observe(Step& step, const InputRows& rows) override {
    x.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, x.data());
    if (found.columns != nullptr) {
      order_channels(*found.columns, {x.data(), step.rows(), rows.width}, pool);
    }
    gram.add(x.data(), step.rows(), pool);
    errors.add(x.data(), step.rows(), pool);
    return Then::kMultiply;
  }

  const FoundSite& found;
  ThreadPool& pool;
  Gram gram;
  BlockErrors errors;
  std::vector<float> x;
};

class BlockFinder final {
 public:
  BlockFinder(const BlockFinding& finding, LayerRunner& runner)
      : finding_(finding),
        runner_(runner),
        config_(runner.config()),
        pool_(finding.threads),
        jobs_(finding.plan, runner.config()),
        parts_(split_parts(runner.config(), finding.block)) {}

  Result<FoundBlocks> run() {
    NIBBLE_ASSIGN_OR_RETURN(WindowStates states, WindowStates::create({.runner = runner_,
                                                                       .windows = finding_.windows,
                                                                       .stop = finding_.stop},
                                                                      finding_.beside));
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(judge_layer(layer, states));
    }
    return FoundBlocks{finding_.block, parts_, std::move(found_), BlockRanking(std::move(sites_))};
  }

 private:
  [[nodiscard]] const PlanJob& first_job(const FoundSite& site) const {
    return finding_.plan.jobs[jobs_.of(site.layer, site.site).front()];
  }

  /// The layer's sites with activations in blocks.
  Result<std::vector<FoundSite>> sites_of(int64_t layer) const {
    std::vector<FoundSite> sites;
    for (size_t i = 0; i < kSites; ++i) {
      const Site site{static_cast<uint8_t>(i)};
      const std::vector<size_t>& jobs = jobs_.of(layer, site);
      if (jobs.empty() || finding_.plan.jobs[jobs.front()].scheme.act != ActFormat::kIntBlocks) {
        continue;
      }
      const PlanJob& job = finding_.plan.jobs[jobs.front()];
      if (site == Site::kExpertUp || site == Site::kExpertDown) {
        return make_error(
            StatusCode::kUnsupported,
            "{}: rows of routed experts are not rounded in blocks; give these another "
            "scheme, as by --rule '*experts*=keep'",
            job.name());
      }
      const WeightFormat& weight = job.scheme.weight;
      if (weight.grouped() && weight.group_size != finding_.block) {
        return make_error(StatusCode::kUnsupported,
                          "{}: has blocks of {} channels beside others of {}; give all of a model "
                          "blocks of one size",
                          job.name(), weight.group_size, finding_.block);
      }
      if (job.matrix->k() % finding_.block != 0) {
        return make_error(StatusCode::kInvalidArgument,
                          "{}: its {} input channels are no multiple of blocks of {}; choose a "
                          "smaller --block, or another scheme for it with --rule",
                          job.name(), job.matrix->k(), finding_.block);
      }
      sites.push_back({.layer = layer, .site = site, .columns = nullptr});
    }
    return sites;
  }

  [[nodiscard]] int64_t parts_of(const FoundSite& site) const {
    return devices_may_split(site.site) ? parts_ : 1;
  }

  [[nodiscard]] BlockForm form_of(const FoundSite& site) const {
    return {.block = finding_.block,
            .scales = block_scales_of(first_job(site).scheme.weight),
            .a8_share = finding_.a8_share};
  }

  Status judge_layer(int64_t layer, WindowStates& states) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<FoundSite> sites, sites_of(layer));
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(layer));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(layer));
    if (finding_.moves == ChannelMoves::kGather) {
      NIBBLE_RETURN_IF_ERROR(order_channels_of(sites, states));
    }
    std::vector<std::unique_ptr<SiteRows>> rows(kSites);
    for (const FoundSite& site : sites) {
      rows[static_cast<size_t>(site.site)] =
          std::make_unique<SiteRows>(site, first_job(site).matrix->k(), form_of(site), pool_);
    }
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [&](Site site) { return rows[static_cast<size_t>(site)].get(); },
              nullptr);
        }));
    runner_.unload();
    for (const FoundSite& site : sites) {
      NIBBLE_RETURN_IF_ERROR(judge(site, *rows[static_cast<size_t>(site.site)]));
      rows[static_cast<size_t>(site.site)].reset();
      found_.push_back(site);
    }
    return {};
  }

  Status order_channels_of(std::vector<FoundSite>& sites, WindowStates& states) {
    std::vector<SizesObserver> sizes(kSites);
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [&](Site site) { return &sizes[static_cast<size_t>(site)]; },
              nullptr);
        }));
    for (FoundSite& site : sites) {
      site.columns = std::make_shared<const std::vector<int32_t>>(
          order_by_size(sizes[static_cast<size_t>(site.site)].sizes.all(), parts_of(site)));
    }
    return {};
  }

  Status judge(const FoundSite& site, SiteRows& rows) {
    rows.gram.finish();
    if (!rows.gram.finite()) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: what it multiplies holds numbers that are infinite or none, which no "
                        "integers stand for; leave it as it is with --rule {}=keep",
                        first_job(site).name(), first_job(site).name());
    }
    BlockSite judged;
    judged.parts = parts_of(site);
    for (const size_t index : jobs_.of(site.layer, site.site)) {
      const SourceMatrix& matrix = *finding_.plan.jobs[index].matrix;
      judged.work += matrix.n() * finding_.block;
      const int64_t step = std::max<int64_t>(1, kPieceWeights / matrix.k());
      for (int64_t row = 0; row < matrix.n(); row += step) {
        const int64_t count = std::min(step, matrix.n() - row);
        std::vector<float> w(static_cast<size_t>(count * matrix.k()));
        NIBBLE_RETURN_IF_ERROR(decode_once(matrix, finding_.reader, {row, count}, w.data()));
        if (site.columns != nullptr) {
          order_channels(*site.columns, {w.data(), count, matrix.k()}, pool_);
        }
        rows.errors.add_costs(w.data(), count, judged.costs, pool_);
        judged.outputs += output_error(rows.gram, {w.data(), nullptr, count}, pool_);
      }
    }
    sites_.push_back(std::move(judged));
    return {};
  }

  const BlockFinding& finding_;
  LayerRunner& runner_;
  const ModelConfig& config_;
  ThreadPool pool_;
  LayerJobs jobs_;
  int64_t parts_;
  std::vector<FoundSite> found_;
  std::vector<BlockSite> sites_;
};

}  // namespace

SiteActs FoundBlocks::acts(const BlockChoice& choice) const {
  SiteActs acts;
  for (size_t i = 0; i < sites.size(); ++i) {
    ActSpec act(ActFormat::kIntBlocks);
    act.columns = sites[i].columns;
    act.blocks = std::make_shared<const BlockPrecision>(
        BlockPrecision{.block = block, .bits = choice.sites[i].bits, .clip = choice.sites[i].clip});
    acts.set(sites[i].layer, sites[i].site, std::move(act));
  }
  return acts;
}

Result<FoundBlocks> find_blocks(const BlockFinding& finding) {
  NIBBLE_ASSIGN_OR_RETURN(
      const auto runner,
      LayerRunner::open(finding.model, std::ssize(finding.windows.front()), finding.threads));
  return BlockFinder(finding, *runner).run();
}

}  // namespace nibble
