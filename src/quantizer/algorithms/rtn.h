#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// Fills scales, zero points and the nearest values.
///   importance  [k] or null, for the search of scales
void round_to_nearest(const MatrixToRound& matrix,
                      const float* importance,
                      RoundedMatrix& rounded,
                      ThreadPool& pool);

/// Scales and zero points alone.
void choose_all_scales(const MatrixToRound& matrix,
                       const float* importance,
                       RoundedMatrix& rounded,
                       ThreadPool& pool);

}  // namespace nibble
