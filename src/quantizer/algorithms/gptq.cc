#include "quantizer/algorithms/gptq.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "quant/code_traits.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 64;      // of the matrix, that one thread takes at once
constexpr int64_t kColumns = 128;  // of a block
constexpr int64_t kDepth = 256;    // columns of a sum in single precision

rows::RowKernels::Columns columns_of(const rows::RowKernels& kernels, const WeightFormat& format) {
  if (format.code == WeightCode::kFp4E2M1) {
    return kernels.columns_fp4;
  }
  if (format.zero_points == ZeroPoints::kPerScale) {
    CHECK(format.code == WeightCode::kInt4);
    return kernels.columns_int4_zeros;
  }
  CHECK(is_integer(format.code));
  return format.code == WeightCode::kInt4 ? kernels.columns_int4 : kernels.columns_int8;
}

/// Some rows of a matrix while they are rounded, column by column in the factor's order.
class RowsInWork final {
 public:
  RowsInWork(const MatrixToRound& matrix, const SiteStatistics& site, RoundedMatrix& rounded)
      : matrix_(matrix),
        factor_(*site.factor),
        drift_(rounded.rounding == Rounding::kGptaq ? site.drift.data() : nullptr),
        rounded_(rounded),
        kernels_(*rows::find_row_kernels("auto").value()),
        groups_(matrix.format.groups(matrix.k)),
        w_(static_cast<size_t>(matrix.k * kRows)),
        sums_(w_.size()),
        values_(w_.size()),
        errors_(static_cast<size_t>(kColumns * kRows)),
        scales_(static_cast<size_t>(groups_ * kRows)),
        zeros_(scales_.size()) {}

  void round(int64_t first) {
    load(first);
    for (int64_t t = 0; drift_ != nullptr && t < matrix_.k; t += kDepth) {
      const auto at = static_cast<size_t>(t * kRows);
      add_to_rest(drift_ + t * factor_.stride, w_.data() + at, 0, std::min(kDepth, matrix_.k - t));
    }
    for (int64_t begin = 0; begin < matrix_.k; begin += kColumns) {
      round_block(begin, std::min(kColumns, matrix_.k - begin));
    }
    store(first);
  }

 private:
  void load(int64_t first) {
    const int64_t count = std::min(kRows, matrix_.n - first);
    std::fill(w_.begin(), w_.end(), 0.0F);
    std::fill(sums_.begin(), sums_.end(), 0.0F);
    std::fill(scales_.begin(), scales_.end(), 1.0F);
    std::fill(zeros_.begin(), zeros_.end(), 0.0F);
    for (int64_t row = 0; row < count; ++row) {
      const float* from = matrix_.w + (first + row) * matrix_.k;
      for (int64_t p = 0; p < matrix_.k; ++p) {
        w_[static_cast<size_t>(p * kRows + row)] = from[factor_.order[static_cast<size_t>(p)]];
      }
      for (int64_t g = 0; g < groups_; ++g) {
        const auto from_at = static_cast<size_t>((first + row) * groups_ + g);
        const auto to_at = static_cast<size_t>(g * kRows + row);
        scales_[to_at] = rounded_.scales[from_at];
        if (!rounded_.zeros.empty()) {
          zeros_[to_at] = rounded_.zeros[from_at];
        }
      }
    }
  }

  void round_block(int64_t begin, int64_t count) {
    const int64_t width = matrix_.k / groups_;
    const float* scales[kColumns];
    const float* zeros[kColumns];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t group = factor_.order[static_cast<size_t>(begin + j)] / width;
      scales[j] = scales_.data() + group * kRows;
      zeros[j] = zeros_.data() + group * kRows;
    }
    const float* triangle = factor_.triangle.data() + begin * factor_.stride;
    columns_of(kernels_, matrix_.format)({.w = w_.data() + begin * kRows,
                                          .sums = sums_.data() + begin * kRows,
                                          .errors = errors_.data(),
                                          .values = values_.data() + begin * kRows,
                                          .scales = scales,
                                          .zeros = rounded_.zeros.empty() ? nullptr : zeros,
                                          .factor = triangle + begin,
                                          .factor_stride = factor_.stride,
                                          .columns = count,
                                          .rows = kRows});
    add_to_rest(triangle, errors_.data(), begin + count, count);
  }

  /// What `count` rows of the factor or the drift add to the columns from `rest` on.
  void add_to_rest(const float* rows, const float* numbers, int64_t rest, int64_t count) {
    kernels_.add_products({.a = rows + rest,
                           .a_stride = factor_.stride,
                           .b = numbers,
                           .b_stride = kRows,
                           .c = sums_.data() + rest * kRows,
                           .c_stride = kRows,
                           .m = matrix_.k - rest,
                           .n = kRows,
                           .depth = count});
  }

  void store(int64_t first) {
    const int64_t count = std::min(kRows, matrix_.n - first);
    for (int64_t row = 0; row < count; ++row) {
      float* to = rounded_.values.data() + (first + row) * matrix_.k;
      for (int64_t p = 0; p < matrix_.k; ++p) {
        to[factor_.order[static_cast<size_t>(p)]] = values_[static_cast<size_t>(p * kRows + row)];
      }
    }
  }

  const MatrixToRound& matrix_;
  const ColumnFactor& factor_;
  const float* drift_;  // null: none
  RoundedMatrix& rounded_;
  const rows::RowKernels& kernels_;
  int64_t groups_;
  std::vector<float> w_;       // [k, kRows]
  std::vector<float> sums_;    // [k, kRows]
  std::vector<float> values_;  // [k, kRows]
  std::vector<float> errors_;  // [kColumns, kRows]
  std::vector<float> scales_;  // [groups, kRows]
  std::vector<float> zeros_;   // [groups, kRows]
};

}  // namespace

void round_by_columns(const MatrixToRound& matrix,
                      const SiteStatistics& site,
                      RoundedMatrix& rounded,
                      ThreadPool& pool) {
  CHECK_EQ(std::ssize(site.factor->order), matrix.k);
  rounded.values.resize(static_cast<size_t>(matrix.n * matrix.k));
  std::vector<std::unique_ptr<RowsInWork>> work(static_cast<size_t>(pool.threads()));
  pool.parallel_for(ceil_div(matrix.n, kRows), [&](int64_t piece, int thread) {
    auto& mine = work[static_cast<size_t>(thread)];
    if (mine == nullptr) {
      mine = std::make_unique<RowsInWork>(matrix, site, rounded);
    }
    mine->round(piece * kRows);
  });
}

}  // namespace nibble
