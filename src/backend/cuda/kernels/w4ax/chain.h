#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/schedule.h"

namespace nibble::cuda {

/// How the blocks of a grid share the tiles of a product whose sums have one order along K. Tiles 0
/// .. whole_tiles - 1 go round the blocks. The steps of the others, laid end to end, are cut into
/// one equal run for each block: where a run ends within a tile, the block hands the tile's sums on
/// to the next, which goes on with them. Runs are at least as long as a tile, and a block begins
/// with what it hands on and ends with what it takes over, so that nobody waits.
struct ChainSchedule {
  int row_tiles = 0, token_tiles = 0, steps = 0;
  int whole_tiles = 0, run_tiles = 0;
  int blocks = 0;  // of the grid

  /// First step of a block's run, among run_tiles * steps; of block `blocks`, their end.
  [[nodiscard]] NIBBLE_HOST_DEVICE int run_begin(int block) const {
    return static_cast<int>(static_cast<uint32_t>(run_tiles) * static_cast<uint32_t>(steps) *
                            static_cast<uint64_t>(block) / static_cast<uint32_t>(blocks));
  }
};

/// The tiles of a product among at most `blocks` blocks; in_runs: the last ones in runs, where a
/// round of whole tiles would leave blocks without work.
inline ChainSchedule make_chain_schedule(
    int row_tiles, int token_tiles, int steps, int blocks, bool in_runs) {
  const int tiles = row_tiles * token_tiles;
  ChainSchedule schedule{.row_tiles = row_tiles,
                         .token_tiles = token_tiles,
                         .steps = steps,
                         .whole_tiles = tiles,
                         .blocks = tiles < blocks ? tiles : blocks};
  if (in_runs && tiles > blocks && tiles % blocks != 0) {
    schedule.run_tiles = blocks + tiles % blocks;
    schedule.whole_tiles = tiles - schedule.run_tiles;
  }
  return schedule;
}

/// Goes through the parts of one block. Of a part, begin > 0 says that its sums are taken over, end
/// < steps that they are handed on.
class ChainParts {
 public:
  NIBBLE_HOST_DEVICE ChainParts(const ChainSchedule& schedule, int block)
      : schedule_(schedule), whole_(block) {
    if (schedule.run_tiles > 0) {
      const int begin = schedule.run_begin(block), end = schedule.run_begin(block + 1);
      first_ = begin / schedule.steps;
      taken_ = begin - first_ * schedule.steps;
      last_ = end / schedule.steps;
      handed_ = end - last_ * schedule.steps;
      next_ = first_ + (taken_ > 0 ? 1 : 0);
    }
  }
  /// False after the last part.
  NIBBLE_HOST_DEVICE bool next(GemmPart& part) {
    part.begin = 0;
    part.end = schedule_.steps;
    if (handed_ > 0) {
      part.end = handed_;
      handed_ = 0;
      place(part, schedule_.whole_tiles + last_);
    } else if (next_ < last_) {
      place(part, schedule_.whole_tiles + next_++);
    } else if (whole_ < schedule_.whole_tiles) {
      place(part, whole_);
      whole_ += schedule_.blocks;
    } else if (taken_ > 0) {
      part.begin = taken_;
      taken_ = 0;
      place(part, schedule_.whole_tiles + first_);
    } else {
      return false;
    }
    return true;
  }

 private:
  // In bands of token tiles, as GemmParts has them.
  NIBBLE_HOST_DEVICE void place(GemmPart& part, int tile) const {
    constexpr int kBand = 16;
    const int band = tile / (kBand * schedule_.row_tiles);
    const int rest = tile - band * kBand * schedule_.row_tiles;
    const int left = schedule_.token_tiles - band * kBand;
    const int width = left < kBand ? left : kBand;
    part.row_tile = rest / width;
    part.token_tile = band * kBand + rest % width;
  }

  const ChainSchedule& schedule_;
  int first_ = 0, taken_ = 0, last_ = 0, handed_ = 0, next_ = 0;
  int whole_;
};

}  // namespace nibble::cuda
