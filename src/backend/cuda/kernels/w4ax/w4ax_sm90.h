#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/w4ax/args.h"
#include "backend/cuda/kernels/w4ax/packed.h"

namespace nibble::cuda {

/// The instances of one form of weights: of mma.sync, fewest tokens first, and of wgmma.
struct W4AxTiles {
  std::span<const W4AxTile> few, wide;
};

/// INT4 weights times rows in blocks of 4 and 8 bits (COMET, https://arxiv.org/abs/2410.12168), all
/// of which Hopper multiplies as INT8. Sums of blocks are added in the order of K, so that results
/// are those of the reference, bit for bit.
class W4AxSm90 final : public W4AxPacked {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const W4AxTiles& tiles,
                                                  const GemmProblem& problem,
                                                  const DeviceInfo& device);

  W4AxSm90(const W4AxTiles& tiles,
           const GemmProblem& problem,
           const DeviceInfo& device,
           void* encode_map)
      : W4AxPacked(problem), tiles_(tiles), sms_(device.sms), encode_map_(encode_map) {}
  [[nodiscard]] size_t workspace_bytes(int64_t max_m) const override;
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override;

  /// Index of the tile.
  [[nodiscard]] int choose(int64_t m) const override;
  /// Tests and benchmarks.
  [[nodiscard]] int tile_count() const;
  [[nodiscard]] const W4AxTile& tile(int index) const;
  [[nodiscard]] ChainSchedule schedule(int index, int64_t m) const {
    return plan(tile(index), m).schedule;
  }
  cudaError_t run_schedule(int index,
                           const ChainSchedule& schedule,
                           const GemmLaunch& args,
                           const LaunchContext& context) const;

 private:
  /// How a product is shared among blocks, and the clocks that this is reckoned to take.
  struct Plan {
    ChainSchedule schedule;
    double clocks = 0.0;
  };
  [[nodiscard]] Plan plan(const W4AxTile& tile, int64_t m) const;
  /// False where the driver refuses.
  [[nodiscard]] bool map_all(const W4AxTile& tile, const GemmLaunch& args, W4AxMaps& maps) const;

  const W4AxTiles& tiles_;
  int sms_;
  void* encode_map_;  // the driver's cuTensorMapEncodeTiled
};

extern const GemmEntry kGemmW4AxSm90;
extern const W4AxTiles kW4AxBlock128, kW4AxBlock64, kW4AxBlock32;

}  // namespace nibble::cuda
