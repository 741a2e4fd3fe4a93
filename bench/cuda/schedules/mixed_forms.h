#pragma once

#include <array>

#include "bench/cuda/schedules/mixed_gemm.h"

// Instances of each form, which are files of their own for build time.
namespace nibble::cuda {

extern const std::array<MixedTile, 5> kMixedFull;
extern const std::array<MixedTile, 5> kMixedNoPipeline;
extern const std::array<MixedTile, 5> kMixedNoInterleave;
extern const std::array<MixedTile, 5> kMixedSignExtension;
extern const std::array<MixedTile, 5> kMixedNibbles;

}  // namespace nibble::cuda
