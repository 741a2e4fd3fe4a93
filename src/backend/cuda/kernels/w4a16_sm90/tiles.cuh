#pragma once

#include <array>

#include "backend/cuda/kernels/w4a16_sm90/pairs.cuh"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.cuh"

namespace nibble::cuda {

template <int kGroupSize, typename Tile>
GemmSm90Tile describe_w4a16_tile() {
  return {.tokens = Tile::kTokens,
          .row_blocks = Tile::kRowBlocks * Tile::kCluster,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .launched = Tile::kLaunched,
          .cluster = Tile::kCluster,
          .clusters = Tile::kShares,
          .threads = Tile::kThreads,
          .shared_bytes = W4A16Loop<Int4Codec<kGroupSize>, Tile>::kBytes,
          .kernel = gemm_w4a16_sm90<kGroupSize, Tile>};
}

template <int kGroupSize, typename Tile>
GemmSm90Tile describe_w4a16_pair_tile() {
  return {.tokens = Tile::kTokens,
          .row_blocks = Tile::kPairRowBlocks,
          .depth = Tile::kDepth,
          .resident = 1,
          .pairs = true,
          .threads = Tile::kThreads,
          .shared_bytes = W4A16Pairs<kGroupSize, Tile>::kBytes,
          .kernel = gemm_w4a16_pairs_sm90<kGroupSize, Tile>};
}

template <int kGroupSize>
std::span<const GemmSm90Tile> w4a16_tiles() {
  static const std::array kTiles = {
      describe_w4a16_tile<kGroupSize, W4A16Tile<32, 1, 4, 8, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<32, 1, 2, 10, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<64, 1, 4, 6, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<64, 1, 2, 8, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<96, 1, 2, 6, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<96, 1, 2, 6, 1, 1, 2>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<128, 2, 2, 4, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<128, 1, 2, 5, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<128, 1, 2, 5, 1, 1, 2>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<192, 1, 2, 3, 1, 1, 2>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<256, 1, 2, 3, 1, 1>>(),
      describe_w4a16_tile<kGroupSize, W4A16Tile<256, 1, 2, 3, 1, 1, 2>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<32, 1, 4, 8>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<32, 1, 2, 10>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<64, 1, 4, 6>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<64, 1, 2, 8>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<96, 1, 2, 6>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<96, 2, 2, 5>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<128, 2, 2, 4>>(),
      describe_w4a16_pair_tile<kGroupSize, W4A16PairTile<128, 1, 2, 4>>(),
  };
  return kTiles;
}

}  // namespace nibble::cuda
