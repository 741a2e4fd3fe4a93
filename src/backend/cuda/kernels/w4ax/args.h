#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "backend/cuda/int_blocks.h"
#include "backend/cuda/kernels/gemm_sm90/instance.h"
#include "backend/cuda/kernels/w4ax/chain.h"

namespace nibble::cuda {

/// How what the kernels copy lies in memory.
struct W4AxMaps {
  CUtensorMap x;        // [K / 128][tokens][128], swizzled
  CUtensorMap weights;  // [pieces of 32 rows][halves of pieces along K][8 bytes]
  CUtensorMap scales;   // [blocks of K][tokens]
};

/// Parameters of the kernels of w4ax_sm90.
struct W4AxArgs {
  // weights, bias, y, counters, parts, y_stride, m, n and result; k_blocks of 128.
  GemmSm90Args base;
  ChainSchedule schedule;
};

/// One instance of the kernels, with what the choice among them needs.
struct W4AxTile {
  int tokens = 0;
  int rows = 0;
  int depth = 0;     // K blocks of a step
  int resident = 1;  // blocks that fit a multiprocessor
  bool few = false;  // whether it is of few.cuh
  // Clocks that a step is reckoned to take where blocks have a multiprocessor to themselves, and
  // where they share it.
  double alone = 0.0, shared = 0.0;
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(W4AxMaps maps, W4AxArgs args) = nullptr;
};

}  // namespace nibble::cuda
