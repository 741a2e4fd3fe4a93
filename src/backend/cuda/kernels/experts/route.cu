// The routers of experts on a GPU: logits, then which experts each row of a step takes, with what
// weights (ops/route.h), and the order of their slots.

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/kernels/experts/route.cuh"
#include "backend/cuda/kernels/experts/sort.cuh"
#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kFewLogitRows = 128;
constexpr int kSomeLogitRows = 1024;
constexpr int kLogitWarps = 4;
constexpr int kRoutedAndSorted = 4;  // most rows that one block does both of

/// A warp has kRows rows and kExperts experts; a lane's pieces are added in the order of columns,
/// then those of the lanes, whatever these numbers are. kAhead pieces are read at once.
template <int kRows, int kExperts, int kAhead>
__global__ __launch_bounds__(kLogitWarps* kWarp) void logits_kernel(const RouterLogitsArgs args) {
  ptx::allow_successor();
  constexpr int kStride = kWarp * kPiece;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t warp = int64_t{blockIdx.y} * kLogitWarps + threadIdx.x / kWarp;
  const int64_t first_expert = warp * kExperts;
  const int64_t first = int64_t{blockIdx.x} * kRows;
  if (first_expert >= args.experts) {
    return;
  }
  const auto* x = static_cast<const __nv_bfloat16*>(args.x);
  const __nv_bfloat16* rows[kRows];
  const float* weights[kExperts];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x + min(first + r, args.rows - 1) * args.hidden;
  }
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    weights[e] = args.router + min(first_expert + e, int64_t{args.experts - 1}) * args.hidden;
  }
  F32x8 w[kAhead][kExperts];
  const auto load_weights = [&](int64_t base) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int e = 0; e < kExperts; ++e) {
        const int64_t i = base + a * kStride;
        w[a][e] = i < args.hidden ? load_f32x8(weights[e] + i) : F32x8{};
      }
    }
  };
  const int64_t own = int64_t{lane} * kPiece;
  load_weights(own);  // which nothing changes
  ptx::wait_for_predecessor();
  float sums[kRows][kExperts] = {};
  for (int64_t base = own; base < args.hidden; base += kAhead * kStride) {
    if (base > own) {
      load_weights(base);
    }
    F32x8 v[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t i = base + a * kStride;
        v[a][r] = i < args.hidden ? load_bf16x8(rows[r] + i) : F32x8{};
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < kExperts; ++e) {
#pragma unroll
          for (int j = 0; j < kPiece; ++j) {
            sums[r][e] = __fmaf_rn(v[a][r].v[j], w[a][e].v[j], sums[r][e]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      const float sum = sum_of_warp(sums[r][e]);
      const int64_t expert = first_expert + e;
      if (lane == 0 && first + r < args.rows && expert < args.experts) {
        args.logits[(first + r) * args.experts + expert] =
            sum + (args.bias != nullptr ? args.bias[expert] : 0.0F);
      }
    }
  }
}

template <int kRows, int kExperts, int kAhead>
cudaError_t launch_logits(const RouterLogitsArgs& args, const LaunchContext& context) {
  constexpr int kOfBlock = kLogitWarps * kExperts;
  const Grid grid{.blocks = dim3(static_cast<unsigned>((args.rows + kRows - 1) / kRows),
                                 static_cast<unsigned>((args.experts + kOfBlock - 1) / kOfBlock)),
                  .threads = kLogitWarps * kWarp};
  return launch(logits_kernel<kRows, kExperts, kAhead>, grid, context, args);
}

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

cudaError_t router_logits(const RouterLogitsArgs& args, const LaunchContext& context) {
  if (args.hidden % kPiece != 0 || args.experts < 1 || args.experts > kMostExperts ||
      args.rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  return args.rows <= kFewLogitRows    ? launch_logits<1, 1, 12>(args, context)
         : args.rows <= kSomeLogitRows ? launch_logits<4, 4, 2>(args, context)
                                       : launch_logits<8, 4, 1>(args, context);
}

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
