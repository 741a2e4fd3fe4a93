#include "bench/cuda/schedules/work_list.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace nibble::cuda {
namespace {

constexpr MixedSchedule kAll[] = {MixedSchedule::kLockStep, MixedSchedule::kRoundRobin,
                                  MixedSchedule::kBalanced, MixedSchedule::kRemapped,
                                  MixedSchedule::kDecomposed};

MixedTiles tiles_of(int row_tiles, int token_tiles, int int8_steps, int bf16_blocks) {
  return {.row_tiles = row_tiles,
          .token_tiles = token_tiles,
          .int8_steps = int8_steps,
          .bf16_steps = 2 * bf16_blocks,
          .unit_blocks = std::max(1, (bf16_blocks + 1) / 2)};
}

const std::vector<MixedTiles>& cases() {
  static const std::vector<MixedTiles> kCases = {
      tiles_of(1, 1, 1, 0),   tiles_of(1, 1, 0, 1),    tiles_of(3, 1, 24, 8),
      tiles_of(11, 3, 24, 8), tiles_of(132, 1, 24, 8), tiles_of(67, 2, 24, 8),
      tiles_of(17, 32, 7, 3), tiles_of(300, 1, 32, 0), tiles_of(150, 1, 0, 8)};
  return kCases;
}

/// Steps of each precision of each tile that segments cover, each once.
using Covered = std::map<std::pair<int, int>, std::multiset<std::pair<bool, int>>>;

Covered covered(const MixedWorkList& list) {
  Covered steps;
  for (const MixedSegment& segment : list.segments) {
    for (int s = 0; s < segment.steps; ++s) {
      steps[{segment.row_tile, segment.token_tile}].emplace(segment.is_int8(), segment.begin + s);
    }
  }
  return steps;
}

TEST(WorkList, EveryStepOfEveryTileIsDoneOnce) {
  for (const MixedTiles& tiles : cases()) {
    std::multiset<std::pair<bool, int>> all;
    for (int s = 0; s < tiles.int8_steps; ++s) all.emplace(true, s);
    for (int s = 0; s < tiles.bf16_steps; ++s) all.emplace(false, s);
    for (const MixedSchedule schedule : kAll) {
      for (const int workers : {1, 4, 132}) {
        const Covered steps = covered(make_work_list(tiles, schedule, workers));
        EXPECT_EQ(steps.size(), static_cast<size_t>(tiles.tiles()));
        for (const auto& [tile, done] : steps) {
          EXPECT_EQ(done, all) << tile.first << " " << tile.second;
        }
      }
    }
  }
}

TEST(WorkList, SlotsOfSharedTilesAreTakenOnceAndInOrder) {
  for (const MixedTiles& tiles : cases()) {
    for (const MixedSchedule schedule : kAll) {
      const MixedWorkList list = make_work_list(tiles, schedule, 132);
      std::map<int, MixedSegment> slots;
      for (const MixedSegment& segment : list.segments) {
        if (segment.slot >= 0) {
          const MixedSlots& shared = list.shared[static_cast<size_t>(segment.tile)];
          EXPECT_TRUE(slots.emplace(segment.slot, segment).second);
          EXPECT_EQ(segment.slot - shared.first >= shared.bf16, segment.is_int8());
        }
      }
      EXPECT_EQ(slots.size(), static_cast<size_t>(list.slots));
      for (const MixedSlots& shared : list.shared) {
        for (int i = 1; i < shared.bf16; ++i) {
          EXPECT_LT(slots.at(shared.first + i - 1).begin, slots.at(shared.first + i).begin);
        }
      }
    }
  }
}

/// The owner's BF16 units are the first of the tile, follow each other and are closed at once.
TEST(WorkList, OwnersHaveTheFirstBf16UnitsAndCloseTheTile) {
  for (const MixedTiles& tiles : cases()) {
    for (const MixedSchedule schedule : kAll) {
      const MixedWorkList list = make_work_list(tiles, schedule, 132);
      int closed = 0;
      for (size_t w = 0; w + 1 < list.begins.size(); ++w) {
        bool open = false;
        int bf16 = 0;
        for (int i = list.begins[w]; i < list.begins[w + 1]; ++i) {
          const MixedSegment& segment = list.segments[static_cast<size_t>(i)];
          if (segment.slot >= 0) {
            EXPECT_FALSE(open);
            continue;
          }
          EXPECT_NE(open, (segment.kind & MixedSegment::kOpens) != 0);
          EXPECT_TRUE(segment.is_int8() || segment.begin == bf16);
          open = !segment.is_int8();
          bf16 = open ? bf16 + segment.steps : 0;
          closed += open ? 0 : 1;
        }
        EXPECT_FALSE(open);
      }
      EXPECT_EQ(closed, tiles.tiles());
    }
  }
}

/// Workers one after the other, each as far as what it waits for is there, all come to their end.
TEST(WorkList, OwnersNeverWaitForEachOther) {
  for (const MixedTiles& tiles : cases()) {
    for (const MixedSchedule schedule : kAll) {
      for (const int workers : {1, 4, 132}) {
        const MixedWorkList list = make_work_list(tiles, schedule, workers);
        std::vector<int> at(list.begins.begin(), list.begins.end() - 1);
        std::vector<int> arrived(list.shared.size(), 0);
        for (bool moved = true; moved;) {
          moved = false;
          for (size_t w = 0; w < at.size(); ++w) {
            for (; at[w] < list.begins[w + 1]; ++at[w], moved = true) {
              const MixedSegment& segment = list.segments[static_cast<size_t>(at[w])];
              if (segment.slot >= 0) {
                ++arrived[static_cast<size_t>(segment.tile)];
              } else if (segment.is_int8() && segment.tile >= 0) {
                const MixedSlots& shared = list.shared[static_cast<size_t>(segment.tile)];
                if (arrived[static_cast<size_t>(segment.tile)] < shared.bf16 + shared.int8) break;
              }
            }
          }
        }
        for (size_t w = 0; w < at.size(); ++w) {
          EXPECT_EQ(at[w], list.begins[w + 1]);
        }
      }
    }
  }
}

TEST(WorkList, RoundRobinGivesSomeWorkersNothingButBf16) {
  MixedTiles tiles = tiles_of(132, 1, 24, 8);
  tiles.unit_blocks = 8;  // three INT8 units and a BF16 one, which 132 workers divide
  const MixedWorkList naive = make_work_list(tiles, MixedSchedule::kLockStep, 132);
  EXPECT_EQ(naive.longest, 4 * 16.0);
  EXPECT_EQ(naive.rounds, 4);
  EXPECT_EQ(make_work_list(tiles, MixedSchedule::kRemapped, 132).longest, 40.0);
}

TEST(WorkList, DecompositionEndsWithinAStepOrTwoOfAnEqualShare) {
  for (const int row_tiles : {33, 66, 100, 133, 150, 200, 263, 500}) {
    MixedTiles tiles = tiles_of(row_tiles, 1, 24, 8);
    tiles.unit_blocks = 2;
    const MixedWorkList list = make_work_list(tiles, MixedSchedule::kDecomposed, 132);
    const double share = row_tiles * tiles.tile_cost() / 132;
    EXPECT_LE(list.longest, share + 2.0) << row_tiles;
    EXPECT_LE(list.longest, make_work_list(tiles, MixedSchedule::kRemapped, 132).longest + 1e-9);
  }
}

TEST(WorkList, ExchangesThatCostMoreThanTheyGainAreLeftOut) {
  MixedTiles tiles = tiles_of(130, 1, 24, 8);
  tiles.helper_cost = 8.0;
  tiles.wait_cost = 2.0;
  for (const auto schedule : {MixedSchedule::kRemapped, MixedSchedule::kDecomposed}) {
    EXPECT_EQ(make_work_list(tiles, schedule, 132).slots, 0);
  }
}

}  // namespace
}  // namespace nibble::cuda
