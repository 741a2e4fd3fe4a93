#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

inline constexpr int kOffsetSteps = 100;
/// Step of a scale's factor, in steps of an offset, which add up to 0.5.
inline constexpr float kFactorRate = 0.1F;

/// AutoRound (SignRound, arXiv 2309.05516): offsets of -0.5 to 0.5 that are added to weights before
/// they are rounded, and factors of the scales, learned by steps of the gradients' signs that grow
/// smaller linearly; the best state of each row is kept. The paper's loss is that of a decoder
/// block's outputs; here it is that of the matrix's own, which its Gram matrix gives exactly
/// (learned.h). `rounded` has the scales to begin with; integer codes alone.
void learn_offsets(const MatrixToRound& matrix,
                   const SiteStatistics& site,
                   RoundedMatrix& rounded,
                   ThreadPool& pool);

}  // namespace nibble
