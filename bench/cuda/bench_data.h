#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/int_blocks.h"
#include "quant/scheme.h"

namespace nibble::cuda {

/// Random canonical codes (QuantTensor) of a whole matrix; values of every code occur.
cudaError_t random_codes(
    WeightCode code, void* codes, size_t bytes, uint64_t seed, cudaStream_t stream);
/// Random scales near 2^-6, each exact in BF16, or 2^-6 for powers of two.
cudaError_t random_scales(
    float* scales, size_t count, bool powers, uint64_t seed, cudaStream_t stream);
/// Minimums of scaled codes from -8 on that decode_to_bf16(), which knows none, is right with.
cudaError_t matching_minimums(const float* scales,
                              size_t count,
                              float* minimums,
                              cudaStream_t stream);
/// Random activations of a format, below 1 in BF16; token forms take 2^-6 as the scale of each row.
cudaError_t random_activations(
    ActFormat act, void* x, size_t count, uint64_t seed, cudaStream_t stream);

/// The same in blocks of 4 and 8 bits, rows of k codes.
cudaError_t random_block_activations(
    const IntBlocks& blocks, void* x, int64_t rows, int64_t k, cudaStream_t stream);

/// Rows of kBf16Blocks as numbers in the order of K: out [rows, k] bf16 = code * scale, rounded, or
/// the number that is there.
struct DecodeWideArgs {
  IntBlocks blocks;
  const void* x = nullptr;
  const float* scales = nullptr;  // [rows]
  void* out = nullptr;
  int64_t rows = 0, k = 0;
};
cudaError_t decode_wide_activations(const DecodeWideArgs& args, cudaStream_t stream);

/// The same matrix for the BF16 product: out [n, k] bf16 = code * scale, rounded.
/// format.code is one of kBf16, kInt8, kFp8E4M3, kInt4, kFp4E2M1; row_bytes is the canonical one.
struct DecodeArgs {
  WeightFormat format;
  const void* codes = nullptr;
  const float* scales = nullptr;  // [n, groups]
  void* out = nullptr;
  int64_t n = 0, k = 0, row_bytes = 0;
};
cudaError_t decode_to_bf16(const DecodeArgs& args, cudaStream_t stream);
/// out [count] bf16 = x in units of 2^-6, or a copy of bf16.
cudaError_t decode_activations(
    ActFormat act, const void* x, void* out, size_t count, cudaStream_t stream);

/// sums[0] += sum of (a - b)², sums[1] += sum of b², both over count bf16; a NaN spoils sums[0].
cudaError_t compare_bf16(
    const void* a, const void* b, size_t count, double* sums, cudaStream_t stream);

/// Reads `bytes` (a multiple of 16 KiB) once through a ring of bulk copies: what no kernel can
/// beat.
cudaError_t read_all(const void* data, size_t bytes, int sms, cudaStream_t stream);

/// Keeps the stream waiting until *released, in page-locked memory, is not 0; a second at most.
cudaError_t hold(const uint32_t* released, cudaStream_t stream);

}  // namespace nibble::cuda
