#include "quantizer/algorithms/rotation.h"

#include <cmath>
#include <optional>
#include <random>

#include "base/check.h"

namespace nibble {
namespace {

bool is_prime(int64_t q) {
  for (int64_t divisor = 2; divisor * divisor <= q; ++divisor) {
    if (q % divisor == 0) {
      return false;
    }
  }
  return q > 1;
}

/// 1 for squares modulo q, -1 for others, 0 for 0: [q].
std::vector<double> characters(int64_t q) {
  std::vector<double> chi(static_cast<size_t>(q), -1.0);
  chi[0] = 0.0;
  for (int64_t i = 1; i < q; ++i) {
    chi[static_cast<size_t>(i * i % q)] = 1.0;
  }
  return chi;
}

/// Paley's matrix of order q + 1: 0 on the diagonal, else 1 or -1; its square is q or -q.
std::vector<double> conference(int64_t q) {
  const std::vector<double> chi = characters(q);
  const int64_t n = q + 1;
  std::vector<double> matrix(static_cast<size_t>(n * n), 0.0);
  const double left = q % 4 == 1 ? 1.0 : -1.0;
  for (int64_t i = 1; i < n; ++i) {
    matrix[static_cast<size_t>(i)] = 1.0;
    matrix[static_cast<size_t>(i * n)] = left;
    for (int64_t j = 1; j < n; ++j) {
      matrix[static_cast<size_t>(i * n + j)] = chi[static_cast<size_t>((i - j + q) % q)];
    }
  }
  return matrix;
}

/// A Hadamard matrix of order n by Paley's two constructions; empty where neither has one.
std::vector<double> paley(int64_t n) {
  if (n == 1) {
    return {1.0};
  }
  if (n % 4 == 0 && (n - 1) % 4 == 3 && is_prime(n - 1)) {
    std::vector<double> matrix = conference(n - 1);
    for (int64_t i = 0; i < n; ++i) {
      matrix[static_cast<size_t>(i * n + i)] = 1.0;
    }
    return matrix;
  }
  const int64_t half = n / 2;
  if (n % 4 != 0 || (half - 1) % 4 != 1 || !is_prime(half - 1)) {
    return {};
  }
  const std::vector<double> inner = conference(half - 1);
  std::vector<double> matrix(static_cast<size_t>(n * n));
  constexpr double kZero[2][2] = {{1, -1}, {-1, -1}};
  constexpr double kOne[2][2] = {{1, 1}, {1, -1}};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double entry = inner[static_cast<size_t>((i / 2) * half + j / 2)];
      matrix[static_cast<size_t>(i * n + j)] =
          entry == 0.0 ? kZero[i % 2][j % 2] : entry * kOne[i % 2][j % 2];
    }
  }
  return matrix;
}

}  // namespace

Rotation::Rotation(int64_t n, uint64_t seed) : n_(n) {
  CHECK(n > 0);
  const int64_t largest_power = n & -n;
  power_ = largest_power;
  hadamard_ = {1.0};
  for (int64_t power = largest_power; power >= 1; power /= 2) {
    if (std::vector<double> found = paley(n / power); !found.empty()) {
      small_ = n / power;
      power_ = power;
      hadamard_ = std::move(found);
      break;
    }
  }
  std::mt19937_64 random(seed);
  const double size = 1.0 / std::sqrt(static_cast<double>(block()));
  for (int64_t i = 0; i < n; ++i) {
    signs_.push_back((random() >> 63U) != 0 ? size : -size);
  }
}

// Numbers of a block lie in `small_` runs of `power_`: sums within runs, then over them.
void Rotation::apply(double* row) const {
  for (int64_t i = 0; i < n_; ++i) {
    row[i] *= signs_[static_cast<size_t>(i)];
  }
  for (int64_t half = 1; half < power_; half *= 2) {
    for (int64_t first = 0; first < n_; first += 2 * half) {
      for (int64_t i = first; i < first + half; ++i) {
        const double a = row[i];
        const double b = row[i + half];
        row[i] = a + b;
        row[i + half] = a - b;
      }
    }
  }
  for (int64_t first = 0; small_ > 1 && first < n_; first += block()) {
    mix_small(row + first);
  }
}

void Rotation::mix_small(double* block) const {
  std::vector<double> mixed(static_cast<size_t>(this->block()), 0.0);
  for (int64_t from = 0; from < small_; ++from) {
    for (int64_t to = 0; to < small_; ++to) {
      const double sign = hadamard_[static_cast<size_t>(from * small_ + to)];
      const double* in = block + from * power_;
      double* out = mixed.data() + to * power_;
      for (int64_t i = 0; i < power_; ++i) {
        out[i] += sign * in[i];
      }
    }
  }
  std::copy(mixed.begin(), mixed.end(), block);
}

}  // namespace nibble
