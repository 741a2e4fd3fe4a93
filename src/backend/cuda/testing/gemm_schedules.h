#pragma once

#include <functional>
#include <vector>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"

namespace nibble::cuda::testing {

/// Numbers of blocks to try for so many tiles, of which those from `tiles` to `most` are taken.
using BlockCounts = std::function<std::vector<int>(int tiles, int most)>;

/// Ways to share a tile's steps: its own, clusters if asked for, equal parts and runs of equal
/// length on a GPU of 132 multiprocessors.
std::vector<GemmSchedule> gemm_schedules(
    const GemmSm90& gemm, int tile, int64_t m, bool clusters, const BlockCounts& counts);

}  // namespace nibble::cuda::testing
