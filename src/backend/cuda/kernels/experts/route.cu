// The routers of experts on a GPU, behind their logits: which experts each row of a step takes,
// with what weights (ops/route.h), and the order of their slots.

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/kernels/experts/route.cuh"
#include "backend/cuda/kernels/experts/sort.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kRoutedAndSorted = 4;  // most rows that one block does both of

__global__ __launch_bounds__(kWarp) void route_kernel(const RouteRowsArgs args) {
  __shared__ float scores[kMostExperts];
  __shared__ float choice[kMostExperts];
  __shared__ float weights[kMostChosen];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  route_row(args, blockIdx.x, {scores, choice, weights});
}

/// Both for few rows, by one block with a warp for each row.
__global__ __launch_bounds__(kRoutedAndSorted* kWarp) void route_sort_kernel(
    const RouteRowsArgs route, const SortSlotsArgs sort) {
  extern __shared__ float room[];  // [rows][2][experts]
  __shared__ float weights[kRoutedAndSorted][kMostChosen];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  float* scores = room + 2 * warp * route.experts;
  route_row(route, warp, {scores, scores + route.experts, weights[warp]});
  __syncthreads();
  if (warp == 0) {
    sort_warp(sort);
  }
}

__global__ __launch_bounds__(kSortThreads) void sort_kernel(const SortSlotsArgs args) {
  __shared__ __align__(16) uint8_t room[kSortBytes];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  sort_block(args, reinterpret_cast<uint16_t*>(room));
}

bool can_route(const RouteRowsArgs& args) {
  return args.experts >= 1 && args.experts <= kMostExperts && args.top_k >= 1 &&
         args.top_k <= kMostChosen && args.top_k <= args.experts && args.form.groups <= kWarp &&
         args.rows <= INT32_MAX && (args.rows_there == nullptr || args.slot_of != nullptr);
}

/// Counts of a row's slots are of 16 bits.
bool can_sort(const SortSlotsArgs& args) {
  return args.experts >= 1 && args.experts <= kMostExperts && args.rows <= UINT16_MAX &&
         args.cut.step >= 1 && args.cut.most >= args.cut.step && args.cut.most % args.cut.step == 0;
}

}  // namespace

cudaError_t route_rows(const RouteRowsArgs& args, const LaunchContext& context) {
  if (!can_route(args)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = kWarp};
  return launch(route_kernel, grid, context, args);
}

cudaError_t sort_slots(const SortSlotsArgs& args, const LaunchContext& context) {
  if (!can_sort(args)) {
    return cudaErrorInvalidValue;
  }
  return launch(sort_kernel, {.blocks = dim3(1), .threads = kSortThreads}, context, args);
}

cudaError_t route_and_sort(const RouteRowsArgs& route,
                           const SortSlotsArgs& sort,
                           const LaunchContext& context) {
  if (route.rows > kRoutedAndSorted || route.rows * route.top_k > kWarp) {
    const cudaError_t error = route_rows(route, context);
    return error == cudaSuccess ? sort_slots(sort, context) : error;
  }
  if (!can_route(route) || !can_sort(sort)) {
    return cudaErrorInvalidValue;
  }
  if (route.rows == 0) {
    return cudaSuccess;
  }
  const auto rows = static_cast<unsigned>(route.rows);
  const Grid grid{.blocks = dim3(1),
                  .threads = rows * kWarp,
                  .shared_bytes = size_t{rows} * 8 * static_cast<size_t>(route.experts)};
  return launch(route_sort_kernel, grid, context, route, sort);
}

}  // namespace nibble::cuda
