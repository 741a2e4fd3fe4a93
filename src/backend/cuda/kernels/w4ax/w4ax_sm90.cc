#include "backend/cuda/kernels/w4ax/w4ax_sm90.h"

#include <algorithm>
#include <utility>

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/int_blocks.h"
#include "backend/cuda/kernels/gemm_sm90/launch_args.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr size_t kSlackBytes = 256;
// What the plan reckons with beside the clocks of steps, fitted to timings on an H200.
constexpr double kHandClocks = 2500.0;  // to hand the sums of a tile on
constexpr double kTileClocks = 1500.0;  // to store a tile

/// What a tensor map says: a matrix of up to three dimensions and the box that a copy brings.
struct Box {
  cuuint32_t rank = 0;
  cuuint64_t sizes[3] = {};
  cuuint64_t strides[2] = {};  // bytes, of the dimensions from the second on
  cuuint32_t counts[3] = {};
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

const W4AxTiles& tiles_of(const WeightFormat& weight) {
  switch (weight.group_size) {
    case 128:
      return kW4AxBlock128;
    case 64:
      return kW4AxBlock64;
    default:
      return kW4AxBlock32;
  }
}

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return device.hopper() && is_w4ax(problem);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return W4AxSm90::make(tiles_of(problem.weight), problem, device);
}

}  // namespace

Result<std::unique_ptr<GemmKernel>> W4AxSm90::make(const W4AxTiles& tiles,
                                                   const GemmProblem& problem,
                                                   const DeviceInfo& device) {
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
  auto kernel = std::make_unique<W4AxSm90>(tiles, problem, device, encode_map);
  for (int i = 0; i < kernel->tile_count(); ++i) {
    const W4AxTile& tile = kernel->tile(i);
    NIBBLE_RETURN_IF_ERROR(check(cudaFuncSetAttribute(reinterpret_cast<const void*>(tile.kernel),
                                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      static_cast<int>(tile.shared_bytes)),
                                 kGemmW4AxSm90.name));
  }
  return std::unique_ptr<GemmKernel>(std::move(kernel));
}

int W4AxSm90::tile_count() const {
  return static_cast<int>(tiles_.few.size() + tiles_.wide.size());
}

const W4AxTile& W4AxSm90::tile(int index) const {
  const auto i = static_cast<size_t>(index);
  return i < tiles_.few.size() ? tiles_.few[i] : tiles_.wide[i - tiles_.few.size()];
}

W4AxSm90::Plan W4AxSm90::plan(const W4AxTile& of, int64_t m) const {
  const int row_tiles = static_cast<int>(ceil_div(n(), static_cast<int64_t>(of.rows)));
  const int token_tiles = static_cast<int>(ceil_div(m, static_cast<int64_t>(of.tokens)));
  const int tiles = row_tiles * token_tiles, steps = count().k_blocks / of.depth;
  Plan best;
  for (int resident = 1; resident <= of.resident; ++resident) {
    const int most = sms_ * resident;
    for (const bool in_runs : {false, true}) {
      const ChainSchedule schedule =
          make_chain_schedule(row_tiles, token_tiles, steps, most, in_runs);
      const bool runs = schedule.run_tiles > 0;
      const double each =
          runs ? static_cast<double>(tiles) / schedule.blocks : ceil_div(tiles, schedule.blocks);
      const bool alone = schedule.blocks <= sms_;
      const double clocks = each * steps * (alone ? of.alone : of.shared) +
                            (runs ? kHandClocks : 0.0) + each * kTileClocks;
      if (best.clocks == 0.0 || clocks < best.clocks) {
        best = {schedule, clocks};
      }
    }
  }
  return best;
}

int W4AxSm90::choose(int64_t m) const {
  int best = -1;
  double least = 0.0;
  for (int i = 0; i < tile_count(); ++i) {
    if (count().k_blocks % tile(i).depth != 0) {
      continue;
    }
    const double clocks = plan(tile(i), m).clocks;
    if (best < 0 || clocks < least) {
      best = i;
      least = clocks;
    }
  }
  return best;
}

size_t W4AxSm90::workspace_bytes(int64_t /*max_m*/) const {
  size_t bytes = 0;
  for (int i = 0; i < tile_count(); ++i) {
    const W4AxTile& of = tile(i);
    const auto sums = static_cast<size_t>(of.rows) * static_cast<size_t>(of.tokens);
    const size_t words = of.few ? std::max(sums, size_t{1024}) : sums;  // whole words of a thread
    bytes = std::max(bytes, static_cast<size_t>(sms_ * of.resident) * words * sizeof(float));
  }
  return kGemmCounterBytes + bytes + kSlackBytes;
}

cudaError_t W4AxSm90::run(const GemmLaunch& args, const LaunchContext& context) const {
  const int index = choose(args.m);
  return run_schedule(index, plan(tile(index), args.m).schedule, args, context);
}

bool W4AxSm90::map_all(const W4AxTile& of, const GemmLaunch& args, W4AxMaps& maps) const {
  const auto map = [&](CUtensorMap& to, CUtensorMapDataType type, const void* from,
                       const Box& box) {
    const cuuint32_t ones[3] = {1, 1, 1};
    const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode_map_);
    return encode(&to, type, box.rank, const_cast<void*>(from), box.sizes, box.strides, box.counts,
                  ones, CU_TENSOR_MAP_INTERLEAVE_NONE, box.swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  const auto m = static_cast<cuuint64_t>(args.m), row = static_cast<cuuint64_t>(k());
  const auto depth = static_cast<cuuint32_t>(of.depth);
  const auto half = static_cast<cuuint64_t>(pieces().piece_bytes) / 2;
  const auto halves = static_cast<cuuint64_t>(count().k_blocks) * 2;
  const bool mapped = map(maps.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, args.x,
                          {.rank = 3,
                           .sizes = {128, m, ceil_div(row, 128)},
                           .strides = {row, 128},
                           .counts = {128, static_cast<cuuint32_t>(of.tokens), depth},
                           .swizzle = CU_TENSOR_MAP_SWIZZLE_128B}) &&
                      map(maps.weights, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, args.packed,
                          {.rank = 3,
                           .sizes = {half / 8, halves, static_cast<cuuint64_t>(count().row_pieces)},
                           .strides = {half, half * halves},
                           .counts = {static_cast<cuuint32_t>(half / 8), 2 * depth,
                                      static_cast<cuuint32_t>(of.rows / 32)}});
  if (!mapped) {
    return false;
  }
  const auto stride = static_cast<cuuint64_t>(int_scale_stride(args.m));
  return map(maps.scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, args.x_scales,
             {.rank = 2,
              .sizes = {stride, static_cast<cuuint64_t>(int_scale_rows(*args.blocks, k()))},
              .strides = {stride * sizeof(float)},
              .counts = {static_cast<cuuint32_t>(of.tokens),
                         depth * static_cast<cuuint32_t>(128 / args.blocks->block)}});
}

cudaError_t W4AxSm90::run_schedule(int index,
                                   const ChainSchedule& schedule,
                                   const GemmLaunch& args,
                                   const LaunchContext& context) const {
  const W4AxTile& of = tile(index);
  if (!takes(args)) {
    return cudaErrorInvalidValue;
  }
  W4AxMaps maps{};
  if (!map_all(of, args, maps)) {
    return cudaErrorInvalidValue;
  }
  W4AxArgs kernel_args{.base = launch_args(args), .schedule = schedule};
  kernel_args.base.n = static_cast<int>(n());
  kernel_args.base.k_blocks = count().k_blocks;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(schedule.blocks)),
                  .threads = of.threads,
                  .shared_bytes = of.shared_bytes};
  return launch(of.kernel, grid, context, maps, kernel_args);
}

const GemmEntry kGemmW4AxSm90{.name = "gemm_w4ax_sm90", .accepts = accepts, .make = make};

}  // namespace nibble::cuda
