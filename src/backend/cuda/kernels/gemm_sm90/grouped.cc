// The experts of a layer by the kernels of gemm_sm90/grouped.cuh.

#include <algorithm>

#include <cuda_runtime.h>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kFew = 16;  // rows of an expert that are multiplied apart from those of others

}  // namespace

TileRows GemmSm90::grouped_rows(int64_t mean, int64_t most) const {
  if (family_.grouped.empty()) {
    return GemmKernel::grouped_rows(mean, most);
  }
  // Tiles that hold what nearly all experts have, where rows are dealt out by chance: the weights
  // of a second tile come once more from the L2 cache.
  const int32_t wanted = mean <= 3     ? 8
                         : mean <= 9   ? 16
                         : mean <= 20  ? 32
                         : mean <= 70  ? 96
                         : mean <= 100 ? 128
                         : mean <= 144 ? 160
                                       : 256;
  const auto holds = [&](const GroupedSm90Tile& tile) { return wanted <= tile.tokens; };
  const auto found = std::ranges::find_if(family_.grouped, holds);
  const GroupedSm90Tile& tile = found == family_.grouped.end() ? family_.grouped.back() : *found;
  const int32_t rows = tile.tokens;
  if (rows > kFew || most <= rows) {
    return {rows, tile.step};
  }
  return most <= 2 * kFew ? TileRows{2 * kFew, 2 * kFew, rows} : TileRows{96, 96, rows};
}

cudaError_t GemmSm90::run_grouped(const GroupedLaunch& args, const LaunchContext& context) const {
  if (family_.grouped.empty()) {
    return cudaErrorNotSupported;
  }
  if (args.slots == 0) {
    return cudaSuccess;
  }
  const auto holds = [&](const GroupedSm90Tile& tile) { return args.tile_rows <= tile.tokens; };
  const auto tile = std::ranges::find_if(family_.grouped, holds);
  CUtensorMap map{};
  if (args.slots > INT32_MAX / 2 || tile == family_.grouped.end() ||
      args.activation != GemmInput::Kind::kPlain || args.result == GemmResult::kAddF32 ||
      !map_x(args.x, args.slots, tile->box, map)) {
    return cudaErrorInvalidValue;
  }
  const int64_t steps =
      ceil_div(ceil_div(k_, int64_t{family_.block_elements}), int64_t{tile->depth});
  const GroupedSm90Args kernel_args{.weights = static_cast<const uint8_t*>(args.packed),
                                    .expert_bytes = args.expert_bytes,
                                    .code_bytes = static_cast<int64_t>(code_bytes()),
                                    .x_scales = args.x_scales,
                                    .bias = args.bias,
                                    .y = args.y,
                                    .tiles = args.tiles,
                                    .tile_count = args.tile_count,
                                    .n = static_cast<int>(n_),
                                    .row_blocks = row_blocks_,
                                    .k_blocks = k_blocks_,
                                    .steps = static_cast<int>(steps),
                                    .result = args.result};
  const int blocks = sms_ * tile->resident / tile->cluster * tile->cluster;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)),
                  .threads = tile->threads,
                  .shared_bytes = tile->shared_bytes,
                  .cluster = static_cast<unsigned>(tile->cluster)};
  return launch(tile->kernel, grid, context, map, kernel_args);
}

}  // namespace nibble::cuda
