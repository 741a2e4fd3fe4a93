#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90.h"
#include "backend/cuda/ptx/wgmma.cuh"

// Tiles of the Hopper matrix products (gemm_sm90.cuh) and their shared memory.
namespace nibble::cuda {

/// One tile of a block: kBlocks x 64 rows for each warpgroup, kTokens tokens, kDepth x 128 bytes of
/// x along K in each of kStages stages. kResident blocks fit a multiprocessor.
template <int kTokens_, int kBlocks_, int kDepth_, int kStages_, int kResident_>
struct GemmTile {
  static constexpr int kTokens = kTokens_, kBlocks = kBlocks_, kDepth = kDepth_;
  static constexpr int kStages = kStages_, kResident = kResident_;
  static constexpr int kGroups = 2;
  static constexpr int kRowBlocks = kGroups * kBlocks;  // of 64 rows
  // With a block per multiprocessor the copying warp is a warpgroup, whose registers the others
  // take.
  static constexpr bool kTakesRegisters = kResident == 1;
  static constexpr int kThreads = kGroups * 128 + (kTakesRegisters ? 128 : 32);
  static constexpr int kUnits = kBlocks * kDepth;  // of a warpgroup in a stage
  // Sums of larger tiles take longer to exchange than to be computed by fewer blocks.
  static constexpr bool kClusters = kBlocks == 1 && kTokens <= 128;
  static_assert(kUnits == 1 || kUnits == 2);
};

template <typename Codec, typename Tile>
struct GemmShared {
  static constexpr int kWeightBytes = Tile::kRowBlocks * Tile::kDepth * Codec::kUnitBytes;
  static constexpr int kXBytes = Tile::kTokens * 128;  // of one K block
  static constexpr int kStageBytes = kWeightBytes + Tile::kDepth * kXBytes;
  static constexpr int kBarriers = Tile::kStages * kStageBytes;  // full, then empty
  static constexpr int kFlags = kBarriers + 16 * Tile::kStages;
  static constexpr int kBytes = kFlags + 16 + 1024;  // the base is rounded up to 1024
  static_assert(kStageBytes % 1024 == 0);
};

// Number of a stage in the ring and the parity of its phase.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename Sum, int kBlocks, int kCount>
__device__ __forceinline__ void clear(Sum (&sums)[kBlocks][kCount]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[b][i] = 0;
    }
  }
}

}  // namespace nibble::cuda
