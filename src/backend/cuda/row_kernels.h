#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/int_blocks.h"
#include "backend/cuda/launch.h"
#include "core/dtype.h"
#include "core/gemm_input.h"
#include "quant/scheme.h"

namespace nibble::cuda {

/// The row-wise operations of a decoder. All pointers are device memory, aligned to 16 bytes; rows
/// are dense unless a stride is given. Calls are stream-ordered and allocate nothing, so they may
/// be captured in a graph. Each row's result depends on that row alone, and is the same in every
/// run. cudaErrorInvalidValue for what row_width_ok() or a comment here excludes; nothing is
/// launched then. Zero rows are no work.

/// Whether a row of n elements can be handled: a positive multiple of 8.
[[nodiscard]] constexpr bool row_width_ok(int64_t n) { return n > 0 && n % 8 == 0; }

inline constexpr int64_t kFp8GroupSize = 128;  // of ActFormat::kFp8Group

/// Scales of a row of n activations, of kIntBlocks in the smallest blocks; 0 where its values are
/// numbers as they are.
[[nodiscard]] constexpr int64_t row_scales(ActFormat act, int64_t n) {
  return act == ActFormat::kFp8Group    ? (n + kFp8GroupSize - 1) / kFp8GroupSize
         : act == ActFormat::kIntBlocks ? int_k_blocks(n) * 4
         : act == ActFormat::kFloat || act == ActFormat::kBf16 ? 0
                                                               : 1;
}

/// Rows of activations for the next matrix product, rounded as quant/codec.h and the CPU do:
///   kBf16       values [rows, n] bf16, ties to even
///   kInt8Token  values [rows, n] int8, x * (127 / absmax) to the nearest, ties to even; scales
///               [rows] absmax / 127
///   kFp8Token   values [rows, n] e4m3, x * (448 / absmax) likewise; scales [rows] absmax / 448
///   kFp8Group   the same for each 128 elements of a row; scales [rows, row_scales()]
///   kIntBlocks  values [rows, n] int8, as quant/block_rounding.h says of `blocks`; scales as
///               int_blocks.h says of their places
///   kBf16Blocks values as WideRows says: int8, as quant/block_rounding.h says of its blocks of 8
///               bits, and bf16; scales [rows] of the int8, NaN where fixed_unit() of a block in
///               BF16 is
/// A row (or 128 of it) of zeros has scale 0 and codes 0; one that is not finite has a NaN as its
/// scale.
struct QuantizedRows {
  ActFormat format = ActFormat::kBf16;
  void* values = nullptr;
  float* scales = nullptr;
  IntBlocks blocks;  // of forms in blocks
};

/// out[r] = the norm of x[s], where s = row_index[r], or r without index.
///   x [*, n] f32     row_index [rows] int32     norm: a kind that is_norm()
struct NormArgs {
  const float* x = nullptr;
  const int32_t* row_index = nullptr;
  GemmInput norm;
  int64_t rows = 0;
  int64_t n = 0;
  QuantizedRows out;
};
cudaError_t norm_quantize(const NormArgs& args, const LaunchContext& context);

/// out[r] = the activation of x[r], computed in f32.
///   x [rows, input_width(kind, n)] bf16, rows `stride` elements apart, a multiple of 8; 0: dense
struct ActivationArgs {
  const void* x = nullptr;
  GemmInput::Kind kind = GemmInput::Kind::kSiluMul;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t n = 0;
  QuantizedRows out;
  float limit = 0.0F;  // of kClampedSwiglu
  int64_t turn = 0;    // GemmInput::turn; rows of most_turned() elements at most
  // Of the device: rows from this one on may be left as they are; null: all are wanted.
  const int32_t* wanted = nullptr;
  // Of kIntBlocks whose rows are not all alike: each_blocks[experts[row]] in place of out.blocks,
  // which has columns if any of them has.
  const IntBlocks* each_blocks = nullptr;
  const int32_t* experts = nullptr;  // [rows], of those that are wanted
};
cudaError_t activation_quantize(const ActivationArgs& args, const LaunchContext& context);

/// Elements of the widest row that this GPU turns: a row lies in the shared memory of a block.
[[nodiscard]] int64_t most_turned();

/// y[r] += rows[r] / (1 + e^-(x[r] · gate)), in f32.
///   x, rows [count, n] bf16, gate [n] f32, y [count, n] f32; n a multiple of 8
struct GatedRowsArgs {
  const void* x = nullptr;
  const float* gate = nullptr;
  const void* rows = nullptr;
  int64_t count = 0;
  int64_t n = 0;
  float* y = nullptr;
};
cudaError_t add_gated_rows(const GatedRowsArgs& args, const LaunchContext& context);

/// out[r] = x[r], in bf16 as it is, else rounded.
///   x [rows, n] bf16, 16-byte aligned, rows `stride` elements apart, a multiple of 8; 0 stands for
///   n
struct QuantizeRowsArgs {
  const void* x = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t n = 0;
  QuantizedRows out;
};
cudaError_t quantize_rows(const QuantizeRowsArgs& args, const LaunchContext& context);

/// out[r] = table[first + tokens[r]] in f32, or added to it; NaN for what is not in the table.
///   table [vocab, n] of kBF16, kF16 or kF32     tokens [rows] int32     out [rows, n]
enum class GatherResult : uint8_t { kStore, kAdd };
struct EmbeddingArgs {
  const void* table = nullptr;
  DType dtype = DType::kBF16;
  int64_t vocab = 0;
  const int32_t* tokens = nullptr;
  int64_t first = 0;
  int64_t rows = 0;
  int64_t n = 0;
  float* out = nullptr;
  GatherResult result = GatherResult::kStore;
};
cudaError_t gather_embeddings(const EmbeddingArgs& args, const LaunchContext& context);

/// x [count] f32 rounded to bf16, ties to even, in place.
cudaError_t round_bf16(float* x, int64_t count, const LaunchContext& context);

}  // namespace nibble::cuda
