#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cuda/device_info.h"
#include "base/status.h"
#include "bench/cuda/bench_timer.h"
#include "bench/cuda/schedules/mixed_gemm.h"
#include "bench/cuda/schedules/work_list.h"

namespace nibble::cuda {

/// Precision of the activations of each K block of 128.
using PrecisionMap = std::vector<bool>;  // whether it is BF16

struct MixedProblem {
  int n = 0, k = 0, m = 0;
  PrecisionMap bf16;
  int act_bits = 8;  // of the values of INT8 blocks, the highest ones of their bytes: 8 or 4

  [[nodiscard]] int bf16_blocks() const;
  [[nodiscard]] int int8_blocks() const { return k / 128 - bf16_blocks(); }
};

/// What a product reads, on the device.
struct MixedOperands {
  const void* int8_x = nullptr;           // [m, 128 int8_blocks()] int8
  const void* nibbles_x = nullptr;        // the same two a byte, where they have 4 bits
  const void* bf16_x = nullptr;           // [m, 128 bf16_blocks()] bf16
  const float* x_scales = nullptr;        // [m]
  const uint8_t* int8_weights = nullptr;  // as pack_mixed() leaves them
  const uint8_t* bf16_weights = nullptr;
  const float* weight_scales = nullptr;  // [n], filled up to 64
  void* y = nullptr;                     // [m, n] bf16
};

/// One product by one instance of the kernel and one schedule.
class MixedProduct final {
 public:
  /// unit_blocks: K blocks that are summed at once, which are part of the result's definition; see
  /// choose_unit_blocks().
  static Result<std::unique_ptr<MixedProduct>> make(const MixedProblem& problem,
                                                    const MixedTile& tile,
                                                    MixedSchedule schedule,
                                                    int unit_blocks,
                                                    const DeviceInfo& device);

  cudaError_t run(const MixedOperands& operands, const LaunchContext& context) const;
  [[nodiscard]] const MixedWorkList& list() const { return list_; }

 private:
  Status allocate();

  MixedProblem problem_;
  MixedTile tile_;
  MixedWorkList list_;
  int workers_ = 0;
  void* encode_map_ = nullptr;
  DeviceMemory segments_, begins_, shared_, counters_, slots_;
};

/// Whether a tile can be run with a problem's activations.
[[nodiscard]] inline bool takes(const MixedTile& tile, const MixedProblem& problem) {
  return tile.store == ActStore::kBytes || problem.act_bits == 4;
}

/// Whether a tile is neither much larger than m tokens nor one of many small ones.
[[nodiscard]] inline bool suits(const MixedTile& tile, int m) {
  return tile.tokens < 4 * std::max(m, 16) && (4 * tile.tokens >= m || tile.tokens >= 128);
}

/// The last `percent` of the K blocks in BF16, where a permutation puts outlier channels.
PrecisionMap last_blocks(int blocks, int percent);

/// The product as tiles of this instance with their costs, in clocks of a multiprocessor.
MixedTiles mixed_tiles_of(const MixedProblem& problem, const MixedTile& tile, int unit_blocks);

/// The largest units of which a schedule can give every worker its share.
int choose_unit_blocks(const MixedProblem& problem, const MixedTile& tile, int sms);

}  // namespace nibble::cuda
