#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// GPTQ (arXiv 2210.17323) with the scales that `rounded` has, which belong to the columns where
/// they are stored ("static groups"): columns are rounded in the order of the factor, each after
/// the errors of those before it were spread over it; blocks of 128 columns are brought up to date
/// at once. Fills the values. Dead columns become what is nearest to them.
///
/// Of kGptaq with the site's drift (arXiv 2504.02692): what a column was rounded from, times its
/// row of the drift, is added to what later columns make good. For R the factor, and alpha Z the
/// drift, these are the paper's updates by P = alpha triu(Z, 1) R^-1.
void round_by_columns(const MatrixToRound& matrix,
                      const SiteStatistics& site,
                      RoundedMatrix& rounded,
                      ThreadPool& pool);

}  // namespace nibble
