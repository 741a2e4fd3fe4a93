#pragma once

#include <cmath>
#include <cstdint>

#include "backend/cuda/expert_kernels.h"

// Which experts a row takes, with what weights (ops/route.h), by one warp.
namespace nibble::cuda {

constexpr int kWarp = 32;
constexpr unsigned kWarpLanes = 0xffffffffU;
constexpr int kMostExperts = 1024;
constexpr int kMostChosen = kWarp;

struct Best {
  float value;
  int index;
};

__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

/// The largest number, the lowest index of equals, of all lanes; no NaN.
__device__ __forceinline__ Best best_of_warp(Best best) {
  const uint32_t bits = __float_as_uint(best.value + 0.0F);                     // of -0 those of 0
  const uint32_t key = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;  // in their order
  const uint32_t top = __reduce_max_sync(kWarpLanes, key);
  const auto index = static_cast<unsigned>(key == top ? best.index : INT32_MAX);
  best.index = static_cast<int>(__reduce_min_sync(kWarpLanes, index));
  best.value = __uint_as_float((top & 0x80000000U) != 0 ? top & 0x7fffffffU : ~top);
  return best;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWarpLanes, value, distance);
  }
  return value;
}

__device__ __forceinline__ float top_of_warp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kWarpLanes, value, distance));
  }
  return value;
}

__device__ inline void make_scores(const RouteRowsArgs& args, const float* logits, float* scores) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
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
__device__ inline void drop_groups(const RouteRowsArgs& args, float* choice) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
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

/// What a warp needs to route a row: numbers of each expert, and of each that is chosen.
struct RouteRoom {
  float* scores = nullptr;
  float* choice = nullptr;
  float* weights = nullptr;
};

/// A row that only fills the step up takes no expert. top_k is at most a warp's lanes.
__device__ inline void route_nowhere(const RouteRowsArgs& args, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (lane < args.top_k) {
    args.chosen[row * args.top_k + lane] = -1;
    args.slot_of[row * args.top_k + lane] = kNoSlot;
    args.weights[row * args.top_k + lane] = 0.0F;
  }
}

/// route() of one row, by a warp.
__device__ inline void route_row(const RouteRowsArgs& args, int64_t row, const RouteRoom& room) {
  float* scores = room.scores;
  float* choice = room.choice;
  float* weights = room.weights;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (args.rows_there != nullptr && row >= __ldcg(args.rows_there)) {
    route_nowhere(args, row);
    return;
  }
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
      const int number = best.index - args.first_expert;
      const bool present = number >= 0 && number < args.present;
      args.chosen[row * args.top_k + i] = present ? number : -1;
      if (!present) {
        args.slot_of[row * args.top_k + i] = kNoSlot;
      }
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

}  // namespace nibble::cuda
