#include "backend/cuda/kernels/w4a16_sm90/plan.h"

#include <algorithm>
#include <iterator>

#include "base/math.h"

namespace nibble::cuda {
namespace {

// In clocks of a multiprocessor, fitted to 2000 timings on an H200
// (bench/cuda/gemm_sm90_sweep_main.cc; three shapes, 32 to 512 rows): what it chooses takes 4 %
// longer than the best at most, mostly none.
constexpr double kDecodeClocks = 112.0;  // of 64 rows x 64 of K, at least
constexpr double kUnitClocks = 47.0;     // to multiply them, and for each token
constexpr double kTokenClocks = 1.73;
constexpr double kLeastTokenClocks = 2.3;  // for each token at least: the tensor cores
constexpr double kStepClocks = 193.0;      // more for each step
constexpr double kFetchedBytes = 34.0;     // into shared memory, per clock
constexpr double kCacheBytes = 32.0;       // out of the L2 cache, copies to a whole pair once
constexpr double kMemoryBytes = 14.1;      // of weights from memory
constexpr double kLaunchClocks = 3200.0;
constexpr double kClusterClocks = 6500.0;   // to add sums in a cluster
constexpr double kPairClocks = 2000.0;      // to send sums to the other block while it works
constexpr double kPartsClocks = 4000.0;     // to leave them in memory
constexpr double kExchangeClocks = 5900.0;  // to leave sums in memory and to find the last part
constexpr double kFewBytes = 50e3;          // of a block's sums that are exchanged meanwhile
constexpr double kPartBytes = 6.0;          // of the others, per clock
constexpr double kFurtherBytes = 60.0;      // of each part from the third on
constexpr double kRunsClocks = 4000.0;      // more where a block has parts of two tiles
constexpr double kRunsBytes = 8.7;          // of their sums, per clock
constexpr double kNever = 1e12;
constexpr int kLeastSteps = 4;  // of a part of a tile
constexpr int kLentSteps = 1;   // of own rows, while the other block's sums travel
constexpr int kLeftSteps = 4;   // the same for sums that go through memory
constexpr int kMostParts = 4;
constexpr int kClusters[] = {2, 3, 4, 8};
constexpr int64_t kMostTokens = 512;  // from here on power is short, and one tile draws the least
constexpr int kLongTokens = 128, kLongRowBlocks = 4;  // that tile, of one block

// Of one block's step with so many row blocks.
double step_clocks(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes, int row_blocks) {
  constexpr int kUnitBytes = 2112;
  const int units = row_blocks * tile.depth;
  const double weights = static_cast<double>(units) * kUnitBytes;
  const double x = static_cast<double>(tile.depth) *
                   static_cast<double>(std::min<int64_t>(tile.tokens, sizes.m)) * 128;
  const auto token_tiles = static_cast<double>(ceil_div(sizes.m, tile.tokens));
  return std::max({units * std::max({kDecodeClocks, kUnitClocks + kTokenClocks * tile.tokens,
                                     kLeastTokenClocks * tile.tokens}) +
                       kStepClocks,
                   (weights + x) / kFetchedBytes, (weights + x / tile.cluster) / kCacheBytes,
                   weights / kMemoryBytes / token_tiles});
}

// Blocks of w4a16_sm90/pairs.cuh.
GemmSm90Plan plan_pairs(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes) {
  const int row_tiles = static_cast<int>(ceil_div(sizes.row_blocks, tile.row_blocks));
  const int token_tiles = static_cast<int>(ceil_div(sizes.m, tile.tokens));
  const int tiles = row_tiles * token_tiles;
  const int steps = static_cast<int>(ceil_div(ceil_div(sizes.k, 64), tile.depth));
  const int own = tile.row_blocks / 2;  // row blocks of a block, and another for some of the steps
  const bool lends = own == 1;
  const double both = step_clocks(tile, sizes, own + 1), alone = step_clocks(tile, sizes, own);
  GemmSm90Plan best{.schedule = make_pairs_schedule(row_tiles, token_tiles, steps, (steps + 1) / 2),
                    .clocks = kNever};
  // `more` than the steps take, in each round of blocks that run at once.
  const auto consider = [&](int turn, int parts, double more, int rounds) {
    const GemmSchedule schedule = make_pairs_schedule(row_tiles, token_tiles, steps, turn, parts);
    const int shared = lends ? schedule.lent : turn;
    const double round = shared * both + ((lends ? turn : steps) - shared) * alone;
    const double clocks = kLaunchClocks + rounds * (round + more);
    if (clocks < best.clocks) {
      best = {.schedule = schedule, .clocks = clocks};
    }
  };
  if (sizes.m > kMostTokens || steps < 2 * kLeastSteps) {
    return best;
  }
  if (sizes.clusters[0] > 0) {  // only the blocks of a cluster wait for each other
    consider((steps + 1) / 2 + (lends ? kLentSteps : 0), 2, kPairClocks,
             static_cast<int>(ceil_div(tiles, sizes.clusters[0])));
  }
  for (int parts = 3; lends && parts <= kMostParts && tiles * parts <= sizes.sms &&
                      steps >= kLeastSteps * parts + kLeftSteps;
       ++parts) {
    consider(steps - (steps - kLeftSteps) / parts * (parts - 1), parts, kPartsClocks, 1);
  }
  return best;
}

}  // namespace

GemmSm90Plan plan_w4a16(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes) {
  if (tile.pairs) {
    return plan_pairs(tile, sizes);
  }
  const int row_tiles = static_cast<int>(ceil_div(sizes.row_blocks, tile.row_blocks));
  const int token_tiles = static_cast<int>(ceil_div(sizes.m, tile.tokens));
  const int tiles = row_tiles * token_tiles;
  const int steps = static_cast<int>(ceil_div(ceil_div(sizes.k, 64), tile.depth));
  const int row_blocks = tile.row_blocks / tile.cluster;  // of one block
  const double step = step_clocks(tile, sizes, row_blocks);
  const double sums = row_blocks * 64.0 * tile.tokens * 4.0;  // bytes
  const int blocks = sizes.sms * tile.launched / tile.cluster;
  const bool passed = sizes.m > kMostTokens && (tile.cluster > 1 || tile.tokens != kLongTokens ||
                                                tile.row_blocks != kLongRowBlocks);
  const double start = kLaunchClocks + (passed ? kNever : 0.0);
  GemmSm90Plan best{.schedule = make_parts_schedule(row_tiles, token_tiles, steps, blocks, 1),
                    .clocks = start + static_cast<double>(ceil_div(tiles, blocks)) * steps * step};
  const auto consider = [&best, start, step](const GemmSchedule& schedule, double time) {
    if (start + time * step < best.clocks) {
      best = {.schedule = schedule, .clocks = start + time * step};
    }
  };
  for (size_t i = 0; i < std::size(kClusters); ++i) {
    const int cluster = kClusters[i];
    if (tiles <= sizes.clusters[i] && steps >= kLeastSteps * cluster) {
      consider(make_cluster_schedule(row_tiles, token_tiles, steps, cluster),
               static_cast<double>(ceil_div(steps, cluster)) + kClusterClocks / step);
    }
  }
  const int left = tiles % blocks;  // tiles beyond whole rounds of all blocks
  const double rounds = static_cast<double>(tiles / blocks * steps);
  for (int parts = 2; left > 0 && parts * left <= blocks && steps >= kLeastSteps * parts; ++parts) {
    consider(make_parts_schedule(row_tiles, token_tiles, steps, blocks, parts),
             rounds + static_cast<double>(ceil_div(steps, parts)) +
                 (kExchangeClocks + std::max(0.0, sums - kFewBytes) / kPartBytes +
                  (parts - 2) * sums / kFurtherBytes) /
                     step);
  }
  const double run = static_cast<double>(left) * steps / blocks;
  if (2 * left > blocks && run >= kLeastSteps) {
    consider(make_runs_schedule(row_tiles, token_tiles, steps, blocks),
             rounds + run + (kExchangeClocks + kRunsClocks + sums / kRunsBytes) / step);
  }
  return best;
}

}  // namespace nibble::cuda
