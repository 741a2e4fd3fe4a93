#pragma once

#include <type_traits>

#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"
#include "backend/cuda/kernels/gemm_sm90/turns.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {

/// The items of a list as one of `takers` takes them: every one of `takers`.
class ItemRounds {
 public:
  __device__ __forceinline__ ItemRounds(int taker, int takers) : index_(taker), step_(takers) {}
  [[nodiscard]] __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ void advance() { index_ += step_; }

 private:
  int index_, step_;
};

/// Waits for what a launch reads. One beside another (GroupedLaunch::beside) begins when that has
/// seen all of it, and so waits when it has done its work: whoever waits for it waits for both.
__device__ __forceinline__ void wait_for_rows(const ExpertsSm90Args& args) {
  if (!args.beside) {
    ptx::wait_for_predecessor();
  }
}
__device__ __forceinline__ void wait_for_neighbour(const ExpertsSm90Args& args) {
  if (args.beside) {
    ptx::wait_for_predecessor();
  }
}

/// One tile's rows with Tile::kItemBlocks x 64 channels of its expert.
struct ExpertItem {
  ExpertTile tile;
  int block = 0;  // the first row block
};

/// The items of a launch as one of its blocks, or clusters, takes them. Without a list of tiles,
/// they are of one matrix's rows. The next tile is on its way while an item is worked on.
template <typename Tile>
class ExpertItems {
 public:
  __device__ __forceinline__ ExpertItems(const ExpertsSm90Args& args, int taker, int takers)
      : args_(args),
        chunks_((args.row_blocks + Tile::kItemBlocks - 1) / Tile::kItemBlocks),
        count_((args.tiles != nullptr ? __ldcg(args.tile_count)
                                      : (args.m + Tile::kTokens - 1) / Tile::kTokens) *
               chunks_),
        turns_(taker, takers) {
    fetch();
  }

  [[nodiscard]] __device__ __forceinline__ bool next(ExpertItem& item) {
    if (turns_.index() >= count_) {
      return false;
    }
    item = ahead_;
    turns_.advance();
    fetch();
    return true;
  }

 private:
  __device__ __forceinline__ void fetch() {
    if (turns_.index() >= count_) {
      return;
    }
    const int number = turns_.index() / chunks_;
    ahead_.block = (turns_.index() - number * chunks_) * Tile::kItemBlocks;
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
  int chunks_, count_;
  // Items of tiles of one size are not in the order of what they cost.
  std::conditional_t<Tile::kStep == Tile::kTokens, ItemRounds, ItemTurns> turns_;
  ExpertItem ahead_;
};

}  // namespace nibble::cuda
