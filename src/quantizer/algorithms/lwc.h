#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

inline constexpr int kClippingSteps = 50;
inline constexpr float kClippingRate = 0.05F;  // of Adam, falling to 0

/// Learned weight clipping (OmniQuant, arXiv 2308.13137): the range of each group is what its
/// largest magnitude asks for times sigmoid(g), g learned by Adam, and codes are the nearest in it;
/// the best state of each row is kept. The paper's loss is that of a decoder block's outputs; here
/// it is that of the matrix's own, which its Gram matrix gives exactly (learned.h), and where there
/// are zero points both ends of the range are clipped alike. `rounded` has the scales to begin
/// with; integer codes alone.
void learn_clipping(const MatrixToRound& matrix,
                    const SiteStatistics& site,
                    RoundedMatrix& rounded,
                    ThreadPool& pool);

}  // namespace nibble
