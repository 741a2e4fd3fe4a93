#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/kv_layout.h"
#include "backend/cuda/launch.h"
#include "base/status.h"
#include "ops/attention_form.h"
#include "ops/dynamic_rope.h"
#include "ops/kv.h"

namespace nibble::cuda {

/// What the launches of one kind of layers have in common.
struct AttentionShape {
  KvLayout kv;
  int32_t heads = 0;           // query heads, a multiple of kv.kv_heads
  int32_t sliding_window = 0;  // a token sees itself and the window-1 before it; 0: all
  float scale = 1.0F;          // applied to q·k
  float k_scale = 1.0F;        // fp8 caches: value = code * scale
  float v_scale = 1.0F;
  AttentionForm form = AttentionForm::kOwn;
};

/// Rows up to this position take AttentionForm::kShared in prefill by warpgroup products; its
/// weights cost more than they are worth where attention is long.
inline constexpr int32_t kSharedPrefill = 512;

/// Of a format with a residual (kv_has_residual()): the keys as they are of a layer's groups that
/// are not full, in pages of bf16 (kv_residual_offset() says where a key's bytes are).
struct ResidualKeys {
  void* pages = nullptr;
  const int32_t* page_table = nullptr;  // as that of the step, in the residual's pool
};

/// A step, in device memory. The host's `sequences` and `rows` are upper bounds (a graph's bucket):
/// sequences past the real ones have kv_len 0 and q_begin[s] = q_begin[s+1], rows past the real
/// ones row_sequence -1. The arrays, and what the cache held before the step, must have been
/// written before the kernel in front of plan_attention began (by a copy, say): kernels read them
/// early.
struct StepMetadata {
  const int32_t* q_begin = nullptr;     // [sequences + 1]: rows of a sequence are its last tokens
  const int32_t* kv_len = nullptr;      // [sequences], with the step's tokens
  const int32_t* prompt_len = nullptr;  // [sequences], of row_frequencies() alone
  const int32_t* page_table = nullptr;  // [sequences, page_table_stride]
  int64_t page_table_stride = 0;
  const int32_t* row_position = nullptr;  // [rows]
  const int32_t* row_sequence = nullptr;  // [rows]
  int32_t sequences = 0;
  int32_t rows = 0;
  int32_t longest = INT32_MAX;  // no kv_len of a sequence with one row is larger
};

/// Ok when there are kernels for the shape on the current device: head_dim 64, 128 or 256; pages of
/// whole tiles; all formats but f32.
[[nodiscard]] Status check_attention(const AttentionShape& shape);

/// How a step's work is cut into equal shares. Made on the device once per step and shape (layers
/// that differ in the window alone need one each), before the layers.
[[nodiscard]] size_t attention_plan_bytes(const AttentionShape& shape,
                                          int32_t max_sequences,
                                          int32_t max_rows);
cudaError_t plan_attention(const AttentionShape& shape,
                           const StepMetadata& step,
                           void* plan,
                           const LaunchContext& context);

/// q and k of each row are normalised (if asked), rotated; q stays in place, k and v go to the
/// cache. Of a format with a residual, keys are coded when their group is full.
struct RopeAppendLaunch {
  AttentionShape shape;
  StepMetadata step;
  void* pages = nullptr;  // of the layer, page_bytes() each
  ResidualKeys residual;
  void* qkv = nullptr;  // [rows, (heads + 2 kv_heads) * head_dim] bf16: q, k, v
  int64_t qkv_stride = 0;
  const float* inv_freq = nullptr;  // [head_dim/2]; pairs are (i, i + head_dim/2)
  int32_t inv_freq_stride = 0;      // from a row's to the next row's; 0: all rows have the same
  float attention_factor = 1.0F;    // multiplies cos and sin
  const float* q_norm = nullptr;    // [head_dim] RMS norm of each head before the rotation, or none
  const float* k_norm = nullptr;
  float norm_eps = 1e-6F;
  KvBasis basis;  // of formats with HeadForm alone (KvFormat::turned)
  // int4_static: how many numbers were far outside of their ranges (backend/range_report.h) or not
  // finite is added to it, a number that the host may read at any time; null: nobody counts.
  uint32_t* far_outside = nullptr;
};
cudaError_t rope_append(const RopeAppendLaunch& args, const LaunchContext& context);

/// The frequencies of the step's rows where RoPE is dynamic. Kernels read frequencies early:
/// neither this launch nor the one behind it may overlap its predecessor.
struct RowFrequencyLaunch {
  StepMetadata step;
  DynamicRope dynamic;
  const float* inv_freq = nullptr;  // [head_dim/2], of sequences up to dynamic.original
  int32_t head_dim = 0;
  float* out = nullptr;  // [rows, head_dim/2]
};
cudaError_t row_frequencies(const RowFrequencyLaunch& args, const LaunchContext& context);

/// out = softmax(scale q·K) V for the step's rows, causally, over the cache (with the step's
/// tokens).
struct AttentionLaunch {
  AttentionShape shape;
  StepMetadata step;
  const void* plan = nullptr;   // plan_attention's, of this step and shape
  const void* pages = nullptr;  // of the layer
  ResidualKeys residual;
  const void* q = nullptr;  // [rows, heads * head_dim] bf16, rotated; 16-byte aligned rows
  int64_t q_stride = 0;
  void* out = nullptr;  // [rows, heads * head_dim] bf16
  int64_t out_stride = 0;
  const float* sinks = nullptr;  // [heads]: logits without values that join the softmax, or none
  KvBasis basis;                 // of turn_back_heads() alone
  void* workspace = nullptr;  // attention_workspace_bytes(), zero before the first run, left zero
};                            // where it must be zero; launches of one stream may share it
[[nodiscard]] size_t attention_workspace_bytes(const AttentionShape& shape);

/// Where step.longest is at most this, decode_attention() may choose kernels for short sequences.
inline constexpr int32_t kShortAttention = 8192;
inline constexpr int32_t kShorterAttention = 2048;  // more of them, for steps of more sequences
/// step.longest of a step whose longest sequence has so many tokens: one of few values, since a
/// captured launch serves no longer ones.
[[nodiscard]] constexpr int32_t attention_length(int32_t longest) {
  return longest <= kShorterAttention ? kShorterAttention
         : longest <= kShortAttention ? kShortAttention
                                      : INT32_MAX;
}

/// The sequences of the step with one row. The grid depends on the shape, the device and the step's
/// numbers on the host alone: a captured launch serves any lengths up to step.longest. Results do
/// not depend on timing.
cudaError_t decode_attention(const AttentionLaunch& args, const LaunchContext& context);
/// Whether it needs the plan; prefill_attention() always does.
[[nodiscard]] bool decode_reads_plan(const AttentionShape& shape, const StepMetadata& step);

/// rope_append() and decode_attention() in one, where that reads no plan and no sequence has more
/// than one row. q is left as it was: args.q is not read.
cudaError_t append_decode_attention(const RopeAppendLaunch& append,
                                    const AttentionLaunch& args,
                                    const LaunchContext& context);

/// Turns the results of all rows back and adds the mean of values, as args.basis says: after the
/// functions above and below, which leave them as they are. Needed where it changes_results().
cudaError_t turn_back_heads(const AttentionLaunch& args, const LaunchContext& context);

/// The sequences with more than one row; not to be launched where there is none.
cudaError_t prefill_attention(const AttentionLaunch& args, const LaunchContext& context);

}  // namespace nibble::cuda
