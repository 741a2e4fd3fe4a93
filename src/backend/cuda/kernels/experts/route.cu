// Which experts each row of a step takes, with what weights: ops/route.h on a GPU.

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMostExperts = 1024;
constexpr int kMostChosen = 32;
constexpr int kLogitRows = 4;   // of a block: they share what it reads of the router
constexpr int kLogitWarps = 8;  // an expert each

struct Best {
  float value;
  int index;
};

__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

/// The largest number, the lowest index of equals, of all lanes.
__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Best other{__shfl_xor_sync(kAllLanes, best.value, distance),
                     __shfl_xor_sync(kAllLanes, best.index, distance)};
    best = better(best, other);
  }
  return best;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__device__ __forceinline__ float top_of_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

__global__ __launch_bounds__(kLogitWarps* kWarp) void logits_kernel(const RouterLogitsArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int lane = threadIdx.x % kWarp;
  const int64_t expert = int64_t{blockIdx.y} * kLogitWarps + threadIdx.x / kWarp;
  const int64_t first = int64_t{blockIdx.x} * kLogitRows;
  if (expert >= args.experts) {
    return;
  }
  const auto* x = static_cast<const __nv_bfloat16*>(args.x);
  float sums[kLogitRows] = {};
  for (int64_t i = int64_t{lane} * kPiece; i < args.hidden; i += kWarp * kPiece) {
    const F32x8 weights = load_f32x8(args.router + expert * args.hidden + i);
#pragma unroll
    for (int r = 0; r < kLogitRows; ++r) {
      const int64_t row = first + r < args.rows ? first + r : first;
      const F32x8 values = load_bf16x8(x + row * args.hidden + i);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        sums[r] = __fmaf_rn(values.v[j], weights.v[j], sums[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kLogitRows; ++r) {
    const float sum = sum_of_warp(sums[r]);
    if (lane == 0 && first + r < args.rows) {
      args.logits[(first + r) * args.experts + expert] =
          sum + (args.bias != nullptr ? args.bias[expert] : 0.0F);
    }
  }
}

__device__ void make_scores(const RouteRowsArgs& args, const float* logits, float* scores) {
  const int lane = threadIdx.x;
  float top = -INFINITY;
  for (int e = lane; e < args.experts; e += kWarp) {
    top = fmaxf(top, logits[e]);
  }
  top = top_of_warp(top);
  float sum = 0.0F;
  for (int e = lane; e < args.experts; e += kWarp) {
    const float x = logits[e];
    float score = x;
    if (args.form.scores == RouterScores::kSoftmax) {
      score = expf(x - top);
    } else if (args.form.scores == RouterScores::kSigmoid) {
      score = 1.0F / (1.0F + expf(-x));
    }
    scores[e] = score;
    sum += score;
  }
  if (args.form.scores == RouterScores::kSoftmax) {
    sum = sum_of_warp(sum);
    for (int e = lane; e < args.experts; e += kWarp) {
      scores[e] /= sum;
    }
  }
}

/// Lane g has the sum of the two largest of group g; all but the best groups become -inf.
__device__ void drop_groups(const RouteRowsArgs& args, float* choice) {
  const int lane = threadIdx.x;
  const int groups = args.form.groups;
  const int size = args.experts / groups;
  float first = -INFINITY;
  float second = -INFINITY;
  if (lane < groups) {
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      const float value = choice[e];
      second = value > first ? first : fmaxf(second, value);
      first = fmaxf(first, value);
    }
  }
  float sum = lane < groups ? first + second : -INFINITY;
  bool kept = false;
  for (int i = 0; i < args.form.kept_groups; ++i) {
    // A group that was kept before must not be the best again, even of equals.
    const Best best = best_of_warp({kept ? -INFINITY : sum, kept ? kWarp : lane});
    kept = kept || best.index == lane;
  }
  if (lane < groups && !kept) {
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      choice[e] = -INFINITY;
    }
  }
}

__global__ __launch_bounds__(kWarp) void route_kernel(const RouteRowsArgs args) {
  __shared__ float scores[kMostExperts];
  __shared__ float choice[kMostExperts];
  __shared__ float weights[kMostChosen];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int lane = threadIdx.x;
  const int64_t row = blockIdx.x;
  make_scores(args, args.logits + row * args.experts, scores);
  __syncwarp();
  for (int e = lane; e < args.experts; e += kWarp) {
    const float value = scores[e] + (args.correction != nullptr ? args.correction[e] : 0.0F);
    choice[e] = isnan(value) ? -INFINITY : value;
  }
  __syncwarp();
  if (args.form.groups > args.form.kept_groups) {
    drop_groups(args, choice);
    __syncwarp();
  }
  constexpr float kTaken = NAN;  // smaller than -inf in better()
  for (int i = 0; i < args.top_k; ++i) {
    Best best{-INFINITY, kMostExperts};
    for (int e = lane; e < args.experts; e += kWarp) {
      const float value = choice[e];
      best = isnan(value) ? best : better(best, {value, e});
    }
    best = best_of_warp(best);
    if (lane == 0) {
      args.chosen[row * args.top_k + i] = best.index;
      weights[i] = scores[best.index];
      choice[best.index] = kTaken;
    }
    __syncwarp();
  }
  if (lane != 0) {
    return;
  }
  if (args.form.scores == RouterScores::kSoftmaxOfChosen) {
    float sum = 0.0F;
    const float top = weights[0];
    for (int i = 0; i < args.top_k; ++i) {
      weights[i] = expf(weights[i] - top);
      sum += weights[i];
    }
    for (int i = 0; i < args.top_k; ++i) {
      weights[i] /= sum;
    }
  }
  float divisor = 1.0F;
  if (args.form.renormalise) {
    float sum = 0.0F;
    for (int i = 0; i < args.top_k; ++i) {
      sum += weights[i];
    }
    divisor = sum + args.form.epsilon;
  }
  for (int i = 0; i < args.top_k; ++i) {
    args.weights[row * args.top_k + i] = weights[i] / divisor * args.form.factor;
  }
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
  const Grid grid{
      .blocks = dim3(static_cast<unsigned>((args.rows + kLogitRows - 1) / kLogitRows),
                     static_cast<unsigned>((args.experts + kLogitWarps - 1) / kLogitWarps)),
      .threads = kLogitWarps * kWarp};
  return launch(logits_kernel, grid, context, args);
}

cudaError_t route_rows(const RouteRowsArgs& args, const LaunchContext& context) {
  if (args.experts < 1 || args.experts > kMostExperts || args.top_k < 1 ||
      args.top_k > kMostChosen || args.top_k > args.experts || args.form.groups > kWarp ||
      args.rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = kWarp};
  return launch(route_kernel, grid, context, args);
}

}  // namespace nibble::cuda
