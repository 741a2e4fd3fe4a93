#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace nibble {

/// One way to store a unit.
struct KnapsackChoice {
  int64_t size = 0;
  double loss = 0;
};

struct KnapsackSolution {
  std::vector<size_t> chosen;  // by unit, its choice
  int64_t size = 0;
  double loss = 0;
  double bound = 0;  // of the linear relaxation: no choice within the capacity loses less
};

/// The multiple-choice knapsack: one choice of each unit, sizes within the capacity, least sum of
/// losses. The bound is that of the linear relaxation (Sinha, Zoltners 1979: units walk along the
/// lower convex hulls of their choices, steepest step first); the choice is found by dynamic
/// programming over the room above the smallest choices, in up to 32,768 equal parts. It is the
/// best one where sizes are multiples of such a part, as those of matrices mostly are; else sizes
/// are rounded up for it, and single units and pairs of them are changed while that helps.
///   units  every one has a choice
/// kInvalidArgument when the smallest choices do not fit.
Result<KnapsackSolution> solve_knapsack(const std::vector<std::vector<KnapsackChoice>>& units,
                                        int64_t capacity);

}  // namespace nibble
