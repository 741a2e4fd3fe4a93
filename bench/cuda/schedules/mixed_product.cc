#include "bench/cuda/schedules/mixed_product.h"

#include <algorithm>

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

// Bytes that a multiprocessor gets in a clock when all read: of memory and of the L2 cache.
constexpr double kMemoryBytes = 20.0, kCacheBytes = 40.0;

template <typename T>
Result<DeviceMemory> on_device(const std::vector<T>& values) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(values.size() * sizeof(T)));
  if (!values.empty()) {
    NIBBLE_RETURN_IF_ERROR(
        copy_to_device(memory.as<void>(), values.data(), values.size() * sizeof(T)));
  }
  return memory;
}

/// Clocks of a step whose weights have so many bytes.
double step_clocks(const MixedTile& tile, double weight_bytes, int token_tiles) {
  const double products = 2.0 * tile.launched * tile.row_blocks * std::max(tile.tokens, 32);
  // What its multiprocessor gets, a block shares with the others there.
  const double memory = tile.launched * weight_bytes / token_tiles / kMemoryBytes;
  const double cache = tile.launched * (weight_bytes + 128.0 * tile.tokens) / kCacheBytes;
  return std::max({products, memory, cache});
}

/// Activations of one precision: rows of `steps` times what a step takes of a token.
struct StepRows {
  const void* x = nullptr;
  int steps = 0;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  unsigned elements = 128, bytes = 128;  // of a step
};

/// Boxes of a step of `tokens` tokens, swizzled where wgmma reads them as they are copied.
bool map_x(void* encode_map, const StepRows& rows, int m, int tokens, CUtensorMap& map) {
  const auto steps = static_cast<cuuint64_t>(rows.steps);
  const cuuint64_t sizes[2] = {steps * rows.elements, static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[1] = {steps * rows.bytes};
  const cuuint32_t box[2] = {rows.elements, static_cast<cuuint32_t>(tokens)};
  const cuuint32_t ones[2] = {1, 1};
  const auto encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode_map);
  return encode(&map, rows.type, 2, const_cast<void*>(rows.x), sizes, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                rows.bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

int MixedProblem::bf16_blocks() const {
  return static_cast<int>(std::count(bf16.begin(), bf16.end(), true));
}

PrecisionMap last_blocks(int blocks, int percent) {
  PrecisionMap map(static_cast<size_t>(blocks), false);
  const auto count = static_cast<std::ptrdiff_t>((blocks * percent + 50) / 100);
  std::fill(map.end() - count, map.end(), true);
  return map;
}

MixedTiles mixed_tiles_of(const MixedProblem& problem, const MixedTile& tile, int unit_blocks) {
  MixedTiles tiles{.row_tiles = static_cast<int>(ceil_div(problem.n, 64 * tile.row_blocks)),
                   .token_tiles = static_cast<int>(ceil_div(problem.m, tile.tokens)),
                   .int8_steps = problem.int8_blocks(),
                   .bf16_steps = 2 * problem.bf16_blocks(),
                   .unit_blocks = unit_blocks};
  tiles.int8_cost = step_clocks(tile, 4096.0 * tile.row_blocks, tiles.token_tiles);
  tiles.bf16_cost = step_clocks(tile, 2048.0 * tile.row_blocks, tiles.token_tiles);
  tiles.helper_cost = static_cast<double>(tile.sum_bytes()) / kCacheBytes + 500.0;
  tiles.wait_cost = 2500.0;
  return tiles;
}

int choose_unit_blocks(const MixedProblem& problem, const MixedTile& tile, int sms) {
  const int blocks = std::max(problem.bf16_blocks(), 1);
  const MixedTiles tiles = mixed_tiles_of(problem, tile, blocks);
  const double share = tiles.tiles() * tiles.tile_cost() / (sms * tile.launched);
  int units = 1;  // of BF16 blocks
  while (units < blocks && units < 8 &&
         static_cast<double>(ceil_div(blocks, units)) * 2.0 * tiles.bf16_cost > share) {
    ++units;
  }
  return static_cast<int>(ceil_div(blocks, units));
}

Result<std::unique_ptr<MixedProduct>> MixedProduct::make(const MixedProblem& problem,
                                                         const MixedTile& tile,
                                                         MixedSchedule schedule,
                                                         int unit_blocks,
                                                         const DeviceInfo& device) {
  if (!takes(tile, problem)) {
    return make_error(StatusCode::kInvalidArgument,
                      "activations of {} bits are not stored two a byte", problem.act_bits);
  }
  auto product = std::make_unique<MixedProduct>();
  cudaDriverEntryPointQueryResult found{};
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &product->encode_map_, 12000,
                                             cudaEnableDefault, &found),
            "asking the driver for tensor maps"));
  if (found != cudaDriverEntryPointSuccess) {
    return make_error(StatusCode::kUnavailable, "the driver has no cuTensorMapEncodeTiled");
  }
  NIBBLE_RETURN_IF_ERROR(check(cudaFuncSetAttribute(reinterpret_cast<const void*>(tile.kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(tile.shared_bytes)),
                               "asking for shared memory"));
  product->problem_ = problem;
  product->tile_ = tile;
  product->workers_ = device.sms * tile.launched;
  product->list_ =
      make_work_list(mixed_tiles_of(problem, tile, unit_blocks), schedule, product->workers_);
  NIBBLE_RETURN_IF_ERROR(product->allocate());
  return product;
}

Status MixedProduct::allocate() {
  NIBBLE_ASSIGN_OR_RETURN(segments_, on_device(list_.segments));
  NIBBLE_ASSIGN_OR_RETURN(begins_, on_device(list_.begins));
  NIBBLE_ASSIGN_OR_RETURN(shared_, on_device(list_.shared));
  // One of each warpgroup for each shared tile, and one of all workers.
  NIBBLE_ASSIGN_OR_RETURN(counters_, DeviceMemory::allocate((2 * list_.shared.size() + 1) * 4));
  NIBBLE_ASSIGN_OR_RETURN(
      slots_, DeviceMemory::allocate(static_cast<size_t>(list_.slots) * tile_.sum_bytes()));
  return {};
}

cudaError_t MixedProduct::run(const MixedOperands& operands, const LaunchContext& context) const {
  CUtensorMap int8_x{}, bf16_x{};
  const int int8 = problem_.int8_blocks(), bf16 = problem_.bf16_blocks();
  StepRows int8_rows{.x = operands.int8_x, .steps = int8};
  if (tile_.store == ActStore::kNibbles) {
    int8_rows = {.x = operands.nibbles_x, .steps = int8, .elements = 64, .bytes = 64};
  }
  const StepRows bf16_rows{.x = operands.bf16_x,
                           .steps = 2 * bf16,
                           .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           .elements = 64};
  if ((int8 > 0 && !map_x(encode_map_, int8_rows, problem_.m, tile_.tokens, int8_x)) ||
      (bf16 > 0 && !map_x(encode_map_, bf16_rows, problem_.m, tile_.tokens, bf16_x))) {
    return cudaErrorInvalidValue;
  }
  if (int8 == 0 || bf16 == 0) {  // a precision without blocks has no matrix
    (int8 == 0 ? int8_x : bf16_x) = int8 == 0 ? bf16_x : int8_x;
  }
  const MixedGemmArgs args{.int8_weights = operands.int8_weights,
                           .bf16_weights = operands.bf16_weights,
                           .weight_scales = operands.weight_scales,
                           .x_scales = operands.x_scales,
                           .segments = segments_.as<MixedSegment>(),
                           .begins = begins_.as<int32_t>(),
                           .shared = shared_.as<MixedSlots>(),
                           .counters = counters_.as<uint32_t>(),
                           .meetings = counters_.as<uint32_t>() + 2 * list_.shared.size(),
                           .slots = slots_.as<void>(),
                           .y = operands.y,
                           .m = problem_.m,
                           .n = problem_.n,
                           .row_blocks = static_cast<int>(ceil_div(problem_.n, 64)),
                           .int8_steps = int8,
                           .bf16_steps = 2 * bf16,
                           .rounds = list_.rounds};
  const Grid grid{.blocks = dim3(static_cast<unsigned>(workers_)),
                  .threads = tile_.threads,
                  .shared_bytes = tile_.shared_bytes};
  return launch(tile_.kernel, grid, context, int8_x, bf16_x, args);
}

}  // namespace nibble::cuda
