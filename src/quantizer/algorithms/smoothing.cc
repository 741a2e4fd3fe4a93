#include "quantizer/algorithms/smoothing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/math.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/rtn.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kColumns = 64;  // outputs that one thread computes at once
constexpr int64_t kDepth = 256;

/// [rows, k] -> [k, stride], padded by zeros.
std::vector<float> transposed(const float* x, int64_t rows, int64_t k, int64_t stride) {
  std::vector<float> out(static_cast<size_t>(k * stride), 0.0F);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      out[static_cast<size_t>(i * stride + row)] = x[row * k + i];
    }
  }
  return out;
}

/// Products of all rows with all rows of the weights, [rows, stride of w].
std::vector<float> multiply(const std::vector<float>& x,
                            const std::vector<float>& w,
                            int64_t k,
                            ThreadPool& pool) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  const auto m = static_cast<int64_t>(x.size()) / k;
  const auto n = static_cast<int64_t>(w.size()) / k;
  std::vector<float> y(static_cast<size_t>(m * n), 0.0F);
  pool.parallel_for(ceil_div(n, kColumns), [&](int64_t piece, int) {
    const int64_t first = piece * kColumns;
    for (int64_t i = 0; i < k; i += kDepth) {
      kernels.add_products({.a = x.data() + i * m,
                            .a_stride = m,
                            .b = w.data() + i * n + first,
                            .b_stride = n,
                            .c = y.data() + first,
                            .c_stride = n,
                            .m = m,
                            .n = std::min(kColumns, n - first),
                            .depth = std::min(kDepth, k - i)});
    }
  });
  return y;
}

/// Tries factors on one site.
class Trial final {
 public:
  Trial(const FactorSearch& search, ThreadPool& pool) : search_(search), pool_(pool) {
    const int64_t rows = search.site.sample_rows();
    const std::vector<float> x = transposed(search.site.sample.data(), rows, k(), rows);
    for (const MatrixToRound& matrix : search.matrices) {
      const int64_t stride = round_up(matrix.n, int64_t{16});
      exact_.push_back(multiply(x, transposed(matrix.w, matrix.n, k(), stride), k(), pool));
    }
  }

  /// Squared difference of the outputs over their squares, summed over rows, so that a row of large
  /// numbers counts no more than others. factors [k].
  [[nodiscard]] double error(const std::vector<float>& factors) const {
    const int64_t rows = search_.site.sample_rows();
    std::vector<float> x = search_.site.sample;
    for (int64_t i = 0; i < std::ssize(x); ++i) {
      x[static_cast<size_t>(i)] /= factors[static_cast<size_t>(i % k())];
    }
    round_sample(x);
    x = transposed(x.data(), rows, k(), rows);
    double sum = 0;
    for (size_t index = 0; index < search_.matrices.size(); ++index) {
      sum += error_of(index, x, factors);
    }
    return sum;
  }

 private:
  [[nodiscard]] int64_t k() const { return search_.site.k(); }

  /// As the product rounds its rows.
  void round_sample(std::vector<float>& x) const {
    const int64_t rows = search_.site.sample_rows();
    const int block = search_.blocks.block;
    if (!in_blocks(search_.act)) {
      round_activations(search_.act, {x.data(), rows, k()}, pool_);
      return;
    }
    CHECK_EQ(k() % block, 0);
    const std::vector<int32_t> order = largest_first(x);
    const auto blocks = static_cast<size_t>(k() / block);
    const auto wider = static_cast<size_t>(
        std::lround(search_.blocks.outlier_share * static_cast<double>(blocks)));
    std::vector<float> row(static_cast<size_t>(k()));
    for (float* at = x.data(); at < x.data() + std::ssize(x); at += k()) {
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = at[order[i]];
      }
      round_blocks_of(row.data(), wider);
      for (size_t i = 0; i < row.size(); ++i) {
        at[order[i]] = row[i];
      }
    }
  }

  /// A row, of whose blocks the first have the more bits.
  void round_blocks_of(float* row, size_t wider) const {
    const int64_t block = search_.blocks.block;
    constexpr float kClip = 0.9F;
    const bool to_bf16 = search_.act == ActFormat::kBf16Blocks;
    const int64_t first_low = static_cast<int64_t>(wider) * block;
    const float of_low = largest_magnitude(row + first_low, k() - first_low);
    for (int64_t at = 0; at < k(); at += block) {
      float* x = row + at;
      if (to_bf16 && at < first_low) {
        round_to_fixed(fixed_unit(largest_magnitude(x, block)), x, block);
      } else if (to_bf16) {
        round_block(block_codes(8, 1.0F, of_low), x, block);
      } else {
        round_block(block_codes(at < first_low ? 8 : 4, kClip, largest_magnitude(x, block)), x,
                    block);
      }
    }
  }

  [[nodiscard]] std::vector<int32_t> largest_first(const std::vector<float>& x) const {
    std::vector<double> squares(static_cast<size_t>(k()), 0.0);
    for (size_t i = 0; i < x.size(); ++i) {
      const auto number = static_cast<double>(x[i]);
      squares[i % squares.size()] += number * number;
    }
    std::vector<int32_t> order(squares.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
      return squares[static_cast<size_t>(a)] > squares[static_cast<size_t>(b)];
    });
    return order;
  }

  [[nodiscard]] double error_of(size_t index,
                                const std::vector<float>& x,
                                const std::vector<float>& factors) const {
    MatrixToRound matrix = search_.matrices[index];
    std::vector<float> w(matrix.w, matrix.w + matrix.n * k());
    for (int64_t i = 0; i < std::ssize(w); ++i) {
      w[static_cast<size_t>(i)] *= factors[static_cast<size_t>(i % k())];
    }
    matrix.w = w.data();
    RoundedMatrix rounded;
    round_to_nearest(matrix, nullptr, rounded, pool_);
    const int64_t stride = round_up(matrix.n, int64_t{16});
    const std::vector<float> y =
        multiply(x, transposed(rounded.values.data(), matrix.n, k(), stride), k(), pool_);
    double sum = 0;
    for (size_t row = 0; row < y.size(); row += static_cast<size_t>(stride)) {
      double error = 0;
      double size = 0;
      for (size_t i = row; i < row + static_cast<size_t>(stride); ++i) {
        const auto exact = static_cast<double>(exact_[index][i]);
        error += (static_cast<double>(y[i]) - exact) * (static_cast<double>(y[i]) - exact);
        size += exact * exact;
      }
      sum += size > 0 ? error / size : 0;
    }
    return sum;
  }

  const FactorSearch& search_;
  ThreadPool& pool_;
  std::vector<std::vector<float>> exact_;  // by matrix: [rows, n]
};

/// Channels that share a factor have the largest of their numbers.
std::vector<float> shared(const std::vector<float>& numbers,
                          const std::vector<int32_t>& factor_of) {
  if (factor_of.empty()) {
    return numbers;
  }
  std::vector<float> out(
      static_cast<size_t>(*std::max_element(factor_of.begin(), factor_of.end())) + 1, 0.0F);
  for (size_t i = 0; i < numbers.size(); ++i) {
    float& largest = out[static_cast<size_t>(factor_of[i])];
    largest = std::max(largest, numbers[i]);
  }
  return out;
}

std::vector<float> expanded(const std::vector<float>& factors,
                            const std::vector<int32_t>& factor_of) {
  if (factor_of.empty()) {
    return factors;
  }
  std::vector<float> out;
  out.reserve(factor_of.size());
  for (const int32_t index : factor_of) {
    out.push_back(factors[static_cast<size_t>(index)]);
  }
  return out;
}

std::vector<float> largest_weights(const FactorSearch& search) {
  std::vector<float> largest(static_cast<size_t>(search.site.k()), 0.0F);
  for (const MatrixToRound& matrix : search.matrices) {
    for (int64_t i = 0; i < matrix.n * matrix.k; ++i) {
      float& most = largest[static_cast<size_t>(i % matrix.k)];
      most = std::max(most, std::fabs(matrix.w[i]));
    }
  }
  return largest;
}

/// Factors whose smallest and largest have a product of 1; 1 for channels that are always 0.
std::vector<float> centred_factors(const std::vector<double>& logarithms) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const double x : logarithms) {
    if (std::isfinite(x)) {
      low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  std::vector<float> factors;
  for (const double x : logarithms) {
    const double centred = std::isfinite(x) ? x - (low + high) / 2 : 0.0;
    factors.push_back(static_cast<float>(std::exp2(centred)));
  }
  return factors;
}

/// The best factors that were tried.
class FactorTrials final {
 public:
  FactorTrials(const FactorSearch& search, ThreadPool& pool)
      : search_(search),
        trial_(search, pool),
        weights_(shared(largest_weights(search), search.factor_of)),
        best_(weights_.size(), 1.0F),
        least_(trial_.error(expanded(best_, search.factor_of))) {}

  /// activation^exponent, and by kLargest over weight^(1 - exponent). Returns the error.
  double attempt(const std::vector<float>& activations, double exponent) {
    std::vector<double> logarithms(activations.size());
    for (size_t i = 0; i < logarithms.size(); ++i) {
      logarithms[i] = exponent * std::log2(static_cast<double>(activations[i]));
      if (search_.rule == FactorRule::kLargest) {
        logarithms[i] -= (1 - exponent) * std::log2(static_cast<double>(weights_[i]));
      }
    }
    std::vector<float> factors = centred_factors(logarithms);
    const double error = trial_.error(expanded(factors, search_.factor_of));
    if (error < least_) {
      least_ = error;
      best_ = std::move(factors);
    }
    return error;
  }

  [[nodiscard]] const std::vector<float>& best() const { return best_; }

 private:
  const FactorSearch& search_;
  Trial trial_;
  std::vector<float> weights_;
  std::vector<float> best_;
  double least_;
};

/// Tenths, and then what lies halfway to the neighbours of the best.
void try_exponents(const std::vector<float>& activations, FactorTrials& trials) {
  constexpr double kStep = 0.1;
  double best = 0;
  double least = INFINITY;
  for (int i = 1; i <= 9; ++i) {
    const double error = trials.attempt(activations, kStep * i);
    best = error < least ? kStep * i : best;
    least = std::min(least, error);
  }
  trials.attempt(activations, best - kStep / 2);
  trials.attempt(activations, best + kStep / 2);
}

}  // namespace

std::vector<float> search_factors(const FactorSearch& search, ThreadPool& pool) {
  std::vector<float> means;
  for (const double sum : search.site.sums) {
    means.push_back(static_cast<float>(sum));
  }
  means = shared(means, search.factor_of);
  FactorTrials trials(search, pool);
  if (search.rule == FactorRule::kLargest) {
    try_exponents(shared(search.site.largest, search.factor_of), trials);
    try_exponents(means, trials);
    return trials.best();
  }
  constexpr double kStep = 0.05;
  for (int i = 1; i <= 20; ++i) {
    trials.attempt(means, kStep * i);
  }
  return trials.best();
}

}  // namespace nibble
