#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// What rounding by columns needs of H, shared by all matrices of a site: an order of the columns
/// and an upper triangle R with R R^T = H + damping in that order. Row i of R says how an error of
/// column i is made good by later ones: the inverse of R is the Cholesky factor of the inverse of H
/// that GPTQ is described with (arXiv 2210.17323), so both round alike.
struct ColumnFactor {
  std::vector<int32_t> order;   // columns as they are rounded: those of the largest sums first
  std::vector<float> triangle;  // [k, stride], below the diagonal anything
  int64_t stride = 0;
  double damping = 0;  // that was added to the diagonal, in parts of its mean
};

/// The columns, those of the largest sums first; of equal ones those in front.
[[nodiscard]] std::vector<int32_t> column_order(std::span<const float> diagonal);

/// What is added to the diagonal in one attempt at a factor.
struct Damping {
  double share = 0;  // of the mean of the diagonal
  double added = 0;
  double floor = 0;  // of what it is added to
};
/// One attempt after the other: make_column_factor() says which.
[[nodiscard]] std::vector<Damping> damping_steps(std::span<const float> diagonal);

/// Dead columns (sums of 0) count as 1 on the diagonal. The damping begins with 0.01 of the mean
/// diagonal and grows tenfold, up to six times, until there is a factor; then a floor of 1e-6 of
/// the largest sum is tried. Empty when there is none even so, or H has sums that are no numbers.
[[nodiscard]] std::optional<ColumnFactor> make_column_factor(const Gram& gram, ThreadPool& pool);

/// a [k, stride] := the upper triangle U with U^T U = a, whose upper triangle is read; stride is a
/// multiple of 16, and numbers past k are 0. False when a pivot is not positive.
[[nodiscard]] bool factor_in_place(float* a, int64_t k, int64_t stride, ThreadPool& pool);

}  // namespace nibble
