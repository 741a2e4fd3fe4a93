#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda.h>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// Parameters of the kernels of experts_sm90/loop.cuh.
struct ExpertsSm90Args {
  const uint8_t* weights = nullptr;   // Int4GroupLayout, of the first expert
  int64_t expert_bytes = 0;           // from one expert's weights to the next one's
  const ExpertTile* tiles = nullptr;  // on the device; or none: the m rows of one matrix
  const int32_t* tile_count = nullptr;
  int m = 0;
  int x_step = 1;               // from one slot's row of x to the next one's: 0 where all have one
  const float* bias = nullptr;  // [experts, n], or none
  void* y = nullptr;
  int64_t y_stride = 0;
  int n = 0;
  int row_blocks = 0;  // of 64 rows
  int pairs = 0;       // of 128 of K
  int width = 0;       // rows of the gate, where packed rows are of gate and up in turns, or 0
  GemmResult result = GemmResult::kBf16;
  GemmInput::Kind activation = GemmInput::Kind::kPlain;
  float limit = 0.0F;
  bool beside = false;  // of GroupedLaunch
};

/// One instance of the kernel.
struct ExpertsSm90Tile {
  int tokens = 0;
  int step = 0;     // of the tokens that items of fewer rows take
  int box = 0;      // rows of x of one copy
  int panels = 0;   // of 64 of K, that it has of each
  int cluster = 1;  // blocks that share an item
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(CUtensorMap x, ExpertsSm90Args args) = nullptr;
};

/// Kernels for a codec of w4a16_sm90/codecs.cuh, fewest tokens first.
template <typename Codec>
[[nodiscard]] std::span<const ExpertsSm90Tile> experts_sm90_tiles();

/// MXFP4 and INT4 in groups, experts and single matrices, for any k that groups divide.
extern const GemmEntry kGemmMxfp4Sm90;
extern const GemmEntry kExpertsW4A16Sm90;

}  // namespace nibble::cuda
