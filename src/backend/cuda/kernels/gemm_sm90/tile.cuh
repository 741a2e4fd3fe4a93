#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/ptx/wgmma.cuh"

// Tiles of the Hopper matrix products (gemm_sm90/gemm_sm90.cuh) and their shared memory.
namespace nibble::cuda {

/// One tile of a block: kBlocks x 64 rows for each warpgroup, kTokens tokens, kDepth x 128 bytes of
/// x along K in each of kStages stages. kResident blocks fit a multiprocessor. kCluster blocks with
/// rows of their own share the tokens: each copies some of them for all.
template <int kTokens_, int kBlocks_, int kDepth_, int kStages_, int kResident_, int kCluster_ = 1>
struct GemmTile {
  static constexpr int kTokens = kTokens_, kBlocks = kBlocks_, kDepth = kDepth_;
  static constexpr int kStages = kStages_, kResident = kResident_, kCluster = kCluster_;
  static constexpr int kGroups = 2;
  static constexpr int kRowBlocks = kGroups * kBlocks;  // of 64 rows
  // With a block per multiprocessor the copying warp is a warpgroup, whose registers the others
  // take.
  static constexpr bool kTakesRegisters = kResident == 1;
  static constexpr int kThreads = kGroups * 128 + (kTakesRegisters ? 128 : 32);
  static constexpr int kUnits = kBlocks * kDepth;  // of a warpgroup in a stage
  // Sums of larger tiles take longer to exchange than to be computed by fewer blocks.
  static constexpr bool kClusters = kBlocks == 1 && kTokens <= 128;
  // Whether there is room in shared memory to turn results into whole words.
  static constexpr bool kStoresWords = kResident == 1;
  // Results of experts are not added, and so leave in whole words in F32 as well.
  static constexpr bool kOfExperts = false;
  static_assert(kUnits == 1 || kUnits == 2);
  static_assert(kCluster == 1 || !kClusters);
};

/// Shared memory beside GemmShared, of codecs that look weights up; they fill it by begin(), which
/// all threads of a block call.
template <typename Codec>
inline constexpr int kTableBytes = 0;
template <typename Codec>
requires requires { Codec::kTableBytes; }
inline constexpr int kTableBytes<Codec> = Codec::kTableBytes;

template <typename Codec>
__device__ __forceinline__ void begin_codec() {
  if constexpr (kTableBytes < Codec >> 0) {
    Codec::begin();
  }
}

/// Codecs of products whose K blocks are of two kinds, those of Codec::Int8 in front of those of
/// Codec::Bf16, with units of their own; Codec itself is what the sums are in the end.
template <typename Codec>
concept InTwoParts = requires {
  typename Codec::Int8;
  typename Codec::Bf16;
};

/// Bytes of a stage for each unit: of codecs that share a ring with larger ones, more than it has.
template <typename Codec>
inline constexpr int kUnitRoom = Codec::kUnitBytes;
template <typename Codec>
requires requires { Codec::kUnitRoom; }
inline constexpr int kUnitRoom<Codec> = Codec::kUnitRoom;

template <typename Codec, typename Tile>
struct GemmShared {
  static constexpr int kUnits = Tile::kRowBlocks * Tile::kDepth;
  static constexpr int kWeightBytes =
      (kUnits * kUnitRoom<Codec> + 1023) / 1024 * 1024;  // x follows
  static constexpr int kXBytes = Tile::kTokens * 128;    // of one K block
  static constexpr int kStageBytes = kWeightBytes + Tile::kDepth * kXBytes;
  static constexpr int kCopiedBytes = kUnits * Codec::kUnitBytes + Tile::kDepth * kXBytes;
  static constexpr int kBarriers = Tile::kStages * kStageBytes;  // full, then empty
  static constexpr int kFlags = kBarriers + 16 * Tile::kStages;
  // Of each warpgroup: scales of its tokens, and results on their way (gemm_sm90/store.cuh).
  static constexpr int kScales = kFlags + 16;
  static constexpr int kScaleBytes = Tile::kTokens > 32 ? Tile::kTokens * 4 : 0;
  static constexpr int kWords = kScales + Tile::kGroups * kScaleBytes;
  static constexpr int kWordBytes = Tile::kStoresWords ? 2 * 32 * 128 : 0;
  static constexpr int kBytes =
      kWords + Tile::kGroups * kWordBytes + 1024;  // the base is rounded up to 1024
  static_assert(kStageBytes % 1024 == 0);
  static_assert((kBytes + kTableBytes<Codec> + 1024) * Tile::kResident <=
                233472);  // of a multiprocessor
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
