#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"

// Where weights lie in the units of gemm_sm90/gemm_sm90.cuh. A thread of the warpgroup holds rows l
// / 4 and l / 4 + 8 of its warp's 16; they are given to neighbouring channels, so that results are
// stored in pairs.
namespace nibble::cuda {

struct GemmUnits {
  int row_blocks = 0, k_blocks = 0;
  [[nodiscard]] unsigned units() const { return static_cast<unsigned>(row_blocks * k_blocks); }
};

/// Units of n rows for x_bytes of x along K: K blocks of 128, their number a multiple of `depth`.
inline GemmUnits gemm_units(int64_t n, int64_t x_bytes, int depth) {
  return {.row_blocks = static_cast<int>((n + 63) / 64),
          .k_blocks = static_cast<int>(((x_bytes + 127) / 128 + depth - 1) / depth * depth)};
}

/// Channel of a unit that a thread's row l / 4 (odd = 0) or l / 4 + 8 (odd = 1) stands for.
__device__ __forceinline__ int gemm_row(int thread, int odd) {
  return 16 * (thread >> 5) + 2 * ((thread & 31) >> 2) + odd;
}

/// Thread that holds this channel of a unit and this byte of a K block.
__device__ __forceinline__ int gemm_thread(int row, int column) {
  return (row >> 4) * 32 + ((row & 15) >> 1) * 4 + ((column >> 2) & 3);
}

/// An instance of the kernel and what its choice needs.
template <typename Codec, typename Tile>
constexpr GemmSm90Tile gemm_tile() {
  return {.tokens = Tile::kTokens,
          .row_blocks = Tile::kRowBlocks * Tile::kCluster,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .cluster = Tile::kCluster,
          .clusters = Tile::kClusters,
          .threads = Tile::kThreads,
          .shared_bytes = GemmShared<Codec, Tile>::kBytes,
          .kernel = gemm_sm90<Codec, Tile>};
}

}  // namespace nibble::cuda
