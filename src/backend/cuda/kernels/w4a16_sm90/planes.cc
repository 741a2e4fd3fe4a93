#include "backend/cuda/kernels/w4a16_sm90/planes.h"

#include <algorithm>
#include <numeric>

#include <cuda_runtime.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

// What the choice of a plan reckons with, per multiprocessor and clock.
constexpr double kMemoryBytes = 19.0;        // of weights
constexpr double kTileClocks = 600.0;        // to add up and store a tile
constexpr double kClusterClocks = 850.0;     // for each block of a cluster
constexpr double kPairClocks = 28.0;         // for the copies of 128 of K
constexpr double kConvertClocks = 12.0;      // for 128 of K of a token
constexpr int kMaxTile = kW4A16PlanesWarps;  // slices; each warp adds up one
constexpr int kLeastStages = 4;
constexpr int kLeastRing = 65536;

W4A16PlanesKernel kernel_for(int group_size, int tokens) {
  return group_size == 32 ? w4a16_planes_kernel<32>(tokens) : w4a16_planes_kernel<128>(tokens);
}

int ring_bytes(int64_t m, int x_bytes) {
  return kW4A16PlanesMostShared - w4a16_planes_rest(static_cast<int>(m)) - x_bytes;
}

// At most how far into a line a slice begins.
int most_in_line(int slice_bytes) {
  return kW4A16LineBytes - std::gcd(slice_bytes, kW4A16LineBytes);
}

}  // namespace

W4A16PlanesPlan plan_w4a16_planes(int64_t n, int64_t k, int group_size, int64_t m, int sms) {
  const int pairs = ceil_div(k, 128);
  W4A16PlanesPlan plan{.slices = static_cast<int>(ceil_div(n, 16))};
  double least = 0.0;
  for (const int shift : {0, 1}) {
    const int cluster = 1 << shift;
    const int x_bytes = static_cast<int>(m) * ceil_div(pairs, cluster) * kW4A16RecordBytes;
    const int places = sms / cluster;
    const int rounds = ceil_div(plan.slices, static_cast<int64_t>(places) * kMaxTile);
    if (cluster > pairs || ring_bytes(m, x_bytes) < kLeastRing || (cluster > 1 && rounds > 1)) {
      continue;
    }
    const int tiles = std::min(plan.slices, rounds * places);
    const int tile = ceil_div(plan.slices, tiles);
    const double pair_clocks = rounds * tile * w4a16_slice_bytes(group_size) / kMemoryBytes +
                               m * kConvertClocks + kPairClocks;
    const double clocks = ceil_div(pairs, cluster) * pair_clocks + rounds * kTileClocks +
                          (cluster > 1 ? kClusterClocks * cluster : 0.0);
    if (plan.blocks == 0 || clocks < least) {
      least = clocks;
      plan.tile = tile;
      plan.tiles = tiles;
      plan.cluster_shift = shift;
      plan.blocks = std::min(tiles, places) * cluster;
      plan.x_bytes = x_bytes;
    }
  }
  if (plan.blocks == 0) {
    return plan;
  }
  const int cluster = 1 << plan.cluster_shift;
  plan.tile_slices = plan.slices / plan.tiles;
  plan.larger_tiles = plan.slices % plan.tiles;
  plan.row_warps = (plan.tile + 1) / 2;
  while ((2 << plan.k_shift) * plan.row_warps <= kW4A16PlanesWarps &&
         (2 << plan.k_shift) * cluster <= pairs) {
    ++plan.k_shift;
  }
  // As much in a stage as leaves stages enough, but never for all warps: while those of one
  // compute, others wait for the next.
  const int ring = ring_bytes(m, plan.x_bytes);
  const int slice_bytes = w4a16_slice_bytes(group_size);
  plan.pair_bytes = static_cast<int>(
      round_up(plan.tile * slice_bytes + most_in_line(slice_bytes), kW4A16LineBytes));
  plan.step_shift = plan.k_shift;
  while (plan.step_shift > 0 && (plan.row_warps << plan.step_shift == kW4A16PlanesWarps ||
                                 ring / (plan.pair_bytes << plan.step_shift) < kLeastStages)) {
    --plan.step_shift;
  }
  plan.weight_bytes = plan.pair_bytes << plan.step_shift;
  // More stages than there are steps serve nothing. One that is filled again always falls to the
  // same set of warps (w4a16_sm90/decode.cc says why).
  const int rounds = ceil_div(plan.tiles, plan.blocks / cluster);
  const int steps = rounds * ceil_div(ceil_div(pairs, cluster), 1 << plan.step_shift);
  const int sets = 1 << (plan.k_shift - plan.step_shift);
  const int stages = std::min(kW4A16PlanesStages, ring / plan.weight_bytes);
  plan.stages = steps <= stages ? steps : stages / sets * sets;
  plan.shared_bytes =
      std::max(kW4A16PlanesLeastShared, plan.stages * plan.weight_bytes + plan.x_bytes +
                                            w4a16_planes_rest(static_cast<int>(m)));
  return plan;
}

Result<W4A16Planes> W4A16Planes::make(const GemmProblem& problem, const DeviceInfo& device) {
  W4A16Planes planes;
  planes.n_ = problem.n;
  planes.k_ = problem.k;
  planes.group_size_ = problem.weight.group_size;
  for (int64_t m = 1; m <= kW4A16PlanesTokens; ++m) {
    planes.plans_[m] = plan_w4a16_planes(problem.n, problem.k, planes.group_size_, m, device.sms);
  }
  for (const int tokens : {1, kW4A16PlanesTokens}) {
    const auto* kernel = reinterpret_cast<const void*>(kernel_for(planes.group_size_, tokens));
    NIBBLE_RETURN_IF_ERROR(
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kW4A16PlanesMostShared),
              "gemm_w4a16_planes_sm90"));
  }
  return planes;
}

bool W4A16Planes::takes(int64_t m) const { return m <= kW4A16PlanesTokens && plans_[m].blocks > 0; }

cudaError_t W4A16Planes::run(const GemmLaunch& args, const LaunchContext& context) const {
  const W4A16PlanesPlan& plan = plans_[args.m];
  const W4A16PlanesArgs kernel_args = w4a16_few_args(args, n_, k_, plan);
  return launch(kernel_for(group_size_, static_cast<int>(args.m)),
                {.blocks = dim3(static_cast<unsigned>(plan.blocks)),
                 .threads = kW4A16PlanesThreads,
                 .shared_bytes = static_cast<size_t>(plan.shared_bytes),
                 .cluster = 1U << plan.cluster_shift},
                context, kernel_args);
}

}  // namespace nibble::cuda
