#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/prepared_experts.h"
#include "base/thread_pool.h"
#include "calibration/input_sums.h"

namespace nibble {

/// The sums of all experts of a layer count, beside those of one of them, as this part of as many
/// rows as there are columns.
inline constexpr int64_t kLayerShare = 4;

/// Which experts of a layer one pass over the windows collects.
struct ExpertRange {
  int64_t begin = 0;
  int64_t end = 0;

  [[nodiscard]] bool contains(int64_t expert) const { return expert >= begin && expert < end; }
};

/// Adds up the rows of some experts of a layer, those of each apart.
class ExpertSums final : public ExpertObserver {
 public:
  struct Form {
    int64_t k = 0;
    std::vector<RowForm> rows = {RowForm()};  // of all experts of the layer, or of each
    FloatModel with_float = FloatModel::kNo;

    [[nodiscard]] const RowForm& of(int64_t expert) const {
      return rows.size() == 1 ? rows.front() : rows[static_cast<size_t>(expert)];
    }
  };
  ExpertSums(const ExpertRange& range, const Form& form, ThreadPool& pool);
  /// That an expert takes.
  static int64_t bytes_of_one(const Form& form);

  /// With a drift, before each window, what rows are without rounding: of every row of the step
  /// [rows, k], or in the order in which all experts' rows are shown. Valid until the next.
  void set_wanted_by_row(const float* wanted) { by_row_ = wanted; }
  void set_wanted_in_order(const float* wanted) { in_order_ = wanted; }

  [[nodiscard]] bool wants(int32_t expert) const override {
    return range_.contains(expert) || in_order_ != nullptr;  // to know how many were shown before
  }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override;

  /// After all rows.
  void finish();
  [[nodiscard]] InputSums& of(int64_t expert) {
    return experts_[static_cast<size_t>(expert - range_.begin)].sums;
  }

 private:
  /// Rows are added up many at a time: an expert has few of a window.
  struct Expert {
    InputSums sums;
    std::vector<float> rows;
    std::vector<float> wanted;
  };
  void add(Expert& expert);

  ExpertRange range_;
  Form form_;
  ThreadPool& pool_;
  const float* by_row_ = nullptr;
  const float* in_order_ = nullptr;
  std::vector<Expert> experts_;
};

}  // namespace nibble
