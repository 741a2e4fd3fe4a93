#include <cuda_bf16.h>

#include "backend/cuda/kernels/gemm_sm90/pack.cuh"
#include "bench/cuda/schedules/mixed_forms.h"
#include "bench/cuda/schedules/mixed_gemm.h"

namespace nibble::cuda {
namespace {

/// Nibble of a row and column, 0 outside of the matrix: plus 8, as in a file.
__device__ uint32_t code_at(const MixedPacking& args, int row, int column) {
  return row < args.n
             ? args.codes[(static_cast<int64_t>(row) * args.k + column) / 2] >> (column % 2 * 4) &
                   15U
             : 8U;
}

/// Word `i` of an INT8 unit of rows from row0 and columns from column0: two's complement.
__device__ uint32_t int8_word(const MixedPacking& args, int row0, int column0, int i) {
  uint32_t word = 0;
  if (args.order == WeightOrder::kPlain) {
    for (int j = 0; j < 8; ++j) {
      word |= (code_at(args, row0 + i / 16, column0 + i % 16 * 8 + j) ^ 8U) << (4 * j);
    }
    return word;
  }
  const int thread = (i >> 2) & 127;
  const int step = 2 * (i >> 9) + ((i & 3) >> 1);
  const int column = column0 + 32 * step + 16 * (i & 1) + 4 * (thread & 3);
  for (int b = 0; b < 4; ++b) {
    for (int odd = 0; odd < 2; ++odd) {
      word |= (code_at(args, row0 + gemm_row(thread, odd), column + b) ^ 8U) << (8 * b + 4 * odd);
    }
  }
  return word;
}

/// Word `i` of a BF16 unit: codes as they are.
__device__ uint32_t bf16_word(const MixedPacking& args, int row0, int column0, int i) {
  uint32_t word = 0;
  if (args.order == WeightOrder::kPlain) {
    for (int j = 0; j < 8; ++j) {
      word |= code_at(args, row0 + i / 8, column0 + i % 8 * 8 + j) << (4 * j);
    }
    return word;
  }
  const int thread = i / 4, step = i % 4;
  for (int r = 0; r < 4; ++r) {
    const int row = row0 + gemm_row(thread, r % 2);
    const int column = column0 + 16 * step + 2 * (thread & 3) + r / 2 * 8;
    word |= code_at(args, row, column) << (4 * r) | code_at(args, row, column + 1) << (16 + 4 * r);
  }
  return word;
}

/// A block for each row block and step; INT8 steps first.
__global__ void pack_units_of(MixedPacking args) {
  const int row_block = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(blockIdx.y);
  const int row0 = 64 * row_block;
  const int int8_steps = args.int8_count, bf16_steps = 2 * args.bf16_count;
  if (step < int8_steps) {
    auto* unit = reinterpret_cast<uint32_t*>(args.int8_weights) +
                 (static_cast<int64_t>(row_block) * int8_steps + step) * 1024;
    for (int i = static_cast<int>(threadIdx.x); i < 1024; i += static_cast<int>(blockDim.x)) {
      unit[i] = int8_word(args, row0, 128 * args.int8_blocks[step], i);
    }
    return;
  }
  const int half = step - int8_steps;
  auto* unit = reinterpret_cast<uint32_t*>(args.bf16_weights) +
               (static_cast<int64_t>(row_block) * bf16_steps + half) * 512;
  for (int i = static_cast<int>(threadIdx.x); i < 512; i += static_cast<int>(blockDim.x)) {
    unit[i] = bf16_word(args, row0, 128 * args.bf16_blocks[half / 2] + 64 * (half % 2), i);
  }
}

/// Four bytes' remainders of 8, with their signs.
__device__ uint32_t narrow_word(uint32_t word) {
  uint32_t narrow = 0;
  for (int b = 0; b < 4; ++b) {
    const int code = static_cast<int8_t>(word >> (8 * b)) % 8;
    narrow |= (static_cast<uint32_t>(code) & 0xffU) << (8 * b);
  }
  return narrow;
}

/// A thread for each eight codes.
__global__ void narrow(uint2* x, uint32_t* nibbles, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    const uint32_t first = narrow_word(x[i].x), second = narrow_word(x[i].y);
    x[i] = {first << 4 & 0xf0f0f0f0U, second << 4 & 0xf0f0f0f0U};
    nibbles[i] = join_nibbles(first, second);
  }
}

__global__ void reference(MixedReference args) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int token = static_cast<int>(blockIdx.y);
  if (row >= args.n) {
    return;
  }
  const auto weight = [&](int column) {
    const int64_t at = static_cast<int64_t>(row) * args.k + column;
    return static_cast<double>(args.codes[at / 2] >> (at % 2 * 4) & 15) - 8.0;
  };
  double sum = 0.0, size = 0.0;
  const auto add = [&](double product) {
    sum += product;
    size += fabs(product);
  };
  const double x_scale = args.x_scales[token];
  for (int i = 0; i < 128 * args.int8_count; ++i) {
    const int8_t x = args.int8_x[static_cast<int64_t>(token) * 128 * args.int8_count + i];
    add(x_scale * x * weight(128 * args.int8_blocks[i / 128] + i % 128));
  }
  for (int i = 0; i < 128 * args.bf16_count; ++i) {
    const auto* x = static_cast<const __nv_bfloat16*>(args.bf16_x) +
                    static_cast<int64_t>(token) * 128 * args.bf16_count;
    add(static_cast<double>(__bfloat162float(x[i])) *
        weight(128 * args.bf16_blocks[i / 128] + i % 128));
  }
  const int64_t at = static_cast<int64_t>(token) * args.n + row;
  args.y[at] = args.weight_scales[row] * sum;
  args.size[at] = args.weight_scales[row] * size;
}

}  // namespace

std::vector<MixedTile> mixed_tiles() {
  std::vector<MixedTile> tiles;
  for (const auto& form :
       {kMixedFull, kMixedNoPipeline, kMixedNoInterleave, kMixedSignExtension, kMixedNibbles}) {
    tiles.insert(tiles.end(), form.begin(), form.end());
  }
  return tiles;
}

cudaError_t pack_mixed(const MixedPacking& args, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.n + 63) / 64),
                    static_cast<unsigned>(args.int8_count + 2 * args.bf16_count));
  return launch(pack_units_of, {.blocks = blocks, .threads = 256},
                {.stream = stream, .overlap = false}, args);
}

cudaError_t narrow_acts(int8_t* x, uint8_t* nibbles, int64_t count, cudaStream_t stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const dim3 blocks(static_cast<unsigned>((count / 8 + 255) / 256));
  return launch(narrow, {.blocks = blocks, .threads = 256}, {.stream = stream, .overlap = false},
                reinterpret_cast<uint2*>(x), reinterpret_cast<uint32_t*>(nibbles), count / 8);
}

cudaError_t reference_mixed(const MixedReference& args, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.n + 127) / 128), static_cast<unsigned>(args.m));
  return launch(reference, {.blocks = blocks, .threads = 128}, {.stream = stream, .overlap = false},
                args);
}

}  // namespace nibble::cuda
