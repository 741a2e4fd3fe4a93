#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/factor.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// GPTQ (arXiv 2210.17323) with the scales that `rounded` has, which belong to the columns where
/// they are stored ("static groups"): columns are rounded in the order of the factor, each after
/// the errors of those before it were spread over it; blocks of 128 columns are brought up to date
/// at once. Fills the values. Dead columns become what is nearest to them.
void round_by_columns(const MatrixToRound& matrix,
                      const ColumnFactor& factor,
                      RoundedMatrix& rounded,
                      ThreadPool& pool);

}  // namespace nibble
