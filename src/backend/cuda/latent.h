#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/attention.h"
#include "backend/cuda/launch.h"
#include "base/status.h"
#include "quant/kv_formats.h"

namespace nibble::cuda {

/// Latent attention (ops/latent.h) over a cache in bf16, fp8, int8 or int4, all layers alike.
/// The cache on the GPU: a page holds page_size rows in groups of 8, each group in columns of 128
/// bytes a row (1024 bytes, as wgmma's 128-byte swizzle), parts of rows filled up to whole columns:
///   [page][group][column][8 rows of 128 bytes]
/// In bf16 a row is one part, 64 numbers in a column. Of other types it has two: codes of the
/// latent, 128 of 8 bits or 256 of 4 in a column (the first of a byte in its low half), and the
/// rotated key in bf16; behind the page's groups lie the parameters of its rows: of 8 bits a scale
/// in f32, 0 where all codes are, of int4 for each 128 numbers a scale and an offset in fp16.
/// Which kernels serve rows of 512 + 64 numbers: the fastest that the device has, or those of one
/// warp's products (mma.sync), which older GPUs take and others take in tests.
enum class LatentKernels : uint8_t { kBest, kOfWarps };

struct LatentShape {
  KvCode code = KvCode::kBf16;
  int32_t page_size = 64;
  int32_t row_dim = 0;   // numbers of a cached row, and of a head of queries
  int32_t rope_dim = 0;  // of which are the rotated key; bf16 does not ask
  int32_t heads = 0;     // of queries
  float scale = 1.0F;    // applied to scores
  LatentKernels kernels = LatentKernels::kBest;

  bool operator==(const LatentShape&) const = default;
  [[nodiscard]] constexpr bool coded() const { return code != KvCode::kBf16; }
  [[nodiscard]] constexpr int32_t rank() const { return row_dim - rope_dim; }
  /// Bytes of a row's codes, as its first part.
  [[nodiscard]] constexpr int32_t code_bytes() const {
    return (rank() * kv_format(code).bits / 8 + 127) / 128 * 128;
  }
  /// Bytes of a row's parameters.
  [[nodiscard]] constexpr int32_t param_bytes() const {
    return static_cast<int32_t>(latent_param_bytes(code, rank()));
  }
};

[[nodiscard]] constexpr int32_t latent_row_bytes(int32_t row_dim) {
  return (row_dim + 63) / 64 * 128;
}
[[nodiscard]] constexpr int32_t latent_row_bytes(const LatentShape& shape) {
  return shape.coded() ? shape.code_bytes() + latent_row_bytes(shape.rope_dim)
                       : latent_row_bytes(shape.row_dim);
}
[[nodiscard]] constexpr int64_t latent_page_bytes(const LatentShape& shape) {
  return int64_t{shape.page_size} * (latent_row_bytes(shape) + shape.param_bytes());
}
/// Where byte `byte` of row `token` lies in a page whose rows have row_bytes.
[[nodiscard]] constexpr int32_t latent_place(int32_t row_bytes, int32_t token, int32_t byte) {
  const int32_t line = token % 8 * 128 + byte % 128;
  return token / 8 * 8 * row_bytes + byte / 128 * 1024 + (line ^ (token % 8 * 16));
}
/// Where number `dim` of row `token` of a page in bf16 lies, in bytes.
[[nodiscard]] constexpr int32_t latent_offset(int32_t row_dim, int32_t token, int32_t dim) {
  return latent_place(latent_row_bytes(row_dim), token, 2 * dim);
}
/// The same of any page: of the byte of a code, or of a number of the rotated key.
[[nodiscard]] constexpr int32_t latent_offset(const LatentShape& shape,
                                              int32_t token,
                                              int32_t dim) {
  if (!shape.coded()) {
    return latent_offset(shape.row_dim, token, dim);
  }
  const int32_t byte = dim < shape.rank() ? dim * kv_format(shape.code).bits / 8
                                          : shape.code_bytes() + 2 * (dim - shape.rank());
  return latent_place(latent_row_bytes(shape), token, byte);
}
/// Where the parameters of row `token` lie in a page.
[[nodiscard]] constexpr int32_t latent_params_offset(const LatentShape& shape, int32_t token) {
  return shape.page_size * latent_row_bytes(shape) + shape.param_bytes() * token;
}

/// Ok when there are kernels for the shape on the current device.
[[nodiscard]] Status check_latent(const LatentShape& shape);

/// As attention_plan_bytes() and plan_attention().
[[nodiscard]] size_t latent_plan_bytes(const LatentShape& shape,
                                       int32_t max_sequences,
                                       int32_t max_rows);
cudaError_t plan_latent(const LatentShape& shape,
                        const StepMetadata& step,
                        void* plan,
                        const LaunchContext& context);

/// The rotated parts of the step's queries and rows.
struct LatentTurn {
  const float* inv_freq = nullptr;  // [dim / 2]
  int32_t dim = 0;
  float factor = 1.0F;  // of cos and sin
  bool interleaved = true;
};

/// reference_latent_append(), of rows in bf16. In 8 bits a row whose scale would be below 1e-30 is
/// stored as zeros; numbers that are not finite make the scale NaN, of int4 their group's.
struct LatentAppendLaunch {
  LatentShape shape;
  StepMetadata step;
  void* pages = nullptr;
  void* rows = nullptr;
  int64_t stride = 0;
  int32_t q_rank = 0;
  const float* q_norm = nullptr;
  const float* latent_norm = nullptr;
  float norm_eps = 0.0F;
  LatentTurn turn;
};
cudaError_t append_latent(const LatentAppendLaunch& args, const LaunchContext& context);

/// reference_latent_queries(), of queries in bf16.
struct LatentQueryLaunch {
  StepMetadata step;
  const void* q = nullptr;
  int64_t q_stride = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  LatentTurn turn;
  void* out = nullptr;  // [rows, heads, out_dim]
  int32_t out_dim = 0;
};
cudaError_t rotate_latent_queries(const LatentQueryLaunch& args, const LaunchContext& context);

/// out = softmax(scale q·rows) rows for the step's rows, causally, over the cache (with the step's
/// tokens). Of rows of 576 numbers the first 512 are values, and only these are written. In 8 bits
/// scores over rows of 512 + 64 are sums of products of codes: queries have 15 bits there over
/// int8, two e4m3, 8 bits, over fp8, and over int4 rows and queries are fp16.
struct LatentLaunch {
  LatentShape shape;
  StepMetadata step;
  const void* plan = nullptr;   // plan_latent's, of this step and shape
  const void* pages = nullptr;  // of the layer
  const void* q = nullptr;      // [rows, heads, row_dim] bf16; rows q_stride apart
  int64_t q_stride = 0;
  void* out = nullptr;  // [rows, heads, row_dim] bf16
  int64_t out_stride = 0;
  void* workspace = nullptr;  // latent_workspace_bytes()
};
[[nodiscard]] size_t latent_workspace_bytes(const LatentShape& shape, int32_t max_sequences);

/// Sequences with few rows, in equal shares over the multiprocessors. A captured launch serves any
/// lengths. Results do not depend on timing.
cudaError_t decode_latent(const LatentLaunch& args, const LaunchContext& context);
/// The others; not to be launched where there is none with several rows.
cudaError_t prefill_latent(const LatentLaunch& args, const LaunchContext& context);

}  // namespace nibble::cuda
