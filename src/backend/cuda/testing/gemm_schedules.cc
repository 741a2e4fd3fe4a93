#include "backend/cuda/testing/gemm_schedules.h"

#include <algorithm>

namespace nibble::cuda::testing {

std::vector<GemmSchedule> gemm_schedules(
    const GemmSm90& gemm, int tile, int64_t m, bool clusters, const BlockCounts& counts) {
  const GemmSm90Tile& shape = gemm.tiles()[static_cast<size_t>(tile)];
  const GemmSchedule own = gemm.schedule(tile, m);
  const int tiles = own.row_tiles * own.token_tiles;
  std::vector<GemmSchedule> all{own};
  if (shape.pairs) {
    const auto add = [&](int turn, int parts) {
      all.push_back(make_pairs_schedule(own.row_tiles, own.token_tiles, own.steps, turn, parts));
    };
    add((own.steps + 1) / 2, 2);
    add(own.steps - 1, 2);
    for (int parts = 3; shape.row_blocks == 2 && parts <= 4; ++parts) {
      add(own.steps - (parts - 1), parts);
      add(own.steps - (own.steps - 1) / parts * (parts - 1), parts);
    }
    return all;
  }
  for (const int cluster : {2, 3, 4, 8}) {
    if (clusters && shape.clusters && cluster <= own.steps) {
      all.push_back(make_cluster_schedule(own.row_tiles, own.token_tiles, own.steps, cluster));
    }
  }
  const int most = std::min(132 / shape.cluster, tiles * own.steps);
  for (const int blocks : counts(tiles, most)) {
    if (blocks >= tiles && blocks <= most) {
      GemmSchedule split = own;
      split.cluster = 1;
      split.whole_tiles = 0;
      split.split_tiles = tiles;
      split.split_blocks = split.blocks = blocks;
      all.push_back(split);
    }
  }
  return all;
}

}  // namespace nibble::cuda::testing
