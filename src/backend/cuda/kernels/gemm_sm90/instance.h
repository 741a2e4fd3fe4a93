#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/gemm_sm90/schedule.h"

namespace nibble::cuda {

/// Parameters of the kernels of gemm_sm90/gemm_sm90.cuh.
struct GemmSm90Args {
  const uint8_t* weights = nullptr;  // [row_blocks][k_blocks] units
  const float* weight_scales = nullptr;
  const float* x_scales = nullptr;
  const float* bias = nullptr;
  void* y = nullptr;
  uint32_t* counters = nullptr;  // [split_tiles][2], zero
  void* parts = nullptr;         // [split_blocks][2][2] sums of a warpgroup
  int64_t y_stride = 0;
  int m = 0, n = 0;
  int row_blocks = 0, k_blocks = 0;
  int int8_blocks = 0;  // of codecs in two parts: so many of the K blocks are the first part
  GemmResult result = GemmResult::kBf16;
  GemmSchedule schedule;
};

/// One instance of the kernel, with what the choice among them needs.
struct GemmSm90Tile {
  int tokens = 0;
  int row_blocks = 0;     // of 64 rows
  int depth = 0;          // K blocks of a step
  int resident = 0;       // blocks that fit a multiprocessor
  int launched = 1;       // blocks of one launch on a multiprocessor
  int cluster = 1;        // blocks that share a tile, each with some of its rows
  bool clusters = false;  // whether clusters of blocks may share a tile's steps
  bool pairs = false;     // whether it is of pairs of blocks (w4a16_sm90/pairs.cuh)
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(CUtensorMap x, GemmSm90Args args) = nullptr;
};

/// Parameters of the kernels of gemm_sm90/grouped.cuh.
struct GroupedSm90Args {
  const uint8_t* weights = nullptr;  // [row_blocks][k_blocks] units of the first expert
  int64_t expert_bytes = 0;          // from one expert's to the next's
  int64_t code_bytes = 0;            // of an expert's units, behind which its scales lie
  const float* x_scales = nullptr;   // [slots]
  const float* bias = nullptr;       // [experts, n], or none
  void* y = nullptr;                 // [slots, n]
  const ExpertTile* tiles = nullptr;
  const int32_t* tile_count = nullptr;
  int n = 0;
  int row_blocks = 0, k_blocks = 0;
  int steps = 0;  // of an item
  GemmResult result = GemmResult::kBf16;
};

/// One instance of the kernel for the experts of a layer.
struct GroupedSm90Tile {
  int tokens = 0;
  int step = 0;   // of the tokens that items of fewer rows take
  int box = 0;    // rows of x of one copy
  int depth = 0;  // K blocks of a step
  int resident = 0;
  int cluster = 1;
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(CUtensorMap x, GroupedSm90Args args) = nullptr;
};

}  // namespace nibble::cuda
