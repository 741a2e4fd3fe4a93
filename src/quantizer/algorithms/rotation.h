#pragma once

#include <cstdint>
#include <vector>

namespace nibble {

/// An orthogonal matrix R [n, n] that mixes all numbers of a row alike: signs, then a Hadamard
/// matrix over sqrt(n). Signs are chosen by a seed. Source: QuaRot (arXiv 2404.00456).
///
/// Orders are a power of two times one of Paley's, q + 1 for primes q = 3 mod 4 and 2 (q + 1) for
/// primes q = 1 mod 4: all sizes of models known to us. Where there is none, numbers are mixed in
/// blocks of the largest power of two in n.
class Rotation final {
 public:
  Rotation(int64_t n, uint64_t seed);

  [[nodiscard]] int64_t size() const { return n_; }
  /// Numbers that become mixed: n, or a block of it.
  [[nodiscard]] int64_t block() const { return small_ * power_; }
  /// row [n] := row R, in double precision.
  void apply(double* row) const;

 private:
  void mix_small(double* block) const;

  int64_t n_;
  int64_t small_ = 1;             // order of Paley's matrix
  int64_t power_ = 1;             // power of two that it is multiplied by
  std::vector<double> signs_;     // [n], each 1 or -1 over the root of block()
  std::vector<double> hadamard_;  // [small, small], of 1 and -1
};

}  // namespace nibble
