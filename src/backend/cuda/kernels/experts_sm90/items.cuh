#pragma once

#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"

namespace nibble::cuda {

/// One tile's rows with Tile::kItemBlocks x 64 channels of its expert.
struct ExpertItem {
  ExpertTile tile;
  int block = 0;  // the first row block
};

/// The items of a launch as one of its blocks, or clusters, takes them: number `first`, then every
/// `step`th. Without a list of tiles, they are of one matrix's rows. The next tile is on its way
/// while an item is worked on.
template <typename Tile>
class ExpertItems {
 public:
  __device__ __forceinline__ ExpertItems(const ExpertsSm90Args& args, int first, int step)
      : args_(args),
        chunks_((args.row_blocks + Tile::kItemBlocks - 1) / Tile::kItemBlocks),
        count_((args.tiles != nullptr ? __ldcg(args.tile_count)
                                      : (args.m + Tile::kTokens - 1) / Tile::kTokens) *
               chunks_),
        index_(first),
        step_(step) {
    fetch();
  }

  [[nodiscard]] __device__ __forceinline__ bool next(ExpertItem& item) {
    if (index_ >= count_) {
      return false;
    }
    item = ahead_;
    index_ += step_;
    fetch();
    return true;
  }

 private:
  __device__ __forceinline__ void fetch() {
    if (index_ >= count_) {
      return;
    }
    const int number = index_ / chunks_;
    ahead_.block = (index_ - number * chunks_) * Tile::kItemBlocks;
    if (args_.tiles != nullptr) {
      // Past the L1 cache, where an older list may lie.
      const ExpertTile* tile = args_.tiles + number;
      ahead_.tile = {__ldcg(&tile->expert), __ldcg(&tile->first), __ldcg(&tile->rows)};
    } else {
      const int first = number * Tile::kTokens;
      ahead_.tile = {0, first, min(Tile::kTokens, args_.m - first)};
    }
  }

  const ExpertsSm90Args& args_;
  int chunks_, count_, index_, step_;
  ExpertItem ahead_;
};

}  // namespace nibble::cuda
