#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// Whether refine() fits the scales, too: of integer codes whose scales do not hang together.
[[nodiscard]] bool fits_scales(const MatrixToRound& matrix);

/// Betters codes and scales that are there, each step by what it makes the outputs lose less given
/// all others: in turns every scale of integer codes is fitted to its codes by least squares under
/// H, as far as its stored type holds what is better, and every code is chosen anew, column by
/// column (coordinate descent, as QuantEase, arXiv 2309.01885, does it). A turn goes through blocks
/// of up to 128 columns with whole groups: the scales of a block, then its codes; scales of wider
/// groups come before all codes. The loss is that of RowTile with the factor's damping, and never
/// grows. The site has a factor.
/// Does not depend on the number of threads.
void refine(const MatrixToRound& matrix,
            const SiteStatistics& site,
            RoundedMatrix& rounded,
            ThreadPool& pool);

}  // namespace nibble
