#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "backend/cuda/attention.h"
#include "backend/cuda/testing/gpu_test.h"
#include "ops/attention.h"

namespace nibble::cuda::testing {

/// A sequence of a test's step: its last q_len tokens are the step's.
struct CaseSequence {
  int32_t q_len;
  int32_t kv_len;
  int32_t prompt_len = 0;
};

/// Host and device side of one step: random sequences, their pages scattered and interleaved.
class AttentionCase final {
 public:
  AttentionCase(const AttentionShape& shape, std::vector<CaseSequence> sequences, uint32_t seed);

  /// The step's arrays with every token of every sequence in it (to fill a cache), or just the
  /// last.
  [[nodiscard]] StepMetadata all_tokens() const { return all_.view(page_table_, stride_); }
  [[nodiscard]] StepMetadata step() const {
    StepMetadata step = step_.view(page_table_, stride_);
    step.longest = longest;
    return step;
  }
  /// Other lengths in the same device arrays (same number of sequences and rows).
  void change_lengths(std::vector<CaseSequence> sequences);

  /// Another number in qkv.
  void set_number(size_t index, float value);

  /// From now on every query head has a sink.
  void add_sinks();

  /// Puts all tokens' k and v into the cache and takes over the step's rotated q.
  void fill_cache();
  /// The same of a case of one sequence, so many tokens at a time.
  void append_in_steps(const std::vector<int32_t>& counts);
  /// append_decode_attention() of the step, whose tokens are not in the cache before, and must be
  /// as fill_cache() left them after it.
  void run_appending(const LaunchContext& context);
  /// Plan, decode and prefill as the step needs them.
  void run(const LaunchContext& context);
  void launch_all(const LaunchContext& context);
  /// Attention over what the cache holds, in double precision: [rows, heads * head_dim].
  [[nodiscard]] std::vector<double> expected() const;
  /// Compares the output with expected(), row by row.
  void check(double tolerance) const;
  /// Element of the cache as the device holds it; of int4_static in steps.
  [[nodiscard]] double cached(
      int32_t sequence, int32_t token, int32_t head, bool value, int32_t d) const;
  /// Number of a key as it is, where the format has a residual.
  [[nodiscard]] double residual_key(int32_t sequence, int32_t token, int32_t head, int32_t d) const;
  void read_cache() {
    host_pages_ = pages_->host();
    host_residual_ = residual_->host();
  }
  void spoil_unread_pages();

  AttentionShape shape;
  std::vector<CaseSequence> sequences;
  std::vector<float> qkv;  // of all tokens, before rotation, exact in bf16
  std::unique_ptr<DeviceArray<uint16_t>> device_qkv;
  std::unique_ptr<DeviceArray<float>> inv_freq;
  std::unique_ptr<DeviceArray<uint16_t>> q;
  std::vector<float> sinks;  // of each query head, or none
  std::unique_ptr<DeviceArray<float>> device_sinks;
  std::unique_ptr<DeviceArray<uint16_t>> out;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  int32_t longest = INT32_MAX;  // of the step's metadata
  DynamicRope dynamic;
  KvBasis basis;                    // basis_of() the shape's format, with `steps` where it has some
  uint32_t* far_outside = nullptr;  // RopeAppendLaunch's
  std::vector<float> steps;         // of keys as of values, [kv_heads, head_dim]

 private:
  struct Arrays {
    std::unique_ptr<DeviceArray<int32_t>> q_begin, kv_len, prompt_len, position, sequence;
    int32_t sequences = 0;
    int32_t rows = 0;
    [[nodiscard]] StepMetadata view(const std::unique_ptr<DeviceArray<int32_t>>& table,
                                    int64_t stride) const;
  };
  /// The attention of the step; launch_all() makes its plan.
  [[nodiscard]] AttentionLaunch attention_launch() const;
  [[nodiscard]] RopeAppendLaunch append_launch(const StepMetadata& step, uint16_t* rows);
  /// Where in the cache a byte of a row is, and a row's parameters.
  struct CachePlace {
    size_t row;
    size_t parameters;
  };
  [[nodiscard]] CachePlace place(
      int32_t sequence, int32_t token, int32_t head, bool value, int32_t byte) const;
  [[nodiscard]] size_t residual_place(int32_t sequence,
                                      int32_t token,
                                      int32_t head,
                                      int32_t d) const;
  void spoil_unread_residual();
  static Arrays upload(const std::vector<CaseSequence>& sequences, int32_t padding);

  Arrays all_, step_;
  int64_t stride_ = 0;
  int32_t pages_per_sequence_ = 0;
  std::vector<int32_t> host_table_;
  std::unique_ptr<DeviceArray<int32_t>> page_table_;
  std::unique_ptr<DeviceArray<uint8_t>> pages_;
  std::vector<uint8_t> host_pages_;
  // Of the residual: pages with other numbers than those of the same tokens.
  std::vector<int32_t> host_residual_table_;
  std::unique_ptr<DeviceArray<int32_t>> residual_table_;
  std::unique_ptr<DeviceArray<uint16_t>> residual_;
  std::vector<uint16_t> host_residual_;
  std::unique_ptr<DeviceArray<uint8_t>> plan_, all_plan_, workspace_;
  std::unique_ptr<DeviceArray<float>> device_steps_;
  std::unique_ptr<DeviceArray<float>> frequencies_;  // of the rows, where RoPE is dynamic
};

}  // namespace nibble::cuda::testing
