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
  CUtensorMap scales;   // of the block form, [blocks of K][tokens]
};

/// Parameters of the kernels of w4ax_sm90.
struct W4AxArgs {
  // weights, x_scales, bias, y, counters, parts, y_stride, m, n and result; k_blocks of 128. In the
  // class form weight_scales are those of channels.
  GemmSm90Args base;
  // Of the class form, some of whose tiles take K blocks in another order, and a bit for each 32
  // channels of a K block, 1 where they have 8 bits. In that order up to eight_blocks all have 8,
  // from mixed_blocks on 4. Here where `here` says so, else in memory.
  bool here = false;
  uint32_t eight_here[kChannelsHere / 1024];
  uint16_t order_here[kChannelsHere / 128];
  const uint16_t* order = nullptr;
  const uint8_t* masks = nullptr;
  int eight_blocks = 0, mixed_blocks = 0;
  int x_scale_stride = 0;  // from one block's scales of tokens to the next's
  ChainSchedule schedule;
};

/// One instance of the kernels, with what the choice among them needs.
struct W4AxTile {
  int tokens = 0;
  int rows = 0;      // of a block or cluster
  int depth = 0;     // K blocks of a step
  int resident = 1;  // blocks that fit a multiprocessor
  int cluster = 1;
  bool few = false;  // whether it is of few.cuh
  // Clocks that a step is reckoned to take where blocks have a multiprocessor to themselves, and
  // where they share it.
  double alone = 0.0, shared = 0.0;
  unsigned threads = 0;
  size_t shared_bytes = 0;
  void (*kernel)(W4AxMaps maps, W4AxArgs args) = nullptr;
};

}  // namespace nibble::cuda
