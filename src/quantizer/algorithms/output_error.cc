#include "quantizer/algorithms/output_error.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/math.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kDepth = 256;

struct Memory {
  std::vector<float> errors;    // [k, kRows]
  std::vector<float> products;  // [k, kRows]: H E^T
};

}  // namespace

double output_error(const Gram& gram, const ChangedWeights& weights, ThreadPool& pool) {
  const float* w = weights.w;
  const float* values = weights.values;
  const int64_t n = weights.n;
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  const int64_t k = gram.k();
  std::vector<Memory> memory(static_cast<size_t>(pool.threads()));
  std::vector<double> parts(static_cast<size_t>(ceil_div(n, kRows)));
  pool.parallel_for(std::ssize(parts), [&](int64_t piece, int thread) {
    Memory& mine = memory[static_cast<size_t>(thread)];
    mine.errors.assign(static_cast<size_t>(k * kRows), 0.0F);
    mine.products.assign(mine.errors.size(), 0.0F);
    const int64_t first = piece * kRows;
    for (int64_t row = 0; row < std::min(kRows, n - first); ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t at = (first + row) * k + i;
        mine.errors[static_cast<size_t>(i * kRows + row)] =
            values == nullptr ? w[at] : w[at] - values[at];
      }
    }
    for (int64_t t = 0; t < k; t += kDepth) {
      kernels.add_products({.a = gram.data() + t * gram.stride(),
                            .a_stride = gram.stride(),
                            .b = mine.errors.data() + t * kRows,
                            .b_stride = kRows,
                            .c = mine.products.data(),
                            .c_stride = kRows,
                            .m = k,
                            .n = kRows,
                            .depth = std::min(kDepth, k - t)});
    }
    double sum = 0;
    for (size_t i = 0; i < mine.errors.size(); ++i) {
      sum += static_cast<double>(mine.errors[i]) * static_cast<double>(mine.products[i]);
    }
    parts[static_cast<size_t>(piece)] = sum;
  });
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace nibble
