#include "calibration/order_finder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "calibration/site_walk.h"
#include "calibration/window_states.h"

namespace nibble {
namespace {

/// The inputs of a layer's products; of routed experts those of each one's down.
class SizeObserver final : public RowObserver, public ExpertObserver {
 public:
  SizeObserver(OrderKey key, int64_t experts) : sizes(key) {
    of_experts.assign(static_cast<size_t>(experts), ChannelSizes(key));
  }

  Then observe(Step& step, const InputRows& rows) override {
    rows_.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, rows_.data());
    sizes.add(rows_.data(), step.rows(), rows.width);
    return Then::kMultiply;
  }

  [[nodiscard]] bool wants(int32_t /*expert*/) const override { return true; }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    of_experts[static_cast<size_t>(expert)].add(rows, std::ssize(of), width);
  }

  ChannelSizes sizes;
  std::vector<ChannelSizes> of_experts;
  int64_t width = 0;  // of an expert

 private:
  std::vector<float> rows_;
};

class OrderFinder final {
 public:
  OrderFinder(const OrderFinding& finding, LayerRunner& runner)
      : finding_(finding), runner_(runner), config_(runner.config()) {}

  Result<ChannelOrders> run() {
    NIBBLE_ASSIGN_OR_RETURN(WindowStates states, WindowStates::create({.runner = runner_,
                                                                       .windows = finding_.windows,
                                                                       .stop = finding_.stop},
                                                                      finding_.beside));
    stream_.assign(static_cast<size_t>(config_.hidden_size), 0.0);
    ChannelOrders orders;
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      NIBBLE_ASSIGN_OR_RETURN(ChannelOrders::Layer found, orders_of(layer, states));
      orders.layers.push_back(std::move(found));
    }
    orders.stream = order_by_size(stream_, 1);
    return orders;
  }

 private:
  Result<ChannelOrders::Layer> orders_of(int64_t layer, WindowStates& states) {
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(layer));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(layer));
    const int64_t experts = runner_.has_experts() ? config_.moe.experts : 0;
    std::vector<SizeObserver> sites(kSites, SizeObserver(finding_.key, 0));
    SizeObserver routed(finding_.key, experts);
    routed.width = config_.moe.width;
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          walk_sites(
              runner_, context, [&](Site site) { return &sites[static_cast<size_t>(site)]; },
              experts > 0 ? &routed : nullptr);
        }));
    const bool turned = (experts > 0 ? runner_.experts().turn() : runner_.mlp().turn()) != 0;
    runner_.unload();
    const auto sizes = [&](Site site) -> const std::vector<double>& {
      return sites[static_cast<size_t>(site)].sizes.all();
    };
    for (const Site site : {Site::kQkv, Site::kUp, Site::kExpertUp}) {
      add_to_stream(sizes(site));
    }
    ChannelOrders::Layer orders{.values = of_values(sizes(Site::kOutput))};
    if (!turned) {
      orders.down =
          order_by_size(sizes(experts > 0 ? Site::kSharedDown : Site::kDown), finding_.parts);
    }
    for (const ChannelSizes& expert : routed.of_experts) {
      const std::vector<double> none(static_cast<size_t>(routed.width), 0.0);
      orders.experts.push_back(order_by_size(expert.all().empty() ? none : expert.all(), 1));
    }
    return orders;
  }

  void add_to_stream(const std::vector<double>& sizes) {
    const double sum = std::accumulate(sizes.begin(), sizes.end(), 0.0);
    for (size_t i = 0; sum > 0 && i < sizes.size(); ++i) {
      stream_[i] += sizes[i] / sum;
    }
  }

  /// Within each head of values, by what all heads of queries that read it make of them.
  [[nodiscard]] std::vector<int32_t> of_values(const std::vector<double>& sizes) const {
    const int64_t dim = config_.head_dim;
    const int64_t group = config_.num_heads / config_.num_kv_heads;
    if (sizes.empty()) {
      return {};  // latent attention, whose channels stay
    }
    std::vector<double> sums(static_cast<size_t>(config_.num_kv_heads * dim), 0.0);
    for (int64_t head = 0; head < config_.num_heads; ++head) {
      for (int64_t i = 0; i < dim; ++i) {
        const double size = sizes[static_cast<size_t>(head * dim + i)];
        double& sum = sums[static_cast<size_t>(head / group * dim + i)];
        sum = finding_.key == OrderKey::kMeanSquare ? sum + size : std::max(sum, size);
      }
    }
    return order_by_size(sums, config_.num_kv_heads);
  }

  const OrderFinding& finding_;
  LayerRunner& runner_;
  const ModelConfig& config_;
  std::vector<double> stream_;
};

}  // namespace

Result<ChannelOrders> find_orders(const OrderFinding& finding) {
  NIBBLE_ASSIGN_OR_RETURN(
      const auto runner,
      LayerRunner::open(finding.model, std::ssize(finding.windows.front()), finding.threads));
  return OrderFinder(finding, *runner).run();
}

}  // namespace nibble
