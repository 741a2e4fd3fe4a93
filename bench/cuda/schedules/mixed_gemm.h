#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backend/cuda/launch.h"
#include "bench/cuda/schedules/nibbles.h"
#include "bench/cuda/schedules/work_list.h"

namespace nibble::cuda {

/// What one part of the kernel is done without.
enum class MixedForm : uint8_t {
  kFull,
  kNoPipeline,     // one stage: copies, conversion and products follow each other
  kNoInterleave,   // weights in rows, as in a file
  kSignExtension,  // INT4 to INT8 with its sign instead of 16 times as much
  kNibbles         // activations of INT8 blocks, which have 4 bits, in two a byte
};

enum class WeightOrder : uint8_t {
  kInterleaved,  // as threads take them: whole 16-byte words
  kPlain         // rows one after the other, as they are in a file
};
enum class Widening : uint8_t {
  kZeros,  // a nibble becomes the high half of a byte: 16 times the weight
  kSigns   // and the low half, with its sign
};

/// Parameters of the kernel.
struct MixedGemmArgs {
  const uint8_t* int8_weights = nullptr;  // [row_blocks][int8_steps] units of 4096 bytes
  const uint8_t* bf16_weights = nullptr;  // [row_blocks][bf16_steps] units of 2048 bytes
  const float* weight_scales = nullptr;   // [n], filled up to whole row blocks
  const float* x_scales = nullptr;        // [m], of the INT8 blocks
  const MixedSegment* segments = nullptr;
  const int32_t* begins = nullptr;
  const MixedSlots* shared = nullptr;
  uint32_t* counters = nullptr;  // [shared tiles][2], zero
  uint32_t* meetings = nullptr;  // one, zero
  void* slots = nullptr;         // sums of shared tiles
  void* y = nullptr;             // [m, n] bf16
  int m = 0, n = 0;
  int row_blocks = 0;
  int int8_steps = 0, bf16_steps = 0;
  int rounds = 0;
};

/// One instance of the kernel. A worker is a block.
struct MixedTile {
  int tokens = 0;
  int row_blocks = 0;  // of 64 rows
  int launched = 0;    // blocks of a launch on a multiprocessor
  MixedForm form = MixedForm::kFull;
  ActStore store = ActStore::kBytes;
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(CUtensorMap int8_x, CUtensorMap bf16_x, MixedGemmArgs args) = nullptr;

  [[nodiscard]] size_t sum_bytes() const {
    return static_cast<size_t>(tokens) * static_cast<size_t>(row_blocks) * 64 * 4;
  }
};

/// All instances: every form of each tile.
std::vector<MixedTile> mixed_tiles();

/// Canonical codes [n, k / 2] to the units of both precisions.
struct MixedPacking {
  const uint8_t* codes = nullptr;
  const int32_t* int8_blocks = nullptr;  // on the device
  const int32_t* bf16_blocks = nullptr;
  uint8_t* int8_weights = nullptr;
  uint8_t* bf16_weights = nullptr;
  int n = 0, k = 0;
  int int8_count = 0, bf16_count = 0;  // K blocks
  WeightOrder order = WeightOrder::kInterleaved;
};
cudaError_t pack_mixed(const MixedPacking& args, cudaStream_t stream);

/// Makes of x 16 times codes of -7..7, in place. nibbles: the codes, two a byte. count: a multiple
/// of 8.
cudaError_t narrow_acts(int8_t* x, uint8_t* nibbles, int64_t count, cudaStream_t stream);

/// y [m, n] in double precision, one thread for each result.
struct MixedReference {
  const uint8_t* codes = nullptr;
  const int32_t* int8_blocks = nullptr;
  const int32_t* bf16_blocks = nullptr;
  const int8_t* int8_x = nullptr;  // [m, 128 int8_count]
  const void* bf16_x = nullptr;    // [m, 128 bf16_count]
  const float* weight_scales = nullptr;
  const float* x_scales = nullptr;
  double* y = nullptr;
  double* size = nullptr;  // the same of magnitudes: what rounding is measured by
  int m = 0, n = 0, k = 0;
  int int8_count = 0, bf16_count = 0;
};
cudaError_t reference_mixed(const MixedReference& args, cudaStream_t stream);

}  // namespace nibble::cuda
