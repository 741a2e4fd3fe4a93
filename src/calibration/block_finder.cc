#include "calibration/block_finder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/thread_pool.h"
#include "calibration/block_observers.h"
#include "calibration/layer_runner.h"
#include "calibration/site_walk.h"
#include "calibration/split_parts.h"
#include "calibration/window_states.h"
#include "quantizer/algorithms/output_error.h"

namespace nibble {
namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 24;  // of a matrix that is judged, at a time
// Of the sums of experts that are collected in one pass over the text.
constexpr int64_t kExpertBytes = int64_t{1} << 30;

bool routed(Site site) { return site == Site::kExpertUp || site == Site::kExpertDown; }

class BlockFinder final {
 public:
  BlockFinder(const BlockFinding& finding, LayerRunner& runner)
      : pool_(finding.threads),
        finding_(finding),
        runner_(runner),
        config_(runner.config()),
        parts_(split_parts(runner.config(), finding.block)),
        text_rows_(std::ssize(finding.windows) * std::ssize(finding.windows.front())),
        jobs_(finding.plan, runner.config()) {}

  Result<FoundBlocks> run() {
    NIBBLE_ASSIGN_OR_RETURN(WindowStates states, WindowStates::create({.runner = runner_,
                                                                       .windows = finding_.windows,
                                                                       .stop = finding_.stop},
                                                                      finding_.beside));
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(judge_layer(layer, states));
    }
    const uint8_t low = finding_.act == ActFormat::kBf16Blocks ? 8 : 4;
    return FoundBlocks{.act = finding_.act,
                       .block = finding_.block,
                       .parts = parts_,
                       .sites = std::move(found_),
                       .ranking = BlockRanking(std::move(sites_), low)};
  }

 private:
  /// What a layer's sites are judged by.
  struct Layer {
    std::vector<FoundSite> sites;
    std::vector<int64_t> rows;  // that each expert gets
    size_t first_judged = 0;    // of sites_
  };

  [[nodiscard]] const PlanJob& first_job(const FoundSite& site) const {
    return finding_.plan.jobs[jobs_.readers(site.input).front()];
  }
  [[nodiscard]] int64_t experts() const { return config_.moe.experts; }

  /// The layer's sites with activations in blocks, those of experts last. A plan stores the experts
  /// of a layer alike.
  Result<std::vector<FoundSite>> sites_of(int64_t layer) const {
    std::vector<FoundSite> sites;
    for (size_t i = 0; i < kSites; ++i) {
      const Site site{static_cast<uint8_t>(i)};
      for (int64_t expert = 0; expert < (site == Site::kExpertDown ? experts() : 1); ++expert) {
        const SiteInput input{layer, site, expert};
        if (are_in_blocks(jobs_.readers(input))) {
          sites.push_back({.input = input, .columns = nullptr});
          NIBBLE_RETURN_IF_ERROR(check_site(first_job(sites.back())));
        }
      }
    }
    return sites;
  }

  [[nodiscard]] bool are_in_blocks(const std::vector<size_t>& jobs) const {
    return !jobs.empty() && in_blocks(finding_.plan.jobs[jobs.front()].scheme.act);
  }

  [[nodiscard]] Status check_site(const PlanJob& job) const {
    const WeightFormat& weight = job.scheme.weight;
    if (job.scheme.act != finding_.act) {
      return make_error(
          StatusCode::kUnsupported,
          "{}: has blocks of other precisions ({}) than the rest; give all of a model "
          "one scheme in blocks",
          job.name(), job.scheme.name);
    }
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
    return {};
  }

  [[nodiscard]] int64_t parts_of(const FoundSite& site) const {
    return devices_may_split(site.input.site) ? parts_ : 1;
  }

  [[nodiscard]] BlockForm form_of(const FoundSite& site) const {
    return {.block = finding_.block,
            .scales = block_scales_of(first_job(site).scheme.weight, finding_.act),
            .outlier_share = finding_.outlier_share};
  }

  [[nodiscard]] std::unique_ptr<BlockRows> rows_of(const FoundSite& site) const {
    return std::make_unique<BlockRows>(site.columns.get(), first_job(site).matrix->k(),
                                       form_of(site));
  }

  Status judge_layer(int64_t index, WindowStates& states) {
    Layer layer;
    NIBBLE_ASSIGN_OR_RETURN(layer.sites, sites_of(index));
    layer.rows.resize(static_cast<size_t>(experts()));
    layer.first_judged = sites_.size();
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(index));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(index));
    if (finding_.moves == ChannelMoves::kGather) {
      NIBBLE_RETURN_IF_ERROR(order_channels_of(layer.sites, states));
    }
    const std::vector<ExpertRange> ranges = passes_of(layer);
    for (size_t i = 0; i + 1 < ranges.size(); ++i) {
      NIBBLE_RETURN_IF_ERROR(judge_experts(layer, ranges[i], states));
    }
    NIBBLE_RETURN_IF_ERROR(judge_last(layer, ranges.back(), states));
    runner_.unload();
    share_outputs_of_experts(layer);
    found_.insert(found_.end(), layer.sites.begin(), layer.sites.end());
    return {};
  }

  /// Which experts each pass over the text collects: one for all without any.
  [[nodiscard]] std::vector<ExpertRange> passes_of(const Layer& layer) const {
    const auto any = std::ranges::find_if(
        layer.sites, [](const FoundSite& site) { return routed(site.input.site); });
    if (any == layer.sites.end()) {
      return {{}};
    }
    const int64_t one = BlockRows::bytes(config_.moe.width, finding_.block);
    const int64_t count = std::clamp<int64_t>(kExpertBytes / one, 1, experts());
    std::vector<ExpertRange> ranges;
    for (int64_t begin = 0; begin < experts(); begin += count) {
      ranges.push_back({begin, std::min(begin + count, experts())});
    }
    return ranges;
  }

  /// The rows of down of some experts.
  struct ExpertRowSums {
    ExpertRowSums(const ExpertRange& of, ThreadPool& pool) : range(of), observer(of, pool) {}

    ExpertRange range;
    ExpertBlockObserver observer;
    std::vector<std::pair<size_t, std::unique_ptr<BlockRows>>> sums;  // by site of the layer
  };

  ExpertRowSums sums_of(const Layer& layer, const ExpertRange& range) {
    ExpertRowSums all(range, pool_);
    for (size_t i = 0; i < layer.sites.size(); ++i) {
      const SiteInput& input = layer.sites[i].input;
      if (input.site == Site::kExpertDown && range.contains(input.expert)) {
        all.sums.emplace_back(i, rows_of(layer.sites[i]));
        all.observer.collect(input.expert, *all.sums.back().second);
      }
    }
    return all;
  }

  Status judge_sums(Layer& layer, ExpertRowSums& all) {
    all.observer.finish();
    for (int64_t expert = all.range.begin; expert < all.range.end; ++expert) {
      layer.rows[static_cast<size_t>(expert)] = all.observer.count(expert);
    }
    for (auto& [site, sums] : all.sums) {
      NIBBLE_RETURN_IF_ERROR(judge(layer, site, *sums));
      sums.reset();
    }
    return {};
  }

  Status judge_experts(Layer& layer, const ExpertRange& range, WindowStates& states) {
    ExpertRowSums all = sums_of(layer, range);
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [](Site) { return nullptr; }, &all.observer);
        }));
    return judge_sums(layer, all);
  }

  /// The last pass, which is the only one for sites of dense products.
  Status judge_last(Layer& layer, const ExpertRange& range, WindowStates& states) {
    std::array<std::unique_ptr<BlockRows>, kSites> rows;
    std::array<std::unique_ptr<BlockObserver>, kSites> observers;
    for (const FoundSite& site : layer.sites) {
      const auto at = static_cast<size_t>(site.input.site);
      if (site.input.site != Site::kExpertDown) {
        rows.at(at) = rows_of(site);
        observers.at(at) = std::make_unique<BlockObserver>(*rows.at(at), pool_);
      }
    }
    ExpertRowSums all = sums_of(layer, range);
    ExpertObserver* of_experts = range.begin < range.end ? &all.observer : nullptr;
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          walk_sites(
              runner_, context,
              [&](Site site) { return observers[static_cast<size_t>(site)].get(); }, of_experts);
        }));
    NIBBLE_RETURN_IF_ERROR(judge_sums(layer, all));
    for (size_t i = 0; i < layer.sites.size(); ++i) {
      const auto at = static_cast<size_t>(layer.sites[i].input.site);
      if (rows.at(at) != nullptr) {
        NIBBLE_RETURN_IF_ERROR(judge(layer, i, *rows.at(at)));
        rows.at(at).reset();
      }
    }
    return {};
  }

  Status order_channels_of(std::vector<FoundSite>& sites, WindowStates& states) {
    std::vector<SizesObserver> sizes(kSites);
    ExpertSizesObserver downs(experts(), config_.moe.width);
    const bool with_experts = std::ranges::any_of(
        sites, [](const FoundSite& site) { return site.input.site == Site::kExpertDown; });
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [&](Site site) { return &sizes[static_cast<size_t>(site)]; },
              with_experts ? &downs : nullptr);
        }));
    for (FoundSite& site : sites) {
      const std::vector<double>& found =
          site.input.site == Site::kExpertDown
              ? downs.of_experts[static_cast<size_t>(site.input.expert)].all()
              : sizes[static_cast<size_t>(site.input.site)].sizes.all();
      if (!found.empty()) {  // else no row of the text enters it
        site.columns =
            std::make_shared<const std::vector<int32_t>>(order_by_size(found, parts_of(site)));
      }
    }
    return {};
  }

  /// Rows of the text that enter a job's matrix.
  [[nodiscard]] int64_t rows_of_job(const Layer& layer, const SiteInput& input, size_t job) const {
    if (input.site == Site::kExpertDown) {
      return layer.rows[static_cast<size_t>(input.expert)];
    }
    for (int64_t expert = 0; input.site == Site::kExpertUp && expert < experts(); ++expert) {
      if (std::ranges::count(jobs_.of(input.layer, input.site, expert), job) > 0) {
        return layer.rows[static_cast<size_t>(expert)];
      }
    }
    return text_rows_;
  }

  Status judge(Layer& layer, size_t at, BlockRows& rows) {
    FoundSite& site = layer.sites[at];
    rows.gram.finish();
    if (!rows.gram.finite()) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: what it multiplies holds numbers that are infinite or none, which no "
                        "integers stand for; leave it as it is with --rule {}=keep",
                        first_job(site).name(), first_job(site).name());
    }
    BlockSite judged;
    judged.parts = parts_of(site);
    double all_rows = 0;
    const std::vector<size_t> jobs = jobs_.readers(site.input);
    for (const size_t index : jobs) {
      const int64_t entering = rows_of_job(layer, site.input, index);
      const SourceMatrix& matrix = *finding_.plan.jobs[index].matrix;
      judged.work += matrix.n() * finding_.block * entering;
      all_rows += static_cast<double>(entering);
      NIBBLE_RETURN_IF_ERROR(add_costs(matrix, entering, rows, judged));
    }
    site.rows = all_rows / static_cast<double>(std::ssize(jobs) * text_rows_);
    if (sites_.size() < layer.first_judged + layer.sites.size()) {
      sites_.resize(layer.first_judged + layer.sites.size());
    }
    sites_[layer.first_judged + at] = std::move(judged);
    return {};
  }

  /// What a matrix makes of the blocks' errors. The sums may be of more rows than enter it: then
  /// they count by that share.
  Status add_costs(const SourceMatrix& matrix, int64_t entering, BlockRows& rows, BlockSite& to) {
    const auto seen = static_cast<double>(std::max<int64_t>(1, rows.gram.rows()));
    const auto factor = static_cast<float>(std::sqrt(static_cast<double>(entering) / seen));
    const int64_t step = std::max<int64_t>(1, kPieceWeights / matrix.k());
    for (int64_t row = 0; row < matrix.n(); row += step) {
      const int64_t count = std::min(step, matrix.n() - row);
      std::vector<float> w(static_cast<size_t>(count * matrix.k()));
      NIBBLE_RETURN_IF_ERROR(decode_once(matrix, finding_.reader, {row, count}, w.data()));
      if (rows.columns != nullptr) {
        order_channels(*rows.columns, {w.data(), count, matrix.k()}, pool_);
      }
      if (factor != 1) {
        std::ranges::transform(w, w.begin(), [factor](float weight) { return weight * factor; });
      }
      rows.errors.add_costs(w.data(), count, to.costs, pool_);
      to.outputs += output_error(rows.gram, {w.data(), nullptr, count}, pool_);
    }
    return {};
  }

  /// An expert's errors are shares of what down of all of its layer's makes: one with few rows
  /// counts little.
  void share_outputs_of_experts(const Layer& layer) {
    const auto is_down = [&](size_t i) { return layer.sites[i].input.site == Site::kExpertDown; };
    double all = 0;
    for (size_t i = 0; i < layer.sites.size(); ++i) {
      all += is_down(i) ? sites_[layer.first_judged + i].outputs : 0;
    }
    for (size_t i = 0; i < layer.sites.size(); ++i) {
      if (is_down(i)) {
        sites_[layer.first_judged + i].outputs = all;
      }
    }
  }

  ThreadPool pool_;
  const BlockFinding& finding_;
  LayerRunner& runner_;
  const ModelConfig& config_;
  int64_t parts_;
  int64_t text_rows_;
  std::vector<FoundSite> found_;
  std::vector<BlockSite> sites_;
  LayerJobs jobs_;
};

}  // namespace

SiteActs FoundBlocks::acts(const BlockChoice& choice) const {
  SiteActs acts;
  for (size_t i = 0; i < sites.size(); ++i) {
    SiteAct act{.spec = ActSpec(this->act), .rows = sites[i].rows};
    act.spec.columns = sites[i].columns;
    act.spec.blocks = std::make_shared<const BlockPrecision>(
        BlockPrecision{.block = block, .bits = choice.sites[i].bits, .clip = choice.sites[i].clip});
    acts.set(sites[i].input, std::move(act));
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
