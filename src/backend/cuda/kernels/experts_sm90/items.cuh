#pragma once

#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"

namespace nibble::cuda {

/// What a launch multiplies: each tile's rows with each Tile::kItemBlocks x 64 channels of its
/// expert, an item each. Blocks take them in turn. Without a list of tiles, they are those of one
/// matrix's rows.
template <typename Tile>
struct ExpertItems {
  int chunks, count;
  __device__ __forceinline__ explicit ExpertItems(const ExpertsSm90Args& args)
      : chunks((args.row_blocks + Tile::kItemBlocks - 1) / Tile::kItemBlocks),
        count((args.tiles != nullptr ? *args.tile_count
                                     : (args.m + Tile::kTokens - 1) / Tile::kTokens) *
              chunks) {}

  struct Item {
    ExpertTile tile;
    int block;  // the first row block
    __device__ __forceinline__ Item(const ExpertsSm90Args& args,
                                    const ExpertItems& items,
                                    int index) {
      const int number = index / items.chunks;
      block = (index - number * items.chunks) * Tile::kItemBlocks;
      if (args.tiles != nullptr) {
        tile = args.tiles[number];
      } else {
        const int first = number * Tile::kTokens;
        tile = {0, first, min(Tile::kTokens, args.m - first)};
      }
    }
  };
};

}  // namespace nibble::cuda
