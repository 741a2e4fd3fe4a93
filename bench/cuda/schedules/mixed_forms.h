#pragma once

#include <array>

#include "bench/cuda/schedules/mixed_gemm.h"

// Instances of each form, which are files of their own for build time.
namespace nibble::cuda {

extern const std::array<MixedTile, 4> kMixedFull;
extern const std::array<MixedTile, 4> kMixedNoPipeline;
extern const std::array<MixedTile, 4> kMixedNoInterleave;
extern const std::array<MixedTile, 4> kMixedSignExtension;

}  // namespace nibble::cuda
