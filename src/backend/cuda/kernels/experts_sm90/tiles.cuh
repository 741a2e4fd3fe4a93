#pragma once

#include <array>

#include "backend/cuda/kernels/experts_sm90/few.cuh"
#include "backend/cuda/kernels/experts_sm90/loop.cuh"

namespace nibble::cuda {

template <typename Codec, typename Tile>
ExpertsSm90Tile describe_experts_tile() {
  return {.tokens = Tile::kTokens,
          .step = Tile::kStep,
          .box = Tile::kBox,
          .panels = Tile::kPanels,
          .cluster = Tile::kCluster,
          .threads = Tile::kThreads,
          .shared_bytes = ExpertsLoop<Codec, Tile>::kBytes,
          .kernel = gemm_experts_sm90<Codec, Tile>};
}

template <typename Codec, typename Tile>
ExpertsSm90Tile describe_experts_few_tile() {
  return {.tokens = Tile::kTokens,
          .step = Tile::kTokens,
          .box = Tile::kTokens,
          .panels = 2 * Tile::kKWarps,
          .threads = Tile::kThreads,
          .shared_bytes = ExpertsFewLoop<Codec, Tile>::kBytes,
          .kernel = gemm_experts_few_sm90<Codec, Tile>};
}

template <typename Codec>
std::span<const ExpertsSm90Tile> experts_sm90_tiles() {
  static const std::array kTiles = {
      describe_experts_few_tile<Codec, ExpertsFewTile<8, 2, 8, 3>>(),
      describe_experts_few_tile<Codec, ExpertsFewTile<16, 8, 2, 4>>(),
      describe_experts_tile<Codec, ExpertsTile<32, 1, 4, 8>>(),
      describe_experts_tile<Codec, ExpertsTile<64, 1, 3, 6>>(),
      describe_experts_tile<Codec, ExpertsTile<96, 2, 2, 5>>(),
      describe_experts_tile<Codec, ExpertsTile<128, 2, 2, 4>>(),
      describe_experts_tile<Codec, ExpertsTile<160, 1, 2, 4, 2>>(),
      describe_experts_tile<Codec, ExpertsTile<256, 1, 2, 3, 2>>(),
  };
  return kTiles;
}

}  // namespace nibble::cuda
