#include "quantizer/algorithms/factor.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/huge_pages.h"
#include "base/math.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kPiece = 96;     // rows of what is left that one thread takes at once
constexpr int64_t kColumns = 256;  // of the block's rows, likewise
constexpr double kFirstDamping = 0.01;
constexpr double kDampingStep = 10;
constexpr int kMostSteps = 6;
constexpr double kFloor = 1e-6;  // of the largest sum

/// The square block at the diagonal, by itself.
bool factor_block(float* a, int64_t count, int64_t stride) {
  for (int64_t t = 0; t < count; ++t) {
    float* row = a + t * stride;
    if (!(row[t] > 0) || !std::isfinite(row[t])) {
      return false;
    }
    const float root = std::sqrt(row[t]);
    for (int64_t j = t; j < count; ++j) {
      row[j] /= root;
    }
    for (int64_t u = t + 1; u < count; ++u) {
      for (int64_t j = u; j < count; ++j) {
        a[u * stride + j] -= row[u] * row[j];
      }
    }
  }
  return true;
}

/// Columns [begin, end) of the block's rows, given the block.
void solve_columns(float* a, int64_t count, int64_t stride, std::pair<int64_t, int64_t> columns) {
  const auto [begin, end] = columns;
  for (int64_t t = 0; t < count; ++t) {
    float* row = a + t * stride;
    for (int64_t s = 0; s < t; ++s) {
      const float* above = a + s * stride;
      const float factor = above[t];
      for (int64_t j = begin; j < end; ++j) {
        row[j] -= factor * above[j];
      }
    }
    const float root = row[t];
    for (int64_t j = begin; j < end; ++j) {
      row[j] /= root;
    }
  }
}

/// Turns U of the reversed order into R: element (i, j) changes places with (k-1-j, k-1-i).
void reverse(float* a, int64_t k, int64_t stride) {
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = i; j < k - 1 - i; ++j) {
      std::swap(a[i * stride + j], a[(k - 1 - j) * stride + (k - 1 - i)]);
    }
  }
}

}  // namespace

bool factor_in_place(float* a, int64_t k, int64_t stride, ThreadPool& pool) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  for (int64_t p = 0; p < k; p += kBlock) {
    const int64_t count = std::min(kBlock, k - p);
    const int64_t rest = p + count;
    float* block = a + p * stride;
    if (!factor_block(block + p, count, stride)) {
      return false;
    }
    pool.parallel_for(ceil_div(stride - rest, kColumns), [&](int64_t piece, int) {
      const int64_t begin = rest - p + piece * kColumns;
      solve_columns(block + p, count, stride, {begin, std::min(begin + kColumns, stride - p)});
    });
    pool.parallel_for(ceil_div(k - rest, kPiece), [&](int64_t piece, int) {
      const int64_t i = rest + piece * kPiece;
      const int64_t j = i / rows::kLanes * rows::kLanes;
      kernels.add_products({.a = block + i,
                            .a_stride = stride,
                            .b = block + j,
                            .b_stride = stride,
                            .c = a + i * stride + j,
                            .c_stride = stride,
                            .m = std::min(kPiece, k - i),
                            .n = stride - j,
                            .depth = count,
                            .sign = -1});
    });
  }
  return true;
}

std::vector<int32_t> column_order(std::span<const float> diagonal) {
  std::vector<int32_t> order(diagonal.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return diagonal[static_cast<size_t>(a)] > diagonal[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<Damping> damping_steps(std::span<const float> diagonal) {
  const double mean = mean_diagonal(diagonal);
  const double largest = *std::ranges::max_element(diagonal);
  std::vector<Damping> steps;
  double share = kFirstDamping;
  for (int step = 0; step <= kMostSteps + 1; ++step, share *= kDampingStep) {
    steps.push_back({share, share * mean, step > kMostSteps ? kFloor * largest : 0.0});
  }
  return steps;
}

std::optional<ColumnFactor> make_column_factor(const Gram& gram, ThreadPool& pool) {
  const int64_t k = gram.k();
  const int64_t stride = gram.stride();
  if (!gram.finite()) {
    return std::nullopt;
  }
  const std::vector<float> diagonal = gram.diagonal();
  ColumnFactor factor;
  factor.stride = stride;
  factor.order = column_order(diagonal);
  reserve_in_huge_pages(factor.triangle, static_cast<size_t>(k * stride));
  for (const Damping& damping : damping_steps(diagonal)) {
    factor.damping = damping.share;
    factor.triangle.assign(static_cast<size_t>(k * stride), 0.0F);
    pool.parallel_for(k, [&](int64_t i, int) {
      const float* from = gram.data() + factor.order[static_cast<size_t>(k - 1 - i)] * stride;
      float* to = factor.triangle.data() + i * stride;
      for (int64_t j = i; j < k; ++j) {
        to[j] = from[factor.order[static_cast<size_t>(k - 1 - j)]];
      }
      const double alive = to[i] == 0.0F ? 1.0 : to[i];
      to[i] = static_cast<float>(std::max(alive, damping.floor) + damping.added);
    });
    if (factor_in_place(factor.triangle.data(), k, stride, pool)) {
      reverse(factor.triangle.data(), k, stride);
      return factor;
    }
  }
  return std::nullopt;
}

}  // namespace nibble
