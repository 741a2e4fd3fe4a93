#pragma once

#include <bit>
#include <cstdint>

// The turn of heads that a cache of few bits holds: each number becomes a sum of all with signs, so
// that a channel that is large in every token widens no row's range alone. Source: the Hadamard
// rotation of QuaRot (Ashkboos and others, 2024), after signs.
namespace nibble {

/// Heads are turned in blocks of so many numbers: the largest power of two in their size.
[[nodiscard]] constexpr int64_t hadamard_block(int64_t dim) { return dim & -dim; }

/// Whether number i of a block changes its sign first: the sequence of Rudin and Shapiro, as a sum
/// of all numbers with fewer changes would put an offset that they share into one number.
[[nodiscard]] constexpr bool hadamard_flips(int64_t i) {
  return (std::popcount(static_cast<uint64_t>(i & (i >> 1))) & 1) != 0;
}

/// x [dim] becomes H D x, where D are the signs, and H has a block's entries
/// (-1)^popcount(i & j) / sqrt(block). In F32: sums of two numbers, of neighbours at first.
void hadamard(float* x, int64_t dim);

/// The inverse: D H x.
void inverse_hadamard(float* x, int64_t dim);

}  // namespace nibble
