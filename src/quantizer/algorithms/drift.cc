#include "quantizer/algorithms/drift.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/huge_pages.h"
#include "base/math.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kDepth = 256;  // rows of a sum in single precision
constexpr int64_t kPiece = 96;   // columns that one thread takes at once
constexpr int64_t kRows = 64;    // of Z, likewise
constexpr int64_t kBlock =
    64;  // columns that are solved before those in front are brought up to date

/// Some rows of Z, one column after the other from the last on.
class RowsToSolve final {
 public:
  RowsToSolve(const Drift& drift, const ColumnFactor& factor)
      : drift_(drift),
        factor_(factor),
        kernels_(*rows::find_row_kernels("auto").value()),
        y_(static_cast<size_t>(drift.k() * kRows)),
        turned_(static_cast<size_t>(kBlock * drift.stride())) {}

  void solve(int64_t first, float* z) {
    const int64_t k = drift_.k();
    const int64_t count = std::min(kRows, k - first);
    std::fill(y_.begin(), y_.end(), 0.0F);
    for (int64_t row = 0; row < count; ++row) {
      const float* from =
          drift_.data() + factor_.order[static_cast<size_t>(first + row)] * drift_.stride();
      for (int64_t j = 0; j < k; ++j) {
        y_[static_cast<size_t>(j * kRows + row)] = from[factor_.order[static_cast<size_t>(j)]];
      }
    }
    for (int64_t end = k; end > 0; end -= (end - 1) % kBlock + 1) {
      solve_block((end - 1) / kBlock * kBlock, end);
    }
    for (int64_t row = 0; row < count; ++row) {
      float* to = z + (first + row) * drift_.stride();
      for (int64_t j = 0; j < k; ++j) {
        to[j] = kDriftShare * y_[static_cast<size_t>(j * kRows + row)];
      }
    }
  }

 private:
  /// Columns [begin, end), given those from `end` on; then what they take from those in front.
  void solve_block(int64_t begin, int64_t end) {
    for (int64_t j = end - 1; j >= begin; --j) {
      float* y = y_.data() + j * kRows;
      const float* r = factor_.triangle.data() + j * factor_.stride;
      for (int64_t t = j + 1; t < end; ++t) {
        const float* later = y_.data() + t * kRows;
        for (int64_t row = 0; row < kRows; ++row) {
          y[row] -= r[t] * later[row];
        }
      }
      for (int64_t row = 0; row < kRows; ++row) {
        y[row] /= r[j];
      }
    }
    if (begin == 0) {
      return;
    }
    for (int64_t i = 0; i < begin; ++i) {
      const float* r = factor_.triangle.data() + i * factor_.stride;
      for (int64_t t = begin; t < end; ++t) {
        turned_[static_cast<size_t>((t - begin) * drift_.stride() + i)] = r[t];
      }
    }
    kernels_.add_products({.a = turned_.data(),
                           .a_stride = drift_.stride(),
                           .b = y_.data() + begin * kRows,
                           .b_stride = kRows,
                           .c = y_.data(),
                           .c_stride = kRows,
                           .m = begin,
                           .n = kRows,
                           .depth = end - begin,
                           .sign = -1});
  }

  const Drift& drift_;
  const ColumnFactor& factor_;
  const rows::RowKernels& kernels_;
  std::vector<float> y_;       // [k, kRows]
  std::vector<float> turned_;  // [kBlock, stride]: of the factor's rows in front of a block
};

}  // namespace

Drift::Drift(int64_t k) : k_(k), stride_(ceil_div(k, int64_t{rows::kLanes}) * rows::kLanes) {
  CHECK_GT(k, 0);
  const auto count = static_cast<size_t>(k * stride_);
  reserve_in_huge_pages(sums_, count);
  sums_.resize(count);
}

void Drift::add(const Rows& rows, ThreadPool& pool) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  padded_.resize(static_cast<size_t>(kDepth * stride_));
  changes_.resize(padded_.size());
  for (int64_t begin = 0; begin < rows.count; begin += kDepth) {
    const int64_t depth = std::min(kDepth, rows.count - begin);
    for (int64_t row = 0; row < depth; ++row) {
      const float* x = rows.x + (begin + row) * k_;
      const float* wanted = rows.wanted + (begin + row) * k_;
      for (int64_t i = 0; i < k_; ++i) {
        const auto at = static_cast<size_t>(row * stride_ + i);
        padded_[at] = x[i];
        changes_[at] = wanted[i] - x[i];
      }
    }
    pool.parallel_for(ceil_div(k_, kPiece), [&](int64_t piece, int) {
      const int64_t i = piece * kPiece;
      kernels.add_products({.a = changes_.data() + i,
                            .a_stride = stride_,
                            .b = padded_.data(),
                            .b_stride = stride_,
                            .c = sums_.data() + i * stride_,
                            .c_stride = stride_,
                            .m = std::min(kPiece, k_ - i),
                            .n = stride_,
                            .depth = depth});
    });
  }
}

void Drift::add_sums(const Drift& other, double factor) {
  CHECK_EQ(other.k(), k_);
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i] += static_cast<float>(factor * other.sums_[i]);
  }
}

bool Drift::finite() const {
  return std::all_of(sums_.begin(), sums_.end(), [](float sum) { return std::isfinite(sum); });
}

std::vector<float> solve_drift(const Drift& drift, const ColumnFactor& factor, ThreadPool& pool) {
  CHECK_EQ(drift.stride(), factor.stride);
  const auto count = static_cast<size_t>(drift.k() * drift.stride());
  std::vector<float> z;
  reserve_in_huge_pages(z, count);
  z.resize(count);
  std::vector<std::unique_ptr<RowsToSolve>> work(static_cast<size_t>(pool.threads()));
  pool.parallel_for(ceil_div(drift.k(), kRows), [&](int64_t piece, int thread) {
    auto& mine = work[static_cast<size_t>(thread)];
    if (mine == nullptr) {
      mine = std::make_unique<RowsToSolve>(drift, factor);
    }
    mine->solve(piece * kRows, z.data());
  });
  return z;
}

}  // namespace nibble
