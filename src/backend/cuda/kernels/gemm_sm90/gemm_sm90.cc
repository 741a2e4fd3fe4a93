#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/gemm_sm90/launch_args.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

// What the choice of a tile and a schedule reckons with, in clocks of a multiprocessor; fitted to
// 1100 timings on an H200 (bench/cuda/gemm_sm90_sweep_main.cc; eight shapes, two schemes, 1 to 1024
// rows: what it chooses takes 0.4 percent longer than the best, and 6 at most).
constexpr int kLeastTokens = 92;           // a unit takes as long as with so many, to be fetched
constexpr double kFetchedBytes = 440.0;    // into shared memory, per clock
constexpr double kStepClocks = 84.0;       // more for each step
constexpr double kStoreClocks = 2000.0;    // to store a tile
constexpr double kPairClocks = 49.0;       // more for a row block and token that leaves in pairs
constexpr double kClusterClocks = 230.0;   // to add up a tile that a cluster shared
constexpr double kClusterBytes = 11.0;     // of its sums, per clock
constexpr double kClusterPairBytes = 1.3;  // the same where they leave in pairs
constexpr double kMemoryClocks = 3700.0;   // to add up a tile whose parts meet in memory
constexpr double kPartBytes = 28.0;        // of each part, per clock
constexpr double kRunsClocks = 6300.0;     // to add up tiles in runs
constexpr int kMostRunTokens = 16;         // of a tile in runs: more sums take too long
constexpr int kSmallTokens = 64;           // tiles of up to these may be less than half full
constexpr int kLeastSteps = 6;             // of a part of a tile
constexpr int kClusters[] = {2, 3, 4, 8};
constexpr size_t kUsed = 3;  // clusters of 8 were slower: they wait for each other's places

// Whether a tile is not mostly empty at m tokens.
bool serves(const GemmSm90Family& family, const GemmSm90Tile& tile, int64_t m) {
  const int64_t rows = std::max<int64_t>(m, family.tiles.front().tokens);
  return tile.tokens < 2 * rows ||
         (family.plan == nullptr && tile.tokens <= kSmallTokens && tile.tokens < 4 * rows);
}

// Nor so small that weights are fetched more often than products are worth.
bool fits(const GemmSm90Family& family, const GemmSm90Tile& tile, int64_t m) {
  return tile.tokens >= std::min<int64_t>(m, 64) && serves(family, tile, m);
}

// Clusters of each size that run at the same time.
std::array<int, std::size(kClusters)> count_clusters(const GemmSm90Tile& tile) {
  std::array<int, std::size(kClusters)> counts{};
  for (size_t i = 0; i < counts.size() && (tile.clusters || (tile.pairs && i == 0)); ++i) {
    const auto cluster = static_cast<unsigned>(kClusters[i]);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster * 128);
    config.blockDim = dim3(tile.threads);
    config.dynamicSmemBytes = tile.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, reinterpret_cast<const void*>(tile.kernel),
                                       &config) == cudaSuccess) {
      counts[i] = count;
    } else {
      cudaGetLastError();
    }
  }
  return counts;
}

template <typename Kernel>
Status allow_shared(Kernel* kernel, size_t bytes, std::string_view name) {
  return check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      name);
}

}  // namespace

Result<std::unique_ptr<GemmKernel>> GemmSm90::make(const GemmSm90Family& family,
                                                   const GemmProblem& problem,
                                                   const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(void* encode_map, prepare(family));
  return std::unique_ptr<GemmKernel>(
      std::make_unique<GemmSm90>(family, problem, device, encode_map));
}

Result<void*> GemmSm90::prepare(const GemmSm90Family& family) {
  void* encode_map = nullptr;
  cudaDriverEntryPointQueryResult found{};
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode_map, 12000,
                                             cudaEnableDefault, &found),
            "asking the driver for tensor maps"));
  if (found != cudaDriverEntryPointSuccess) {
    return make_error(StatusCode::kUnavailable,
                      "the driver has no cuTensorMapEncodeTiled; install a driver for CUDA 13");
  }
  for (const GemmSm90Tile& tile : family.tiles) {
    NIBBLE_RETURN_IF_ERROR(allow_shared(tile.kernel, tile.shared_bytes, family.name));
  }
  for (const GroupedSm90Tile& tile : family.grouped) {
    NIBBLE_RETURN_IF_ERROR(allow_shared(tile.kernel, tile.shared_bytes, family.name));
  }
  return encode_map;
}

GemmSm90::GemmSm90(const GemmSm90Family& family,
                   const GemmProblem& problem,
                   const DeviceInfo& device,
                   void* encode_map)
    : family_(family),
      n_(problem.n),
      k_(problem.k),
      sms_(device.sms),
      row_blocks_(static_cast<int>(ceil_div(n_, 64))),
      k_blocks_(static_cast<int>(ceil_div(ceil_div(k_, family.block_elements), family.depth)) *
                family.depth),
      encode_map_(encode_map) {
  for (const GemmSm90Tile& tile : family.tiles) {
    clusters_.push_back(count_clusters(tile));
  }
}

cudaError_t GemmSm90::pack_codes(const void* codes, void* units, cudaStream_t stream) const {
  return family_.pack(codes, n_, k_, units, stream);
}

cudaError_t GemmSm90::unpack_codes(const void* units, void* codes, cudaStream_t stream) const {
  return family_.unpack(units, n_, k_, codes, stream);
}

size_t GemmSm90::code_bytes() const {
  return static_cast<size_t>(row_blocks_) * static_cast<size_t>(k_blocks_) *
         static_cast<size_t>(family_.unit_bytes);
}

size_t GemmSm90::packed_bytes() const {
  const size_t scales = family_.row_scales ? static_cast<size_t>(row_blocks_) * 64 : 0;
  return code_bytes() + scales * sizeof(float);
}

cudaError_t GemmSm90::pack(const void* codes,
                           const float* scales,
                           void* packed,
                           cudaStream_t stream) const {
  auto* end = static_cast<uint8_t*>(packed) + code_bytes();
  if (const cudaError_t error = pack_codes(codes, packed, stream); error != cudaSuccess) {
    return error;
  }
  if (family_.pack_scales != nullptr) {
    return family_.pack_scales(scales, n_, k_, packed, stream);
  }
  if (!family_.row_scales) {
    return cudaSuccess;
  }
  const size_t bytes = static_cast<size_t>(n_) * sizeof(float);
  if (const cudaError_t error =
          cudaMemsetAsync(end + bytes, 0, packed_bytes() - code_bytes() - bytes, stream);
      error != cudaSuccess) {
    return error;
  }
  return cudaMemcpyAsync(end, scales, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t GemmSm90::unpack(const void* packed,
                             void* codes,
                             float* scales,
                             cudaStream_t stream) const {
  if (const cudaError_t error = unpack_codes(packed, codes, stream); error != cudaSuccess) {
    return error;
  }
  if (family_.unpack_scales != nullptr) {
    return family_.unpack_scales(packed, n_, k_, scales, stream);
  }
  if (!family_.row_scales) {
    return cudaSuccess;
  }
  return cudaMemcpyAsync(scales, static_cast<const uint8_t*>(packed) + code_bytes(),
                         static_cast<size_t>(n_) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

GemmSm90Plan GemmSm90::plan(size_t tile_index, int64_t m, bool in_pairs) const {
  const GemmSm90Tile& tile = family_.tiles[tile_index];
  if (family_.plan != nullptr) {
    GemmSm90Sizes sizes{.k = k_, .m = m, .row_blocks = row_blocks_, .sms = sms_};
    if (in_pairs || tile.pairs) {
      sizes.clusters = clusters_[tile_index];
    }
    return family_.plan(tile, sizes);
  }
  const int row_tiles = static_cast<int>(ceil_div(row_blocks_, tile.row_blocks));
  const int token_tiles = static_cast<int>(ceil_div(m, tile.tokens));
  const int tiles = row_tiles * token_tiles;
  const int steps = static_cast<int>(ceil_div(ceil_div(k_, family_.block_elements), tile.depth));
  const int row_blocks = tile.row_blocks / tile.cluster;  // of one block
  const int units = row_blocks * tile.depth;
  const double bytes =
      static_cast<double>(units) * family_.unit_bytes +
      static_cast<double>(tile.depth) * std::min<int64_t>(tile.tokens, m) * 128 / tile.cluster;
  const double step = units * family_.clocks_per_unit_token * std::max(tile.tokens, kLeastTokens) +
                      bytes / kFetchedBytes + kStepClocks;
  const bool in_words = tile.resident == 1;  // results leave
  const double store =
      kStoreClocks +
      (in_words ? 0.0 : kPairClocks * static_cast<double>(std::min<int64_t>(tile.tokens, m))) *
          row_blocks;
  const double part_bytes = row_blocks * 64.0 * tile.tokens * 4.0;
  const int blocks = sms_ / tile.cluster;  // or clusters
  GemmSm90Plan best{
      .schedule = make_parts_schedule(row_tiles, token_tiles, steps, blocks, 1),
      .clocks = static_cast<double>(ceil_div(tiles, blocks)) * (steps * step + store)};
  const auto consider = [&best, store](const GemmSchedule& schedule, double clocks) {
    if (clocks + store < best.clocks) {
      best = {.schedule = schedule, .clocks = clocks + store};
    }
  };
  for (size_t i = 0; i < kUsed && in_pairs; ++i) {
    const int cluster = kClusters[i];
    if (tiles <= clusters_[tile_index][i] && steps >= kLeastSteps * cluster &&
        2 * tiles * cluster <= 3 * sms_) {
      consider(make_cluster_schedule(row_tiles, token_tiles, steps, cluster),
               static_cast<double>(ceil_div(steps, cluster)) * step + kClusterClocks +
                   part_bytes / (in_words ? kClusterBytes : kClusterPairBytes));
    }
  }
  // Tiles beyond whole rounds of all blocks, in parts.
  const int left = tiles % blocks;
  const int most = left > 0 ? std::min(blocks / left, steps / kLeastSteps) : 1;
  for (int parts = 2; parts <= most; ++parts) {
    consider(make_parts_schedule(row_tiles, token_tiles, steps, blocks, parts),
             tiles / blocks * (steps * step + store) + ceil_div(steps, parts) * step +
                 kMemoryClocks + (parts + 1) * part_bytes / kPartBytes);
  }
  // Or in runs, which come before whole tiles.
  if (left > 0 && tiles > blocks && tile.tokens <= kMostRunTokens) {
    consider(make_runs_schedule(row_tiles, token_tiles, steps, blocks),
             static_cast<double>(tiles) * steps / blocks * step + kRunsClocks + store);
  }
  return best;
}

int GemmSm90::choose(int64_t m) const {
  int best = -1;
  double least = 0.0;
  for (size_t i = 0; i < family_.tiles.size(); ++i) {
    if (!fits(family_, family_.tiles[i], m)) {
      continue;
    }
    const double clocks = plan(i, m, true).clocks;
    if (best < 0 || clocks < least) {
      best = static_cast<int>(i);
      least = clocks;
    }
  }
  CHECK(best >= 0);
  return best;
}

size_t GemmSm90::workspace_bytes(int64_t max_m) const {
  size_t bytes = 0;
  for (const GemmSm90Tile& tile : family_.tiles) {
    if (serves(family_, tile, max_m)) {
      const size_t part = static_cast<size_t>(tile.row_blocks) * 64 *
                          static_cast<size_t>(tile.tokens) * sizeof(float);
      bytes = std::max(bytes, static_cast<size_t>(sms_ * tile.launched / tile.cluster) * 2 * part);
    }
  }
  return kGemmCounterBytes + bytes;
}

cudaError_t GemmSm90::run(const GemmLaunch& args, const LaunchContext& context) const {
  return run_tile(choose(args.m), args, context);
}

GemmSchedule GemmSm90::schedule(int index, int64_t m) const {
  return plan(static_cast<size_t>(index), m, n_ % 2 == 0).schedule;
}

cudaError_t GemmSm90::run_tile(int index,
                               const GemmLaunch& args,
                               const LaunchContext& context) const {
  const bool in_pairs = n_ % 2 == 0 && args.y_stride % 2 == 0;
  return run_schedule(index, plan(static_cast<size_t>(index), args.m, in_pairs).schedule, args,
                      context);
}

bool GemmSm90::map_x(const void* x, int64_t rows, int box_rows, CUtensorMap& map) const {
  const bool wide = family_.block_elements == 64;  // bf16
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k_), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(k_) * (wide ? 2 : 1)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(family_.block_elements),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t ones[2] = {1, 1};
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode_map_);
  return encode(&map, wide ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2,
                const_cast<void*>(x), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

cudaError_t GemmSm90::run_schedule(int index,
                                   const GemmSchedule& schedule,
                                   const GemmLaunch& args,
                                   const LaunchContext& context) const {
  const GemmSm90Tile& tile = family_.tiles[static_cast<size_t>(index)];
  CUtensorMap map{};
  if (!map_x(args.x, args.m, tile.tokens / tile.cluster, map)) {
    return cudaErrorInvalidValue;
  }
  GemmSm90Args kernel_args = launch_args(args);
  kernel_args.weight_scales = reinterpret_cast<const float*>(kernel_args.weights + code_bytes());
  kernel_args.n = static_cast<int>(n_);
  kernel_args.row_blocks = row_blocks_;
  kernel_args.k_blocks = k_blocks_;
  kernel_args.int8_blocks = int8_blocks_;
  kernel_args.schedule = schedule;
  const int cluster = std::max(tile.cluster, kernel_args.schedule.cluster);
  const Grid grid{.blocks = dim3(static_cast<unsigned>(kernel_args.schedule.blocks * tile.cluster)),
                  .threads = tile.threads,
                  .shared_bytes = tile.shared_bytes,
                  .cluster = static_cast<unsigned>(cluster)};
  return launch(tile.kernel, grid, context, map, kernel_args);
}

bool scaled_by_channel_and_token(const GemmProblem& problem,
                                 const DeviceInfo& device,
                                 WeightCode code,
                                 ActFormat act) {
  return device.hopper() && problem.weight.code == code &&
         problem.weight.scale_per == ScalePer::kChannel &&
         problem.weight.zero_points == ZeroPoints::kNone && problem.act == act && problem.n >= 1 &&
         problem.k >= 64 && problem.k % 64 == 0 && problem.k <= kGemmMaxIntegerK;
}

}  // namespace nibble::cuda
