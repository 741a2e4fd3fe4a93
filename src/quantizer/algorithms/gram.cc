#include "quantizer/algorithms/gram.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/huge_pages.h"
#include "base/math.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kDepth = 256;  // rows of a sum in single precision
constexpr int64_t kPiece = 96;   // columns that one thread takes at once

}  // namespace

double mean_diagonal(std::span<const float> diagonal) {
  return std::accumulate(diagonal.begin(), diagonal.end(), 0.0) /
         static_cast<double>(diagonal.size());
}

Gram::Gram(int64_t k) : k_(k), stride_(ceil_div(k, int64_t{rows::kLanes}) * rows::kLanes) {
  CHECK_GT(k, 0);
  const auto count = static_cast<size_t>(k * stride_);
  reserve_in_huge_pages(sums_, count);
  sums_.resize(count);
}

void Gram::add(const float* x, int64_t rows, ThreadPool& pool) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  for (int64_t begin = 0; begin < rows; begin += kDepth) {
    const int64_t depth = std::min(kDepth, rows - begin);
    const float* from = x + begin * k_;
    if (stride_ != k_) {
      padded_.resize(static_cast<size_t>(kDepth * stride_));
      for (int64_t row = 0; row < depth; ++row) {
        std::copy_n(from + row * k_, k_, padded_.begin() + row * stride_);
      }
      from = padded_.data();
    }
    pool.parallel_for(ceil_div(k_, kPiece), [&](int64_t piece, int) {
      const int64_t i = piece * kPiece;
      kernels.add_products({.a = from + i,
                            .a_stride = stride_,
                            .b = from + i,
                            .b_stride = stride_,
                            .c = sums_.data() + i * stride_ + i,
                            .c_stride = stride_,
                            .m = std::min(kPiece, k_ - i),
                            .n = stride_ - i,
                            .depth = depth});
    });
  }
  rows_ += rows;
}

void Gram::add_sums(const Gram& other, double factor) {
  CHECK_EQ(other.k(), k_);
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i] += static_cast<float>(factor * other.sums_[i]);
  }
}

void Gram::finish() {
  for (int64_t i = 0; i < k_; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      sums_[static_cast<size_t>(i * stride_ + j)] = sums_[static_cast<size_t>(j * stride_ + i)];
    }
  }
}

std::vector<float> Gram::diagonal() const {
  std::vector<float> numbers(static_cast<size_t>(k_));
  for (int64_t i = 0; i < k_; ++i) {
    numbers[static_cast<size_t>(i)] = diagonal(i);
  }
  return numbers;
}

bool Gram::finite() const {
  return std::all_of(sums_.begin(), sums_.end(), [](float sum) { return std::isfinite(sum); });
}

}  // namespace nibble
