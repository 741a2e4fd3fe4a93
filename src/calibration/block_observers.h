#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/prepared_experts.h"
#include "base/thread_pool.h"
#include "calibration/channel_sizes.h"
#include "calibration/expert_sums.h"
#include "layers/row_observer.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/block_errors.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// What BlockFinder sees while a layer runs: how large channels are, and what blocks of them cost.

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

/// The same of what down of each routed expert reads.
class ExpertSizesObserver final : public ExpertObserver {
 public:
  ExpertSizesObserver(int64_t experts, int64_t width)
      : of_experts(static_cast<size_t>(experts), ChannelSizes(OrderKey::kMeanSquare)),
        width_(width) {}

  [[nodiscard]] bool wants(int32_t /*expert*/) const override { return true; }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    of_experts[static_cast<size_t>(expert)].add(rows, std::ssize(of), width_);
  }

  std::vector<ChannelSizes> of_experts;

 private:
  int64_t width_;
};

/// Sums over rows, their channels in the order in which they are cut into blocks.
struct BlockRows {
  BlockRows(const std::vector<int32_t>* order, int64_t k, const BlockForm& form)
      : columns(order), gram(k), errors(k, form) {}

  /// x [count, k], in the order of the model; it is put into that of the blocks.
  void add(float* x, int64_t count, ThreadPool& pool) {
    if (columns != nullptr) {
      order_channels(*columns, {x, count, gram.k()}, pool);
    }
    gram.add(x, count, pool);
    errors.add(x, count, pool);
  }
  static int64_t bytes(int64_t k, int64_t block) {
    constexpr int64_t kWays = std::ssize(kClips) + 1;
    return 4 * k * (k + kWays * block);
  }

  const std::vector<int32_t>* columns;  // null: as of the model
  Gram gram;
  BlockErrors errors;
};

/// The rows of a site.
class BlockObserver final : public RowObserver {
 public:
  BlockObserver(BlockRows& to, ThreadPool& pool) : to_(to), pool_(pool) {}

  Then observe(Step& step, const InputRows& rows) override {
    rows_.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, rows_.data());
    to_.add(rows_.data(), step.rows(), pool_);
    return Then::kMultiply;
  }

 private:
  BlockRows& to_;
  ThreadPool& pool_;
  std::vector<float> rows_;
};

/// What down of some routed experts reads, and how many rows each of these gets.
class ExpertBlockObserver final : public ExpertObserver {
 public:
  ExpertBlockObserver(const ExpertRange& range, ThreadPool& pool)
      : range_(range), pool_(pool), experts_(static_cast<size_t>(range.end - range.begin)) {}

  /// Sums for one of them; the others are only counted.
  void collect(int64_t expert, BlockRows& to) { of(expert).to = &to; }

  [[nodiscard]] bool wants(int32_t expert) const override { return range_.contains(expert); }
  void observe(int32_t expert, std::span<const int64_t> rows_of, const float* rows) override {
    Expert& it = of(expert);
    it.count += std::ssize(rows_of);
    if (it.to == nullptr) {
      return;
    }
    const int64_t k = it.to->gram.k();
    it.rows.insert(it.rows.end(), rows, rows + std::ssize(rows_of) * k);
    if (std::ssize(it.rows) >= kRows * k) {
      flush(it);
    }
  }
  /// After all rows.
  void finish() {
    for (Expert& expert : experts_) {
      if (expert.to != nullptr) {
        flush(expert);
      }
    }
  }
  [[nodiscard]] int64_t count(int64_t expert) { return of(expert).count; }

 private:
  static constexpr int64_t kRows =
      256;  // that are added up at a time: an expert has few of a window

  struct Expert {
    BlockRows* to = nullptr;
    std::vector<float> rows;
    int64_t count = 0;
  };
  Expert& of(int64_t expert) { return experts_[static_cast<size_t>(expert - range_.begin)]; }
  void flush(Expert& expert) {
    expert.to->add(expert.rows.data(), std::ssize(expert.rows) / expert.to->gram.k(), pool_);
    expert.rows.clear();
  }

  ExpertRange range_;
  ThreadPool& pool_;
  std::vector<Expert> experts_;
};

}  // namespace nibble
