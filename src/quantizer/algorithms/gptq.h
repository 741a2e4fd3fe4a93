#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// GPTQ (arXiv 2210.17323) with the scales that `rounded` has, which belong to the columns where
/// they are stored ("static groups"): columns are rounded in the order of the factor, each after
/// the errors of those before it were spread over it; blocks of 128 columns are brought up to date
/// at once. Fills the values. Dead columns become what is nearest to them.
///
/// Of kGptaq with the site's drift (arXiv 2504.02692): with R the factor and alpha Z the drift,
/// what is rounded column by column is |E R + alpha W Z|^2. The paper takes of Z what is above the
/// diagonal, because weights that are rounded already cannot ask for more; they ask here before
/// anything is rounded, and all of Z counts.
void round_by_columns(const MatrixToRound& matrix,
                      const SiteStatistics& site,
                      RoundedMatrix& rounded,
                      ThreadPool& pool);

}  // namespace nibble
