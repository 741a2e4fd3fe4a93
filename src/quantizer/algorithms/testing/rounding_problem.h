#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "quant/codec.h"
#include "quantizer/algorithms/gptq.h"
#include "quantizer/algorithms/rounding.h"
#include "quantizer/algorithms/rtn.h"

// What tests of roundings have in common: random matrices and rows, and published algorithms in
// double precision.
namespace nibble {

using Matrix = std::vector<std::vector<double>>;

inline std::vector<float> gaussian(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

/// Rows whose columns are correlated and of different sizes, as activations are.
inline std::vector<float> correlated(int64_t rows, int64_t k, uint32_t seed) {
  std::vector<float> x = gaussian(rows * k, seed);
  const std::vector<float> sizes = gaussian(k, seed + 1);
  for (int64_t row = 0; row < rows; ++row) {
    float* at = x.data() + row * k;
    for (int64_t i = 1; i < k; ++i) {
      at[i] += 0.8F * at[i - 1];
    }
    for (int64_t i = 0; i < k; ++i) {
      at[i] *= std::exp(sizes[static_cast<size_t>(i)]);
    }
  }
  return x;
}

inline Gram gram_of(const std::vector<float>& x, int64_t k, ThreadPool& pool) {
  Gram gram(k);
  gram.add(x.data(), std::ssize(x) / k, pool);
  gram.finish();
  return gram;
}

/// A matrix with its encoder.
struct Problem {
  std::vector<float> w;
  std::unique_ptr<MatrixEncoder> encoder;
  MatrixToRound matrix;

  Problem(const QuantScheme& scheme, int64_t n, int64_t k, uint32_t seed)
      : w(gaussian(n * k, seed)),
        encoder(make_encoder({.scheme = scheme, .dialect = default_dialect(scheme)}, n, k).value()),
        matrix{w.data(), n, k, scheme.weight, encoder.get()} {}
};

/// Rounded by columns, not refined.
inline RoundedMatrix by_columns(const Problem& problem,
                                Rounding rounding,
                                const SiteStatistics& site,
                                ThreadPool& pool) {
  RoundedMatrix rounded;
  rounded.rounding = rounding;
  choose_all_scales(problem.matrix, site.importance.data(), rounded, pool);
  round_by_columns(problem.matrix, site, rounded, pool);
  return rounded;
}

inline std::vector<QuantScheme> schemes() {
  std::vector<QuantScheme> found;
  for (const QuantScheme& scheme : all_schemes()) {
    if (check_rounding(Rounding::kGptq, scheme).ok()) {
      found.push_back(scheme);
    }
  }
  return found;
}

// ---- GPTQ as it is published, in double precision: by the Cholesky factor of the inverse.

inline Matrix inverse(Matrix a) {
  const size_t k = a.size();
  Matrix b(k, std::vector<double>(k));
  for (size_t i = 0; i < k; ++i) {
    b[i][i] = 1;
  }
  for (size_t i = 0; i < k; ++i) {
    size_t pivot = i;
    for (size_t r = i; r < k; ++r) {
      pivot = std::fabs(a[r][i]) > std::fabs(a[pivot][i]) ? r : pivot;
    }
    std::swap(a[i], a[pivot]);
    std::swap(b[i], b[pivot]);
    const double scale = a[i][i];
    for (size_t j = 0; j < k; ++j) {
      a[i][j] /= scale;
      b[i][j] /= scale;
    }
    for (size_t r = 0; r < k; ++r) {
      const double factor = a[r][i];
      for (size_t j = 0; r != i && j < k; ++j) {
        a[r][j] -= factor * a[i][j];
        b[r][j] -= factor * b[i][j];
      }
    }
  }
  return b;
}

/// U, upper, with U^T U = a.
inline Matrix upper_cholesky(const Matrix& a) {
  const size_t k = a.size();
  Matrix u(k, std::vector<double>(k));
  for (size_t i = 0; i < k; ++i) {
    for (size_t j = i; j < k; ++j) {
      double sum = a[i][j];
      for (size_t t = 0; t < i; ++t) {
        sum -= u[t][i] * u[t][j];
      }
      u[i][j] = i == j ? std::sqrt(sum) : sum / u[i][i];
    }
  }
  return u;
}

inline double nearest(const WeightFormat& format, double w, double scale, double zero) {
  if (format.code == WeightCode::kFp4E2M1) {
    return static_cast<double>(decode_e2m1(encode_e2m1(static_cast<float>(w / scale)))) * scale;
  }
  const CodeRange range = code_range(format.code);
  const double code = std::nearbyint(std::clamp(w / scale + zero, static_cast<double>(range.low),
                                                static_cast<double>(range.high)));
  return (code - zero) * scale;
}

/// Rows that a product multiplies, and those that it would without roundings in front of it: both
/// [rows, k].
struct PublishedRows {
  const std::vector<float>& x;
  const std::vector<float>& wanted;
};

/// GPTQ by the updates that the paper writes down, and where the two differ with half of what makes
/// up for the difference, W D H^-1, asked for in front: D = (F - X)^T X.
inline std::vector<double> published_values(const MatrixToRound& matrix,
                                            const PublishedRows& rows,
                                            const RoundedMatrix& scales) {
  const auto k = static_cast<size_t>(matrix.k);
  Matrix h(k, std::vector<double>(k));
  Matrix d(k, std::vector<double>(k));  // (F - X)^T X
  for (size_t row = 0; row < rows.x.size(); row += k) {
    for (size_t i = 0; i < k; ++i) {
      for (size_t j = 0; j < k; ++j) {
        const double x = rows.x[row + j];
        h[i][j] += rows.x[row + i] * x;
        d[i][j] += (static_cast<double>(rows.wanted[row + i]) - rows.x[row + i]) * x;
      }
    }
  }
  double mean = 0;
  for (size_t i = 0; i < k; ++i) {
    mean += h[i][i] / static_cast<double>(k);
  }
  std::vector<size_t> order(k);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return h[a][a] > h[b][b]; });
  Matrix ordered(k, std::vector<double>(k));
  for (size_t i = 0; i < k; ++i) {
    for (size_t j = 0; j < k; ++j) {
      ordered[i][j] = h[order[i]][order[j]] + (i == j ? 0.01 * mean : 0.0);
    }
  }
  const Matrix u = upper_cholesky(inverse(ordered));
  Matrix asked(k, std::vector<double>(k));  // half of D H^-1
  const Matrix inverted = inverse(ordered);
  for (size_t i = 0; i < k; ++i) {
    for (size_t j = 0; j < k; ++j) {
      for (size_t t = 0; t < k; ++t) {
        asked[i][j] += 0.5 * d[order[i]][order[t]] * inverted[t][j];
      }
    }
  }
  const auto groups = static_cast<size_t>(matrix.format.groups(matrix.k));
  std::vector<double> values(static_cast<size_t>(matrix.n) * k);
  for (size_t row = 0; row < static_cast<size_t>(matrix.n); ++row) {
    std::vector<double> w(k);
    for (size_t i = 0; i < k; ++i) {
      w[i] += matrix.w[row * k + order[i]];
      for (size_t j = 0; j < k; ++j) {
        w[j] += matrix.w[row * k + order[i]] * asked[i][j];
      }
    }
    for (size_t i = 0; i < k; ++i) {
      const size_t at = row * groups + order[i] / (k / groups);
      const double reached = w[i];
      const double q = nearest(matrix.format, reached, scales.scales[at],
                               scales.zeros.empty() ? 0.0 : scales.zeros[at]);
      values[row * k + order[i]] = q;
      const double error = (reached - q) / u[i][i];
      for (size_t j = i; j < k; ++j) {
        w[j] -= error * u[i][j];
      }
    }
  }
  return values;
}

/// |w f - values x|^2 over all rows; of GPTQ f is x.
template <typename Number>
double measured_error(const MatrixToRound& matrix,
                      const PublishedRows& rows,
                      const std::vector<Number>& values) {
  const auto k = static_cast<size_t>(matrix.k);
  double sum = 0;
  for (size_t row = 0; row < rows.x.size(); row += k) {
    for (size_t n = 0; n < static_cast<size_t>(matrix.n); ++n) {
      double dot = 0;
      for (size_t i = 0; i < k; ++i) {
        dot += static_cast<double>(matrix.w[n * k + i]) * rows.wanted[row + i] -
               static_cast<double>(values[n * k + i]) * rows.x[row + i];
      }
      sum += dot * dot;
    }
  }
  return sum;
}

}  // namespace nibble
