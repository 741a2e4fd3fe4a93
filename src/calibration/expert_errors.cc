#include "calibration/expert_errors.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "calibration/expert_sums.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 256;  // that are added up at a time

/// Adds up the rows of some experts.
class Collector final : public ExpertObserver {
 public:
  Collector(const ExpertRange& range, int64_t k, const ExpertJudging& judging)
      : range_(range), k_(k), pool_(judging.pool) {
    for (int64_t expert = range.begin; expert < range.end; ++expert) {
      experts_.push_back({PlaceSums(k, judging.rounded), {}});
    }
  }

  [[nodiscard]] bool wants(int32_t expert) const override { return range_.contains(expert); }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    if (!range_.contains(expert)) {
      return;
    }
    Expert& to = experts_[static_cast<size_t>(expert - range_.begin)];
    for (int64_t i = 0; i < std::ssize(of); ++i) {
      to.rows.insert(to.rows.end(), rows + i * k_, rows + (i + 1) * k_);
      if (std::ssize(to.rows) == kRows * k_) {
        flush(to);
      }
    }
  }
  void flush_all() {
    for (Expert& expert : experts_) {
      flush(expert);
    }
  }
  [[nodiscard]] PlaceSums& of(int64_t expert) {
    return experts_[static_cast<size_t>(expert - range_.begin)].sums;
  }

 private:
  struct Expert {
    PlaceSums sums;
    std::vector<float> rows;
  };
  void flush(Expert& expert) {
    expert.sums.add(expert.rows, pool_);
    expert.rows.clear();
  }

  ExpertRange range_;
  int64_t k_;
  ThreadPool& pool_;
  std::vector<Expert> experts_;
};

/// One input of all experts.
class ExpertPlace final {
 public:
  ExpertPlace(const ExpertJudging& judging, ExpertPart part)
      : judging_(judging),
        runner_(judging.runner),
        part_(part),
        k_(part == ExpertPart::kGateUp ? runner_.config().hidden_size
                                       : runner_.config().moe.width) {}

  Status judge() {
    const int64_t experts = runner_.config().moe.experts;
    const int64_t one = PlaceSums::bytes(k_, judging_.rounded.size()) + 4 * kRows * k_;
    const int64_t count = std::clamp<int64_t>(judging_.memory / one, 1, experts);
    PlaceSums all(k_, judging_.rounded);
    int64_t rows = 0;
    for (int64_t begin = 0; begin < experts && count < experts; begin += count) {
      const ExpertRange range{begin, std::min(begin + count, experts)};
      Collector some(range, k_, judging_);
      NIBBLE_RETURN_IF_ERROR(collect(some));
      add_up(some, range, all, rows);
    }
    for (int64_t begin = 0; begin < experts; begin += count) {
      const ExpertRange range{begin, std::min(begin + count, experts)};
      Collector some(range, k_, judging_);
      NIBBLE_RETURN_IF_ERROR(collect(some));
      if (count == experts) {
        add_up(some, range, all, rows);
      }
      const double share =
          static_cast<double>(k_) / kLayerShare / static_cast<double>(std::max<int64_t>(rows, 1));
      for (int64_t expert = range.begin; expert < range.end; ++expert) {
        NIBBLE_RETURN_IF_ERROR(judge_one(expert, some.of(expert), all, share));
      }
    }
    return {};
  }

 private:
  static void add_up(Collector& some, const ExpertRange& range, PlaceSums& all, int64_t& rows) {
    for (int64_t expert = range.begin; expert < range.end; ++expert) {
      all.add_sums(some.of(expert), 1);
      rows += some.of(expert).rows().rows();
    }
  }

  Status judge_one(int64_t expert, PlaceSums& sums, const PlaceSums& all, double share) {
    sums.add_sums(all, share);
    sums.finish();
    if (part_ == ExpertPart::kDown) {
      return judging_.judge({Role::kExpertDown, expert, sums});
    }
    NIBBLE_RETURN_IF_ERROR(judging_.judge({Role::kExpertGate, expert, sums}));
    return judging_.judge({Role::kExpertUp, expert, sums});
  }

  Status collect(Collector& into) {
    NIBBLE_RETURN_IF_ERROR(
        judging_.states.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          runner_.experts().normalize(runner_.hidden(), context);
          const ConstActivations x = context.scratch[ScratchName::kNormed];
          runner_.experts().routed().show_rows({.x = x,
                                                .chosen_by = x,
                                                .x_stride = runner_.config().hidden_size,
                                                .m = context.rows,
                                                .part = part_},
                                               into);
        }));
    into.flush_all();
    return {};
  }

  const ExpertJudging& judging_;
  LayerRunner& runner_;
  ExpertPart part_;
  int64_t k_;
};

}  // namespace

Status judge_experts(const ExpertJudging& judging) {
  NIBBLE_RETURN_IF_ERROR(ExpertPlace(judging, ExpertPart::kGateUp).judge());
  return ExpertPlace(judging, ExpertPart::kDown).judge();
}

}  // namespace nibble
