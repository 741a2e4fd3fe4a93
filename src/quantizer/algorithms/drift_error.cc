#include "quantizer/algorithms/drift_error.h"

#include <algorithm>
#include <numeric>

#include "base/math.h"
#include "quantizer/algorithms/gptq.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kDepth = 256;

struct Memory {
  std::vector<float> weights;   // [k, kRows]
  std::vector<float> products;  // [k, kRows]
};

/// products := M^T weights of M [k, stride].
void multiply(const float* matrix, int64_t k, int64_t stride, Memory& memory) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  memory.products.assign(memory.weights.size(), 0.0F);
  for (int64_t t = 0; t < k; t += kDepth) {
    kernels.add_products({.a = matrix + t * stride,
                          .a_stride = stride,
                          .b = memory.weights.data() + t * kRows,
                          .b_stride = kRows,
                          .c = memory.products.data(),
                          .c_stride = kRows,
                          .m = k,
                          .n = kRows,
                          .depth = std::min(kDepth, k - t)});
  }
}

}  // namespace

DriftError::DriftError(const SiteStatistics& site, const ChangedWeights& weights, ThreadPool& pool)
    : w_(weights.w) {
  const Drift& drift = *site.drift_sums;
  const int64_t k = drift.k();
  const int64_t n = weights.n;
  products_.resize(static_cast<size_t>(n * k));
  std::vector<Memory> memory(static_cast<size_t>(pool.threads()));
  std::vector<double> parts(static_cast<size_t>(ceil_div(n, kRows)));
  pool.parallel_for(std::ssize(parts), [&](int64_t piece, int thread) {
    Memory& mine = memory[static_cast<size_t>(thread)];
    const int64_t first = piece * kRows;
    const int64_t count = std::min(kRows, n - first);
    mine.weights.assign(static_cast<size_t>(k * kRows), 0.0F);
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        mine.weights[static_cast<size_t>(i * kRows + row)] = w_[(first + row) * k + i];
      }
    }
    multiply(drift.data(), k, drift.stride(), mine);
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        products_[static_cast<size_t>((first + row) * k + i)] =
            mine.products[static_cast<size_t>(i * kRows + row)];
      }
    }
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        mine.weights[static_cast<size_t>(i * kRows + row)] =
            w_[(first + row) * k + site.factor->order[static_cast<size_t>(i)]];
      }
    }
    multiply(site.drift.data(), k, drift.stride(), mine);
    double sum = 0;
    for (const float product : mine.products) {
      sum += static_cast<double>(product) * static_cast<double>(product);
    }
    parts[static_cast<size_t>(piece)] = sum;
  });
  constexpr double kShare = kDriftShare;  // which site.drift holds
  constant_ = std::accumulate(parts.begin(), parts.end(), 0.0) / (kShare * kShare);
}

double DriftError::of(const float* values) const {
  double sum = 0;
  for (size_t i = 0; i < products_.size(); ++i) {
    sum += static_cast<double>(products_[i]) * (static_cast<double>(w_[i]) - values[i]);
  }
  return 2 * sum + constant_;
}

}  // namespace nibble
