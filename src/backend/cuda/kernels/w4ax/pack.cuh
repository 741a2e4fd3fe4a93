#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/w4ax/packed.h"
#include "backend/cuda/kernels/w4ax/piece.cuh"
#include "backend/cuda/launch.h"

// Weights to pieces (w4ax/piece.cuh) and back.
namespace nibble::cuda {

/// Matrix and pieces of a kernel that goes through them; and its group scales.
struct W4AxPacking {
  uint32_t* codes = nullptr;  // [n, k / 8]
  float* scales = nullptr;    // [n, k / block]
  uint8_t* pieces = nullptr;
  int64_t n = 0, k = 0;
  int k_blocks = 0;
};

// A block for each piece; one thread for each word of codes.
template <typename Form>
__global__ void w4ax_pack(const W4AxPacking to) {
  const int64_t piece = blockIdx.x;
  const int64_t row0 = piece / to.k_blocks * 32, block = piece % to.k_blocks;
  uint8_t* bytes = to.pieces + piece * Form::kPieceBytes;
  for (int i = static_cast<int>(threadIdx.x); i < Form::kCodeBytes / 4;
       i += static_cast<int>(blockDim.x)) {
    const int lane = i >> 2 & 31, half = i >> 7 & 1, sixteen = i >> 8;
    const int64_t column =
        block * 128 + 64 * half + 32 * (i >> 1 & 1) + 16 * (i & 1) + 4 * (lane & 3);
    uint32_t word = 0;
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t row = row0 + 16 * sixteen + 2 * (lane >> 2) + odd;
      if (row >= to.n || column >= to.k) {
        continue;
      }
      const uint32_t four = to.codes[row * (to.k / 8) + column / 8] >> (4 * (column % 8));
      for (int b = 0; b < 4; ++b) {
        word |= (((four >> (4 * b)) & 15U) ^ 8U) << (8 * b + 4 * odd);
      }
    }
    reinterpret_cast<uint32_t*>(bytes)[i] = word;
  }
  constexpr int kBlock = 128 / Form::kSubs;
  auto* scales = reinterpret_cast<__nv_bfloat16*>(bytes + Form::kCodeBytes);
  for (int i = static_cast<int>(threadIdx.x); i < 32 * Form::kSubs;
       i += static_cast<int>(blockDim.x)) {
    const int64_t row = row0 + i % 32, group = block * Form::kSubs + i / 32;
    const bool inside = row < to.n && group < to.k / kBlock;
    scales[i] = __float2bfloat16(inside ? to.scales[row * (to.k / kBlock) + group] : 0.0F);
  }
}

// One thread for each eight codes, and for the scale of the block that they begin.
template <typename Form>
__global__ void w4ax_unpack(const W4AxPacking from) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / (from.k / 8), column = i % (from.k / 8) * 8;
  if (row >= from.n) {
    return;
  }
  const uint8_t* bytes =
      from.pieces + (row / 32 * from.k_blocks + column / 128) * Form::kPieceBytes;
  const auto* words = reinterpret_cast<const uint32_t*>(bytes);
  const int within_row = static_cast<int>(row % 32);
  uint32_t word = 0;
  for (int j = 0; j < 8; j += 4) {
    const int within = static_cast<int>(column % 128) + j;
    const int lane = within_row % 16 / 2 * 4 + within / 4 % 4;
    const uint32_t four =
        words[within_row / 16 * 256 + within / 64 * 128 + lane * 4 + within / 16 % 4];
    for (int b = 0; b < 4; ++b) {
      word |= (((four >> (8 * b + 4 * (row % 2))) & 15U) ^ 8U) << (4 * (j + b));
    }
  }
  from.codes[i] = word;
  constexpr int kBlock = 128 / Form::kSubs;
  if (column % kBlock == 0) {
    const auto* scales = reinterpret_cast<const __nv_bfloat16*>(bytes + Form::kCodeBytes);
    from.scales[row * (from.k / kBlock) + column / kBlock] =
        __bfloat162float(scales[column % 128 / kBlock * 32 + within_row]);
  }
}

template <typename Form>
cudaError_t w4ax_pack_pieces(const void* codes,
                             const float* scales,
                             int64_t n,
                             int64_t k,
                             void* pieces,
                             cudaStream_t stream) {
  const W4AxCount count = w4ax_count(n, k);
  const W4AxPacking to{.codes = static_cast<uint32_t*>(const_cast<void*>(codes)),
                       .scales = const_cast<float*>(scales),
                       .pieces = static_cast<uint8_t*>(pieces),
                       .n = n,
                       .k = k,
                       .k_blocks = count.k_blocks};
  return launch(
      w4ax_pack<Form>,
      {.blocks = dim3(static_cast<unsigned>(count.row_pieces * count.k_blocks)), .threads = 256},
      {.stream = stream, .overlap = false}, to);
}

template <typename Form>
cudaError_t w4ax_unpack_pieces(
    const void* pieces, int64_t n, int64_t k, void* codes, float* scales, cudaStream_t stream) {
  const W4AxPacking from{.codes = static_cast<uint32_t*>(codes),
                         .scales = scales,
                         .pieces = static_cast<uint8_t*>(const_cast<void*>(pieces)),
                         .n = n,
                         .k = k,
                         .k_blocks = w4ax_count(n, k).k_blocks};
  return launch(w4ax_unpack<Form>,
                {.blocks = dim3(static_cast<unsigned>((n * (k / 8) + 255) / 256)), .threads = 256},
                {.stream = stream, .overlap = false}, from);
}

template <typename Form>
constexpr W4AxPieces w4ax_pieces() {
  return {.piece_bytes = Form::kPieceBytes,
          .pack = w4ax_pack_pieces<Form>,
          .unpack = w4ax_unpack_pieces<Form>};
}

}  // namespace nibble::cuda
