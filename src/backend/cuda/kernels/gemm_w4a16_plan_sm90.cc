#include "backend/cuda/kernels/gemm_w4a16_plan_sm90.h"

#include <algorithm>
#include <iterator>

#include "base/math.h"

namespace nibble::cuda {
namespace {

// In clocks of a multiprocessor, fitted to 250 timings on an H200 (bench/gemm_sm90_sweep_main.cc;
// three shapes, 32 to 256 rows): what it chooses takes half a percent longer than the best.
constexpr double kDecodeClocks = 116.0;  // of 64 rows x 64 of K, at least
constexpr double kUnitClocks = 42.0;     // to multiply them, and for each token
constexpr double kTokenClocks = 1.83;
constexpr double kStepClocks = 153.0;   // more for each step
constexpr double kFetchedBytes = 33.0;  // into shared memory, per clock
constexpr double kCacheBytes = 32.0;    // out of the L2 cache, copies to a whole cluster once
constexpr double kMemoryBytes = 14.9;   // of weights from memory
constexpr double kLaunchClocks = 6800.0;
constexpr double kClusterClocks = 1900.0;   // to add sums in a cluster
constexpr double kExchangeClocks = 4300.0;  // to leave sums in memory and to find the last part
constexpr double kRunsClocks = 5000.0;      // more where a block has parts of two tiles
constexpr double kPartBytes = 59.0;         // of each part, per clock
constexpr int kLeastSteps = 4;              // of a part of a tile
constexpr int kClusters[] = {2, 3, 4, 8};
constexpr int64_t kMostTokens = 512;  // from here on the largest tile of a pair is the best

}  // namespace

GemmSm90Plan plan_w4a16(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes) {
  constexpr int kUnitBytes = 2112;
  const int row_tiles = static_cast<int>(ceil_div(sizes.row_blocks, tile.row_blocks));
  const int token_tiles = static_cast<int>(ceil_div(sizes.m, tile.tokens));
  const int tiles = row_tiles * token_tiles;
  const int steps = static_cast<int>(ceil_div(ceil_div(sizes.k, 64), tile.depth));
  // Of one block.
  const int units = tile.row_blocks / tile.cluster * tile.depth;
  const double weights = static_cast<double>(units) * kUnitBytes;
  const double x = static_cast<double>(tile.depth) *
                   static_cast<double>(std::min<int64_t>(tile.tokens, sizes.m)) * 128;
  const double step = std::max(
      {units * std::max(kDecodeClocks, kUnitClocks + kTokenClocks * tile.tokens) + kStepClocks,
       (weights + x) / kFetchedBytes, (weights + x / tile.cluster) / kCacheBytes,
       weights / kMemoryBytes / token_tiles});
  const double exchange =
      tile.row_blocks / tile.cluster * 64.0 * tile.tokens * 4.0 / kPartBytes / step;
  const int blocks = sizes.sms * tile.launched / tile.cluster;
  const bool passed = sizes.m > kMostTokens && (tile.cluster == 1 || tile.tokens < 256);
  const double start = kLaunchClocks + (passed ? 1e12 : 0.0);
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
             rounds + static_cast<double>(ceil_div(steps, parts)) + kExchangeClocks / step +
                 exchange * (parts > 2 ? parts : 1));
  }
  const double run = static_cast<double>(left) * steps / blocks;
  if (2 * left > blocks && run >= kLeastSteps) {
    consider(make_runs_schedule(row_tiles, token_tiles, steps, blocks),
             rounds + run + (kExchangeClocks + kRunsClocks) / step + exchange);
  }
  return best;
}

}  // namespace nibble::cuda
