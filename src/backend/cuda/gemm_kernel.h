#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include <cuda_runtime_api.h>

#include "backend/cuda/device_info.h"
#include "backend/cuda/launch.h"
#include "backend/gemm_problem.h"
#include "base/status.h"
#include "core/gemm_input.h"

namespace nibble::cuda {

struct ExpertBlocks;
struct IntBlocks;

enum class GemmResult : uint8_t { kBf16, kF32, kAddF32 };  // stored, stored, added to what is there

/// Start of every workspace that kernels count in; the rest of a workspace holds anything.
inline constexpr size_t kGemmCounterBytes = 16384;

/// One step's product. All pointers are device memory; x and y are 16-byte aligned.
struct GemmLaunch {
  const void* x = nullptr;            // [m, k] dense, of kBf16Blocks as int_blocks.h says
  const float* x_scales = nullptr;    // [m, row_scales()], for the forms that have scales
  const IntBlocks* blocks = nullptr;  // of forms in blocks, which lie as int_blocks.h says
  const void* packed = nullptr;       // the weights, as pack() left them
  const float* bias = nullptr;        // [n], or none
  void* y = nullptr;                  // [m, n] rows y_stride elements apart
  int64_t y_stride = 0;
  int64_t m = 0;
  GemmResult result = GemmResult::kBf16;
  // workspace_bytes(); its first kGemmCounterBytes zero before the first run, and left zero
  void* workspace = nullptr;
};

/// Rows of one expert, which follow each other among the slots of a step.
struct ExpertTile {
  int32_t expert = 0;
  int32_t first = 0;
  int32_t rows = 0;  // 0: nothing to do
};

/// How the rows of each expert of a layer are cut into tiles, which lie in one list or in two.
struct TileRows {
  int32_t most = 0;  // of a tile; a multiple of step
  int32_t step = 0;  // an expert's tiles are as even as multiples of it can be
  // Experts of up to so many rows are a tile each of a list of their own, for another launch; 0:
  // there is no such list.
  int32_t few = 0;
};

/// Whose rows x has: each slot's own, or one for all, of kernels that take_one_row().
enum class GroupedRows : uint8_t { kOfSlots, kOneForAll };

/// Products of the experts of a layer: y[first + r] = x[first + r] · its expert's weights, for the
/// rows of all tiles. All pointers are device memory.
struct GroupedLaunch {
  const void* x = nullptr;          // [slots, k]; [1, k] where all slots are of one row
  const float* x_scales = nullptr;  // [slots, row_scales()], for the forms that have scales
  // Of kIntBlocks, whose scales lie as int_blocks.h says of so many rows as there are slots.
  const ExpertBlocks* blocks = nullptr;
  const void* packed = nullptr;  // weights of the first expert, as pack() left them
  int64_t expert_bytes = 0;      // from one expert's to the next's, a multiple of 128
  const float* bias = nullptr;   // [experts, n], or none
  void* y = nullptr;             // [slots, n], or [slots, n / 2] through an activation
  GemmResult result = GemmResult::kBf16;
  GemmInput::Kind activation = GemmInput::Kind::kPlain;  // of gate and up, where it activates()
  float limit = 0.0F;                                    // of kClampedSwiglu
  int64_t slots = 0;
  GroupedRows rows = GroupedRows::kOfSlots;
  const ExpertTile* tiles = nullptr;  // known on the device alone, and how many they are
  const int32_t* tile_count = nullptr;
  int64_t max_tiles = 0;
  int32_t tile_rows = 0;  // the most rows of a tile: TileRows::most or few of grouped_rows()
  // Whether the launch before is that of the layer's other list, which this one need not wait for.
  bool beside = false;
  void* workspace = nullptr;
};

/// A family's kernels for one problem on one device. Calls are stream-ordered; none allocates
/// device memory, so run() may be captured in a graph.
class GemmKernel {
 public:
  virtual ~GemmKernel() = default;
  /// Bytes of packed weights and scales together.
  [[nodiscard]] virtual size_t packed_bytes() const = 0;
  /// Whether packed weights are the canonical codes and nothing else.
  [[nodiscard]] virtual bool packs_nothing() const { return false; }
  /// codes, scales: the canonical form of QuantTensor ([n, groups] f32), in device memory. Behind
  /// the scales lie as many zero points or minimums, as f32, where the weights have them.
  virtual cudaError_t pack(const void* codes,
                           const float* scales,
                           void* packed,
                           cudaStream_t stream) const = 0;
  /// The inverse, bit for bit.
  virtual cudaError_t unpack(const void* packed,
                             void* codes,
                             float* scales,
                             cudaStream_t stream) const = 0;
  /// Workspace for every m up to max_m.
  [[nodiscard]] virtual size_t workspace_bytes(int64_t max_m) const = 0;
  /// Number of the instance that run() takes for m rows; without, those up to a power of two are
  /// taken to have one.
  [[nodiscard]] virtual int choose(int64_t m) const {
    return std::bit_width(static_cast<uint64_t>(m - 1));
  }
  /// Results of integer activations do not depend on m: each row is the same in every batch.
  virtual cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const = 0;
  /// Tiles of run_grouped() where experts have `mean` rows on average, and `most` at most.
  [[nodiscard]] virtual TileRows grouped_rows(int64_t mean, int64_t /*most*/) const {
    const int32_t rows = mean <= 8 ? 8 : mean <= 16 ? 16 : 64;
    return {rows, rows};
  }
  /// Whether run_grouped() takes one row for all slots.
  [[nodiscard]] virtual bool takes_one_row() const { return false; }
  /// Whether run_grouped() may be told to apply an activation, to BF16.
  [[nodiscard]] virtual bool activates() const { return false; }
  /// The same for the experts of a layer, of families that run_grouped() (GemmEntry::grouped).
  virtual cudaError_t run_grouped(const GroupedLaunch& /*args*/,
                                  const LaunchContext& /*context*/) const {
    return cudaErrorNotSupported;
  }
};

/// What a family offers; listed in registry.cc, best first.
struct GemmEntry {
  std::string_view name;  // "gemm_w4a8_sm90": what --kernel, messages and benchmarks call it
  bool (*accepts)(const GemmProblem& problem, const DeviceInfo& device);
  Result<std::unique_ptr<GemmKernel>> (*make)(const GemmProblem& problem, const DeviceInfo& device);
  bool grouped = false;     // its kernels multiply the experts of a layer as well
  bool only_asked = false;  // taken where --kernel names it; such entries are the last ones
};

/// All families.
[[nodiscard]] std::span<const GemmEntry> gemm_entries();

}  // namespace nibble::cuda
