// The logits of routers: which kernel adds them up.

#include "backend/cuda/kernels/experts/logits.cuh"
#include "backend/cuda/kernels/experts/route.cuh"

namespace nibble::cuda {
namespace {

constexpr int64_t kSomeRows = 160;  // from so many on, blocks are enough with twice the experts

template <int kExpertTiles, int kRowTiles, int kPlanes, int kAhead>
cudaError_t launch_logits(const RouterLogitsArgs& args, const LaunchContext& context) {
  constexpr int64_t kRows = 8 * kRowTiles;
  constexpr int64_t kExperts = 16 * kExpertTiles;
  const Grid grid{.blocks = dim3(static_cast<unsigned>((args.rows + kRows - 1) / kRows),
                                 static_cast<unsigned>((args.experts + kExperts - 1) / kExperts)),
                  .threads = kLogitThreads};
  return launch(logits_kernel<kExpertTiles, kRowTiles, kPlanes, kAhead>, grid, context, args);
}

template <int kPlanes>
cudaError_t logits_of(const RouterLogitsArgs& args, const LaunchContext& context) {
  constexpr int kFew = kPlanes == 1 ? 7 : 3;
  constexpr int kMany = kPlanes == 1 ? 2 : 1;
  return args.rows <= 8           ? launch_logits<1, 1, kPlanes, kFew>(args, context)
         : args.rows <= 16        ? launch_logits<1, 2, kPlanes, kMany + 1>(args, context)
         : args.rows <= kSomeRows ? launch_logits<1, 4, kPlanes, kMany>(args, context)
                                  : launch_logits<2, 4, kPlanes, 1>(args, context);
}

}  // namespace

cudaError_t router_logits(const RouterLogitsArgs& args, const LaunchContext& context) {
  if (args.hidden % 8 != 0 || args.experts < 1 || args.experts > kMostExperts ||
      args.rows > INT32_MAX || (args.planes != 1 && args.planes != kRouterPlanes)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  return args.planes == 1 ? logits_of<1>(args, context) : logits_of<kRouterPlanes>(args, context);
}

}  // namespace nibble::cuda
