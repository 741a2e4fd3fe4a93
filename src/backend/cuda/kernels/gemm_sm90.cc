#include "backend/cuda/kernels/gemm_sm90.h"

#include <algorithm>

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

// Rates of an H200 per multiprocessor and clock (kernels_micro, measured): bytes from memory, bytes
// from the L2 cache (what large products reach), and the share of the tensor cores' rate that a
// main loop sustains.
constexpr double kMemoryBytes = 19.0;
constexpr double kCacheBytes = 46.0;
constexpr double kSustained = 0.9;
constexpr double kPartBytes = 25.0;         // as the last of a split tile reads parts
constexpr double kStartClocks = 3000.0;     // of a kernel that does not fit beside its predecessor
constexpr double kExchangeClocks = 3000.0;  // to leave sums in memory and to find the last

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether a tile is not mostly empty at m tokens; the first tile, the smallest, serves all.
bool fits(const GemmSm90Family& family, const GemmSm90Tile& tile, int64_t m) {
  return tile.tokens < 2 * m || tile.tokens == family.tiles.front().tokens;
}

}  // namespace

Result<std::unique_ptr<GemmKernel>> GemmSm90::make(const GemmSm90Family& family,
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
  for (const GemmSm90Tile& tile : family.tiles) {
    NIBBLE_RETURN_IF_ERROR(check(cudaFuncSetAttribute(reinterpret_cast<const void*>(tile.kernel),
                                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      static_cast<int>(tile.shared_bytes)),
                                 family.name));
  }
  return std::unique_ptr<GemmKernel>(
      std::make_unique<GemmSm90>(family, problem, device, encode_map));
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
      encode_map_(encode_map) {}

size_t GemmSm90::code_bytes() const {
  return static_cast<size_t>(row_blocks_) * static_cast<size_t>(k_blocks_) *
         static_cast<size_t>(family_.unit_bytes);
}

size_t GemmSm90::packed_bytes() const {
  const size_t scales = family_.pack_scales == nullptr ? static_cast<size_t>(row_blocks_) * 64 : 0;
  return code_bytes() + scales * sizeof(float);
}

cudaError_t GemmSm90::pack(const void* codes,
                           const float* scales,
                           void* packed,
                           cudaStream_t stream) const {
  auto* end = static_cast<uint8_t*>(packed) + code_bytes();
  if (const cudaError_t error = family_.pack(codes, n_, k_, packed, stream); error != cudaSuccess) {
    return error;
  }
  if (family_.pack_scales != nullptr) {
    return family_.pack_scales(scales, n_, k_, packed, stream);
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
  if (const cudaError_t error = family_.unpack(packed, n_, k_, codes, stream);
      error != cudaSuccess) {
    return error;
  }
  if (family_.unpack_scales != nullptr) {
    return family_.unpack_scales(packed, n_, k_, scales, stream);
  }
  return cudaMemcpyAsync(scales, static_cast<const uint8_t*>(packed) + code_bytes(),
                         static_cast<size_t>(n_) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

GemmSm90::Plan GemmSm90::plan(const GemmSm90Tile& tile, int64_t m) const {
  const int row_tiles = static_cast<int>(ceil_div(row_blocks_, tile.row_blocks));
  const int token_tiles = static_cast<int>(ceil_div(m, tile.tokens));
  const int steps = static_cast<int>(
      ceil_div(ceil_div(k_, family_.block_elements), static_cast<int64_t>(tile.depth)));
  const int units = tile.row_blocks * tile.depth;
  const double weight_bytes = static_cast<double>(units) * family_.unit_bytes;
  const double x_bytes = static_cast<double>(tile.depth) * std::min<int64_t>(tile.tokens, m) * 128;
  const double mma = units * family_.clocks_per_unit_token * std::max(tile.tokens, 32) / kSustained;
  const double step =
      tile.launched * (std::max({mma, (weight_bytes + x_bytes) / kCacheBytes,
                                 weight_bytes / kMemoryBytes / std::min(token_tiles, sms_ / 2)}) +
                       0.1 * (weight_bytes + x_bytes) / kCacheBytes);  // of equals, the lighter
  const double part_bytes = tile.row_blocks * 64.0 * tile.tokens * 4.0;
  const double exchange = part_bytes / kPartBytes;
  Plan plan;
  plan.schedule = make_schedule(row_tiles, token_tiles, steps, sms_ * tile.launched / tile.cluster,
                                (kExchangeClocks + exchange) / step, exchange / step);
  const double tiles_per_block =
      static_cast<double>(row_tiles) * token_tiles / plan.schedule.blocks;
  plan.clocks = plan.schedule.time * step + tiles_per_block * part_bytes / 64.0;
  if (tile.resident == 1) {
    plan.clocks += kStartClocks;
  }
  return plan;
}

int GemmSm90::choose(int64_t m) const {
  if (family_.tile_for != nullptr) {
    return family_.tile_for(m);
  }
  int best = 0;
  double least = 0.0;
  for (size_t i = 0; i < family_.tiles.size(); ++i) {
    if (!fits(family_, family_.tiles[i], m)) {
      continue;
    }
    const double clocks = plan(family_.tiles[i], m).clocks;
    if (i == 0 || clocks < least) {
      best = static_cast<int>(i);
      least = clocks;
    }
  }
  return best;
}

size_t GemmSm90::workspace_bytes(int64_t max_m) const {
  size_t bytes = 0;
  for (const GemmSm90Tile& tile : family_.tiles) {
    if (fits(family_, tile, max_m)) {
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

cudaError_t GemmSm90::run_tile(int index,
                               const GemmLaunch& args,
                               const LaunchContext& context) const {
  const GemmSm90Tile& tile = family_.tiles[static_cast<size_t>(index)];
  const bool wide = family_.block_elements == 64;  // bf16
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k_), static_cast<cuuint64_t>(args.m)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(k_) * (wide ? 2 : 1)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(family_.block_elements),
                             static_cast<cuuint32_t>(tile.tokens / tile.cluster)};
  const cuuint32_t ones[2] = {1, 1};
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode_map_);
  if (encode(&map, wide ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2,
             const_cast<void*>(args.x), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return cudaErrorInvalidValue;
  }
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  const auto* weights = static_cast<const uint8_t*>(args.packed);
  const GemmSm90Args kernel_args{
      .weights = weights,
      .weight_scales = reinterpret_cast<const float*>(weights + code_bytes()),
      .x_scales = args.x_scales,
      .bias = args.bias,
      .y = args.y,
      .counters = reinterpret_cast<uint32_t*>(workspace),
      .parts = workspace + kGemmCounterBytes,
      .y_stride = args.y_stride,
      .m = static_cast<int>(args.m),
      .n = static_cast<int>(n_),
      .row_blocks = row_blocks_,
      .k_blocks = k_blocks_,
      .result = args.result,
      .schedule = plan(tile, args.m).schedule};
  const auto cluster = static_cast<unsigned>(tile.cluster);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kernel_args.schedule.blocks) * cluster);
  config.blockDim = dim3(tile.threads);
  config.dynamicSmemBytes = tile.shared_bytes;
  config.stream = context.stream;
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (context.overlap ? 1 : 0);
  return cudaLaunchKernelEx(&config, tile.kernel, map, kernel_args);
}

}  // namespace nibble::cuda
