#include "calibration/expert_sums.h"

#include <algorithm>

namespace nibble {
namespace {

constexpr int64_t kRows = 256;  // that are added up at a time

}  // namespace

ExpertSums::ExpertSums(const ExpertRange& range, const Form& form, ThreadPool& pool)
    : range_(range), form_(form), pool_(pool) {
  for (int64_t expert = range.begin; expert < range.end; ++expert) {
    experts_.push_back({InputSums(form.k, form.of(expert), form.with_float), {}, {}});
  }
}

int64_t ExpertSums::bytes_of_one(const Form& form) {
  const int64_t rows = 4 * kRows * form.k;
  return InputSums::bytes(form.k, form.with_float) + 2 * rows;
}

void ExpertSums::observe(int32_t expert, std::span<const int64_t> of, const float* rows) {
  const float* in_order = in_order_;
  if (in_order_ != nullptr) {
    in_order_ += std::ssize(of) * form_.k;
  }
  if (!range_.contains(expert)) {
    return;
  }
  Expert& to = experts_[static_cast<size_t>(expert - range_.begin)];
  for (size_t i = 0; i < of.size(); ++i) {
    const float* row = rows + static_cast<int64_t>(i) * form_.k;
    to.rows.insert(to.rows.end(), row, row + form_.k);
    if (form_.with_float == FloatModel::kYes) {
      const float* wanted = in_order != nullptr ? in_order + static_cast<int64_t>(i) * form_.k
                                                : by_row_ + of[i] * form_.k;
      to.wanted.insert(to.wanted.end(), wanted, wanted + form_.k);
    }
    if (std::ssize(to.rows) == kRows * form_.k) {
      add(to);
    }
  }
}

void ExpertSums::add(Expert& expert) {
  expert.sums.add({.x = expert.rows.data(),
                   .wanted = expert.wanted.data(),
                   .count = std::ssize(expert.rows) / form_.k},
                  pool_);
  expert.rows.clear();
  expert.wanted.clear();
}

void ExpertSums::finish() {
  for (Expert& expert : experts_) {
    add(expert);
  }
}

}  // namespace nibble
