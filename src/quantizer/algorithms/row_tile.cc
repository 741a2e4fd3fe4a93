#include "quantizer/algorithms/row_tile.h"

#include <algorithm>

#include "base/check.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kDepth = 256;     // columns of a sum in single precision
constexpr int64_t kRowDepth = 128;  // likewise: numbers of 64 rows that the first cache holds
constexpr int64_t kBlock = 128;     // columns whose gradients are computed together

}  // namespace

RowTile::RowTile(const MatrixToRound& matrix, const SiteStatistics& site, const Loss& loss)
    : matrix_(matrix),
      site_(site),
      loss_(loss),
      kernels_(*rows::find_row_kernels("auto").value()),
      groups_(matrix.format.groups(matrix.k)),
      damping_(static_cast<float>(loss.damping * site.gram->mean_diagonal())),
      w_(static_cast<size_t>(matrix.k * kRows)),
      values_(w_.size()),
      errors_(w_.size()),
      gradients_(w_.size()),
      scales_(static_cast<size_t>(groups_ * kRows)),
      zeros_(scales_.size()) {
  CHECK_EQ(site.gram->k(), matrix.k);
}

void RowTile::load(int64_t first, const RoundedMatrix& rounded) {
  first_ = first;
  rows_ = std::min(kRows, matrix_.n - first);
  has_zeros_ = !rounded.zeros.empty();
  std::fill(w_.begin(), w_.end(), 0.0F);
  std::fill(values_.begin(), values_.end(), 0.0F);
  std::fill(scales_.begin(), scales_.end(), 1.0F);
  std::fill(zeros_.begin(), zeros_.end(), 0.0F);
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t i = 0; i < matrix_.k; ++i) {
      const int64_t from = (first + row) * matrix_.k + i;
      w_[static_cast<size_t>(i * kRows + row)] = matrix_.w[from];
      values_[static_cast<size_t>(i * kRows + row)] = rounded.values[static_cast<size_t>(from)];
    }
    for (int64_t g = 0; g < groups_; ++g) {
      const auto from = static_cast<size_t>((first + row) * groups_ + g);
      scales_[static_cast<size_t>(g * kRows + row)] = rounded.scales[from];
      zeros_[static_cast<size_t>(g * kRows + row)] = has_zeros_ ? rounded.zeros[from] : 0.0F;
    }
  }
  if (loss_.with_drift) {
    find_asked();
  }
}

void RowTile::store(RoundedMatrix& rounded) const {
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t i = 0; i < matrix_.k; ++i) {
      rounded.values[static_cast<size_t>((first_ + row) * matrix_.k + i)] =
          values_[static_cast<size_t>(i * kRows + row)];
    }
    for (int64_t g = 0; g < groups_; ++g) {
      rounded.scales[static_cast<size_t>((first_ + row) * groups_ + g)] =
          scales_[static_cast<size_t>(g * kRows + row)];
    }
  }
}

void RowTile::find_asked() {
  const Drift& drift = *site_.drift_sums;
  asked_.assign(w_.size(), 0.0F);
  for (int64_t t = 0; t < k(); t += kDepth) {
    kernels_.add_products({.a = drift.data() + t * drift.stride(),
                           .a_stride = drift.stride(),
                           .b = w_.data() + t * kRows,
                           .b_stride = kRows,
                           .c = asked_.data(),
                           .c_stride = kRows,
                           .m = k(),
                           .n = kRows,
                           .depth = std::min(kDepth, k() - t)});
  }
  for (float& number : asked_) {
    number *= kDriftShare;
  }
}

void RowTile::update_errors(const Columns& changed) {
  const auto end = static_cast<size_t>((changed.begin + changed.count) * kRows);
  for (auto i = static_cast<size_t>(changed.begin * kRows); i < end; ++i) {
    errors_[i] = w_[i] - values_[i];
  }
}

void RowTile::find_gradients(const Columns& of) {
  const auto end = static_cast<size_t>((of.begin + of.count) * kRows);
  for (auto i = static_cast<size_t>(of.begin * kRows); i < end; ++i) {
    gradients_[i] = damping_ * errors_[i] + (asked_.empty() ? 0.0F : asked_[i]);
  }
  add_products(of, {0, k()}, errors_.data(), gradients_.data() + of.begin * kRows);
}

void RowTile::find_gradients() {
  update_errors({0, k()});
  for (int64_t begin = 0; begin < k(); begin += kBlock) {
    find_gradients({begin, std::min(kBlock, k() - begin)});
  }
}

std::vector<double> RowTile::losses() const {
  std::vector<double> sums(static_cast<size_t>(rows_));
  for (int64_t i = 0; i < matrix_.k; ++i) {
    for (int64_t row = 0; row < rows_; ++row) {
      const auto at = static_cast<size_t>(i * kRows + row);
      const double error = static_cast<double>(w_[at]) - values_[at];
      const double asked = asked_.empty() ? 0.0F : asked_[at];
      sums[static_cast<size_t>(row)] += error * (gradients_[at] + asked);
    }
  }
  return sums;
}

// H is symmetric: its rows are read, one piece of memory each.
void RowTile::add_products(const Columns& to,
                           const Columns& by,
                           const float* numbers,
                           float* out) const {
  for (int64_t t = 0; t < by.count; t += kRowDepth) {
    kernels_.add_row_products({.a = gram().data() + to.begin * gram().stride() + by.begin + t,
                               .a_stride = gram().stride(),
                               .b = numbers + t * kRows,
                               .b_stride = kRows,
                               .c = out,
                               .c_stride = kRows,
                               .m = to.count,
                               .n = kRows,
                               .depth = std::min(kRowDepth, by.count - t)});
  }
}

}  // namespace nibble
