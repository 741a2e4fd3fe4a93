#include "quantizer/algorithms/output_error.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "base/math.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kBlock = 128;  // columns, and of a sum in single precision

/// Of up to 64 rows of E.
class RowErrors final {
 public:
  explicit RowErrors(const Gram& gram)
      : gram_(gram),
        kernels_(*rows::find_row_kernels("auto").value()),
        errors_(static_cast<size_t>(gram.k() * kRows)) {}

  void load(const ChangedWeights& weights, int64_t first) {
    std::fill(errors_.begin(), errors_.end(), 0.0F);
    const int64_t k = gram_.k();
    for (int64_t row = 0; row < std::min(kRows, weights.n - first); ++row) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t at = (first + row) * k + i;
        errors_[static_cast<size_t>(i * kRows + row)] =
            weights.values == nullptr ? weights.w[at] : weights.w[at] - weights.values[at];
      }
    }
  }

  /// trace(E H E^T): H is symmetric, so what is right of its blocks at the diagonal counts twice.
  [[nodiscard]] double trace() {
    double sum = 0;
    for (int64_t begin = 0; begin < gram_.k(); begin += kBlock) {
      std::fill(products_.begin(), products_.end(), 0.0F);
      for (int64_t t = begin + kBlock; t < gram_.k(); t += kBlock) {
        add_products(begin, t);
      }
      for (float& product : products_) {
        product *= 2;
      }
      add_products(begin, begin);
      const auto count = static_cast<size_t>(std::min(kBlock, gram_.k() - begin) * kRows);
      for (size_t i = 0; i < count; ++i) {
        sum += static_cast<double>(errors_[static_cast<size_t>(begin * kRows) + i]) *
               static_cast<double>(products_[i]);
      }
    }
    return sum;
  }

 private:
  /// Of the block of columns from `begin` on, with those from t on.
  void add_products(int64_t begin, int64_t t) {
    kernels_.add_row_products({.a = gram_.data() + begin * gram_.stride() + t,
                               .a_stride = gram_.stride(),
                               .b = errors_.data() + t * kRows,
                               .b_stride = kRows,
                               .c = products_.data(),
                               .c_stride = kRows,
                               .m = std::min(kBlock, gram_.k() - begin),
                               .n = kRows,
                               .depth = std::min(kBlock, gram_.k() - t)});
  }

  const Gram& gram_;
  const rows::RowKernels& kernels_;
  std::vector<float> errors_;  // [k, kRows]
  std::array<float, static_cast<size_t>(kBlock* kRows)> products_{};
};

}  // namespace

double output_error(const Gram& gram, const ChangedWeights& weights, ThreadPool& pool) {
  std::vector<std::unique_ptr<RowErrors>> work(static_cast<size_t>(pool.threads()));
  std::vector<double> parts(static_cast<size_t>(ceil_div(weights.n, kRows)));
  pool.parallel_for(std::ssize(parts), [&](int64_t piece, int thread) {
    auto& mine = work[static_cast<size_t>(thread)];
    if (mine == nullptr) {
      mine = std::make_unique<RowErrors>(gram);
    }
    mine->load(weights, piece * kRows);
    parts[static_cast<size_t>(piece)] = mine->trace();
  });
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace nibble
