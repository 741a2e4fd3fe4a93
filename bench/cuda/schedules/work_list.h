#pragma once

#include <cstdint>
#include <vector>

namespace nibble::cuda {

/// A product whose K blocks of 128 are INT8 or BF16 on the side of activations, as tiles. A step is
/// 128 bytes of a token along K: an INT8 block, or half of a BF16 block. Both take the tensor cores
/// the same time.
struct MixedTiles {
  int row_tiles = 0, token_tiles = 0;
  int int8_steps = 0, bf16_steps = 0;       // of a tile
  int unit_blocks = 1;                      // K blocks of a unit, into which each precision is cut
  double int8_cost = 1.0, bf16_cost = 1.0;  // of a step
  double helper_cost = 0.0;                 // of a helper's sums, to the owner
  double wait_cost = 0.0;                   // until they are there

  [[nodiscard]] int tiles() const { return row_tiles * token_tiles; }
  [[nodiscard]] double tile_cost() const { return int8_steps * int8_cost + bf16_steps * bf16_cost; }
  /// Runs of BF16 blocks that are summed on their own, whatever the schedule: F32 sums depend on
  /// their order. Integer sums do not, and may be cut anywhere.
  [[nodiscard]] int bf16_units() const { return (bf16_steps / 2 + unit_blocks - 1) / unit_blocks; }
  [[nodiscard]] int int8_units() const { return (int8_steps + unit_blocks - 1) / unit_blocks; }
};

/// How the multiprocessors share the work. The first two are what COMET (section 4.4) begins with:
/// units go round the workers as they come, so that, with a number of workers that their pattern
/// divides, some have nothing but the slow ones.
enum class MixedSchedule : uint8_t {
  kLockStep,    // units go round; all workers meet after each
  kRoundRobin,  // the same, but sums meet only before they are stored
  kBalanced,    // units go to who has the least work by their costs
  kRemapped,    // the same, but of whole tiles while there is one for each worker
  kDecomposed,  // the same, and tiles that are left are cut so that all end at once
};

/// A run of steps of one precision of one tile, for one worker. Of the workers of a tile one owns
/// it: its last segment, of INT8 steps or of none, closes the tile, and where it has BF16 units,
/// these are the first of the tile and come right before. The others leave sums in memory.
struct alignas(16) MixedSegment {
  enum Kind : int32_t { kInt8 = 1, kOpens = 2, kMeets = 4 };
  int32_t row_tile = 0, token_tile = 0;
  int32_t begin = 0, steps = 0;  // among those of its precision
  int32_t tile = -1;             // number of a tile that several share
  int32_t slot = -1;             // where these sums go; -1: they are the owner's
  int32_t kind = 0;              // kOpens: the owner's first; kMeets: then all workers meet
  int32_t unused = 0;

  [[nodiscard]] constexpr bool is_int8() const { return (kind & kInt8) != 0; }
};

/// Where the sums of a shared tile lie: those of BF16 units in their order, then INT8 ones.
struct MixedSlots {
  int32_t first = 0, bf16 = 0, int8 = 0;
};

struct MixedWorkList {
  std::vector<MixedSegment> segments;
  std::vector<int32_t> begins;  // of each worker's segments, and their end
  std::vector<MixedSlots> shared;
  int slots = 0;
  int rounds = 0;        // meetings of all workers
  double longest = 0.0;  // cost of the steps of the worker that has most
};

/// The work of each of `workers`. What a worker leaves for others comes before the tiles that it
/// owns, or units come in their order and the owner of a tile has the last one: owners wait for the
/// others, so all workers have to run at once.
MixedWorkList make_work_list(const MixedTiles& tiles, MixedSchedule schedule, int workers);

}  // namespace nibble::cuda
