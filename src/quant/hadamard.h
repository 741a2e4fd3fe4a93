#pragma once

#include <bit>
#include <cstdint>

// The turn of heads that a cache of few bits holds, and of rows that a product rounds: each number
// becomes a sum of all with signs, so that a channel that is large in every token widens no row's
// range alone. Source: the Hadamard rotations of QuaRot (arXiv 2404.00456).
namespace nibble {

/// Heads are turned in blocks of so many numbers: the largest power of two in their size.
[[nodiscard]] constexpr int64_t hadamard_block(int64_t dim) { return dim & -dim; }

/// Whether number i of a block changes its sign first: the sequence of Rudin and Shapiro, as a sum
/// of all numbers with fewer changes would put an offset that they share into one number.
[[nodiscard]] constexpr bool hadamard_flips(int64_t i) {
  return (std::popcount(static_cast<uint64_t>(i & (i >> 1))) & 1) != 0;
}

/// Each `block` neighbours of x [dim] become H x, where H has the entries
/// (-1)^popcount(i & j) / sqrt(block): its own inverse, the matrix of Sylvester. block is a power
/// of two that divides dim. Sums of two numbers, of neighbours at first, then at growing distances;
/// last the factor: kernels keep this order, so that all give the same bits.
void turn_blocks(float* x, int64_t dim, int64_t block);
void turn_blocks(double* x, int64_t dim, int64_t block);

/// x [dim] becomes H D x, where D are the signs, and H has a block's entries
/// (-1)^popcount(i & j) / sqrt(block). In F32: sums of two numbers, of neighbours at first.
void hadamard(float* x, int64_t dim);

/// The inverse: D H x.
void inverse_hadamard(float* x, int64_t dim);

}  // namespace nibble
