#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define NIBBLE_HOST_DEVICE __host__ __device__
#else
#define NIBBLE_HOST_DEVICE
#endif

namespace nibble::cuda {

/// How the blocks of a grid share the tiles of a product. A tile takes `steps` steps along K. Tiles
/// 0 .. whole_tiles - 1 go round the blocks, each to one of them; the steps of the others, laid end
/// to end, are cut into split_blocks equal runs (stream-K), and who ends a tile last adds its
/// parts.
struct GemmSchedule {
  int row_tiles = 0, token_tiles = 0, steps = 0;
  int whole_tiles = 0, split_tiles = 0, split_blocks = 0;
  int blocks = 0;   // of the grid
  int cluster = 1;  // blocks that share each tile through shared memory; then all are split
  // Of w4a16_sm90/pairs.cuh: blocks of a tile, steps of one with rows of its own and of one
  // with the rows of others.
  int parts = 0, turn = 0, lent = 0;

  /// First step of a block's run, among split_tiles * steps; of block split_blocks, their end.
  [[nodiscard]] NIBBLE_HOST_DEVICE int run_begin(int block) const {
    return static_cast<int>(total_steps() * static_cast<uint32_t>(block) /
                            static_cast<uint32_t>(split_blocks));
  }
  /// Block whose run holds this step.
  [[nodiscard]] NIBBLE_HOST_DEVICE int block_of(int step) const {
    return static_cast<int>(
        ((static_cast<uint32_t>(step) + 1) * static_cast<uint32_t>(split_blocks) - 1) /
        total_steps());
  }
  /// Of the split tiles. Times split_blocks it fits 32 bits, whose division is fast: there are
  /// fewer split tiles than blocks, a few hundred.
  [[nodiscard]] NIBBLE_HOST_DEVICE uint32_t total_steps() const {
    return static_cast<uint32_t>(split_tiles) * static_cast<uint32_t>(steps);
  }
};

/// A run of steps of one tile.
struct GemmPart {
  int row_tile = 0, token_tile = 0;
  int begin = 0, end = 0;  // steps
  int split = -1;          // number of the tile among the split ones, or -1
};

/// Goes through the parts of one block, split tiles first.
class GemmParts {
 public:
  NIBBLE_HOST_DEVICE GemmParts(const GemmSchedule& schedule, int block)
      : schedule_(schedule), whole_(block) {
    if (block < schedule.split_blocks) {
      step_ = schedule.run_begin(block);
      end_ = schedule.run_begin(block + 1);
    }
  }
  /// False after the last part.
  NIBBLE_HOST_DEVICE bool next(GemmPart& part) {
    int tile = 0;
    if (step_ < end_) {
      part.split = step_ / schedule_.steps;
      part.begin = step_ - part.split * schedule_.steps;
      part.end =
          schedule_.steps < part.begin + end_ - step_ ? schedule_.steps : part.begin + end_ - step_;
      step_ += part.end - part.begin;
      tile = schedule_.whole_tiles + part.split;
    } else if (whole_ < schedule_.whole_tiles) {
      part.split = -1;
      part.begin = 0;
      part.end = schedule_.steps;
      tile = whole_;
      whole_ += schedule_.blocks;
    } else {
      return false;
    }
    // Bands of kBand token tiles, so that the blocks at work share activations that stay in L2
    // while weights are read once per band.
    const int band = tile / (kBand * schedule_.row_tiles);
    const int rest = tile - band * kBand * schedule_.row_tiles;
    const int left = schedule_.token_tiles - band * kBand;
    const int width = left < kBand ? left : kBand;
    part.row_tile = rest / width;
    part.token_tile = band * kBand + rest % width;
    return true;
  }

 private:
  static constexpr int kBand = 16;
  const GemmSchedule& schedule_;
  int step_ = 0, end_ = 0;
  int whole_;
};

/// Tiles go round `blocks` blocks as they are, the last ones in runs of equal length.
inline GemmSchedule make_runs_schedule(int row_tiles, int token_tiles, int steps, int blocks) {
  const int tiles = row_tiles * token_tiles;
  const int split = tiles % blocks;
  const int runs = std::min(blocks, split * steps);
  return {.row_tiles = row_tiles,
          .token_tiles = token_tiles,
          .steps = steps,
          .whole_tiles = tiles - split,
          .split_tiles = split,
          .split_blocks = runs,
          .blocks = tiles > split ? blocks : runs};
}

/// Tiles go round `blocks` blocks as they are, the last ones to some of them; or, where there are
/// at most `blocks` / `parts` tiles, each is cut into equal parts for as many blocks.
inline GemmSchedule make_parts_schedule(
    int row_tiles, int token_tiles, int steps, int blocks, int parts) {
  const int tiles = row_tiles * token_tiles;
  const int split = tiles % blocks;
  return {.row_tiles = row_tiles,
          .token_tiles = token_tiles,
          .steps = steps,
          .whole_tiles = tiles - split,
          .split_tiles = split,
          .split_blocks = split * parts,
          .blocks = tiles > split ? blocks : split * parts};
}

/// Every tile to a cluster of blocks, each an equal run of its steps.
inline GemmSchedule make_cluster_schedule(int row_tiles, int token_tiles, int steps, int cluster) {
  const int tiles = row_tiles * token_tiles;
  return {.row_tiles = row_tiles,
          .token_tiles = token_tiles,
          .steps = steps,
          .split_tiles = tiles,
          .split_blocks = tiles * cluster,
          .blocks = tiles * cluster,
          .cluster = cluster};
}

/// Every tile to `parts` blocks, two of which own its rows and multiply them for `turn` of its
/// steps. Two blocks are a cluster, more meet in memory.
inline GemmSchedule make_pairs_schedule(
    int row_tiles, int token_tiles, int steps, int turn, int parts = 2) {
  return {.row_tiles = row_tiles,
          .token_tiles = token_tiles,
          .steps = steps,
          .blocks = parts * row_tiles * token_tiles,
          .cluster = parts == 2 ? 2 : 1,
          .parts = parts,
          .turn = turn,
          .lent = (steps - turn + parts - 2) / (parts - 1)};
}

}  // namespace nibble::cuda
