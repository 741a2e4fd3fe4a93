#include "backend/cuda/kernels/w4a16_sm90/decode.h"

#include <algorithm>

#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

// What the choice of a plan reckons with, per multiprocessor and clock.
constexpr double kMemoryBytes = 19.0;      // of weights
constexpr double kBesideBytes = 100.0;     // of activations, from the L2 cache
constexpr double kPairClocks = 100.0;      // for the copies of 128 of K
constexpr double kTileClocks = 600.0;      // to add up and store a tile
constexpr double kClusterClocks = 2400.0;  // for each block of a cluster

int tokens_for(int64_t m) {
  return m <= kW4A16DecodeSizes[0] ? kW4A16DecodeSizes[0] : kW4A16DecodeSizes[1];
}

W4A16DecodeKernel kernel_for(int group_size, int tokens) {
  return group_size == 32 ? w4a16_decode_kernel<32>(tokens) : w4a16_decode_kernel<128>(tokens);
}

}  // namespace

W4A16DecodePlan plan_w4a16_decode(int64_t n, int64_t k, int group_size, int64_t m, int sms) {
  const int pairs = ceil_div(k, 128), tokens = tokens_for(m);
  W4A16DecodePlan plan{.slices = static_cast<int>(ceil_div(n, 16))};
  double least = 0.0;
  for (const int cluster : {1, 2}) {
    if (cluster > pairs) {
      continue;
    }
    const int places = sms / cluster;
    const int rounds = ceil_div(plan.slices, static_cast<int64_t>(places) * kW4A16DecodeMostTile);
    const int tiles = std::min(plan.slices, rounds * places);
    const int tile = ceil_div(plan.slices, tiles);
    if (cluster > 1 && rounds > 1) {
      continue;
    }
    const double pair_clocks = tile * w4a16_slice_bytes(group_size) / kMemoryBytes +
                               tokens * 256 / kBesideBytes + kPairClocks;
    const double clocks = rounds * (ceil_div(pairs, cluster) * pair_clocks + kTileClocks) +
                          (cluster > 1 ? kClusterClocks * cluster : 0.0);
    if (plan.tile == 0 || clocks < least) {
      least = clocks;
      plan.tile = tile;
      plan.tiles = tiles;
      plan.cluster = cluster;
      plan.blocks = std::min(tiles, places) * cluster;
    }
  }
  plan.least = plan.slices / plan.tiles;
  plan.larger = plan.slices % plan.tiles;
  plan.row_warps = (plan.tile + 1) / 2;
  plan.k_warps =
      std::max(1, std::min(kW4A16DecodeWarps / plan.row_warps, pairs / (2 * plan.cluster)));
  const auto ring_bytes = [&] {
    return kW4A16DecodeShared - w4a16_decode_rest(tokens, plan.row_warps * plan.k_warps);
  };
  // The ring holds twice what the warps take at once.
  const int pair_bytes = 256 * tokens + plan.tile * w4a16_slice_bytes(group_size);
  while (plan.k_warps > 1 && ring_bytes() < 2 * plan.k_warps * pair_bytes) {
    plan.k_warps /= 2;
  }
  plan.warps = plan.row_warps * plan.k_warps;
  // As much in a stage as leaves stages enough. Each stage always falls to the same set of warps:
  // another might be ahead of the one that still waits for it, and two parities do not tell rounds
  // apart that lie so far from each other.
  const int ring = ring_bytes();
  for (int step = plan.k_warps; step >= 1; --step) {
    if (plan.k_warps % step != 0) {
      continue;
    }
    plan.step_pairs = step;
    plan.sets = plan.k_warps / step;
    plan.weights_at = step * 256 * tokens;
    plan.stage_bytes =
        ceil_div(plan.weights_at + step * plan.tile * w4a16_slice_bytes(group_size), 1024) * 1024;
    plan.stages = std::min(kW4A16DecodeStages, ring / plan.stage_bytes) / plan.sets * plan.sets;
    plan.set_bytes = plan.sets * plan.stage_bytes;
    plan.ring_bytes = plan.stages * plan.stage_bytes;
    if (plan.stages >= (tokens == 8 ? 6 : 3)) {
      break;
    }
  }
  return plan;
}

Result<W4A16Decode> W4A16Decode::make(const GemmProblem& problem, const DeviceInfo& device) {
  W4A16Decode decode;
  decode.n_ = problem.n;
  decode.k_ = problem.k;
  decode.group_size_ = problem.weight.group_size;
  decode.sms_ = device.sms;
  for (const int tokens : kW4A16DecodeSizes) {
    const auto* kernel = reinterpret_cast<const void*>(kernel_for(decode.group_size_, tokens));
    NIBBLE_RETURN_IF_ERROR(
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kW4A16DecodeShared),
              "gemm_w4a16_decode_sm90"));
  }
  return decode;
}

cudaError_t W4A16Decode::run(const GemmLaunch& args, const LaunchContext& context) const {
  const W4A16DecodePlan plan = plan_w4a16_decode(n_, k_, group_size_, args.m, sms_);
  const int tokens = tokens_for(args.m);
  const W4A16DecodeArgs kernel_args = w4a16_few_args(args, n_, k_, plan);
  return launch(kernel_for(group_size_, tokens),
                {.blocks = dim3(static_cast<unsigned>(plan.blocks)),
                 .threads = w4a16_decode_threads(plan.warps),
                 .shared_bytes = kW4A16DecodeShared,
                 .cluster = static_cast<unsigned>(plan.cluster)},
                context, kernel_args);
}

}  // namespace nibble::cuda
