#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/attention.h"
#include "backend/cuda/memory.h"
#include "backend/step.h"
#include "base/check.h"

namespace nibble::cuda {

/// Sizes of a step on the GPU: of its input, or of the record that serves it.
struct StepShape {
  int64_t rows = 0;
  int64_t logit_rows = 0;
  bool decodes = false;   // it has sequences of one row
  bool prefills = false;  // and of several
  bool chained = false;   // of one row each, some of which continue the one in front
};

/// A step's input on the GPU, at addresses that never change: what recorded kernels read.
class StepBuffers final {
 public:
  static constexpr int64_t kSmallestPage = 16;  // tokens

  static Result<StepBuffers> create(const StepLimits& limits);

  /// Copies the input of `plan` to the GPU, padded to `shape`: rows past the input's have token 0
  /// and no sequence; with more rows than sequences were given, as many empty sequences as there
  /// are rows of a decode step. Waits only for the copy of the step before.
  Status write(const StepPlan& plan, const StepShape& shape, cudaStream_t stream);

  /// Of the step written last, with the page tables of a pool of the cache; `longest` is one of few
  /// values, for records. Steps of as many rows as there are sequences at most have the same
  /// addresses.
  [[nodiscard]] StepMetadata metadata(int32_t pool = 0) const {
    CHECK_LT(pool, limits_.pools);
    StepMetadata out = metadata_;
    out.page_table += pool * limits_.sequences * pages_per_sequence_;
    return out;
  }
  [[nodiscard]] const int32_t* tokens() const { return device_int(places().tokens); }
  /// [1]: how many rows of the step belong to a sequence, where the last sequence ends.
  [[nodiscard]] const int32_t* rows_there() const {
    return metadata_.q_begin + metadata_.sequences;
  }
  [[nodiscard]] const int32_t* logit_rows() const { return device_int(places().logit_rows); }
  /// [sequences]: where a step that is fed finds its tokens.
  [[nodiscard]] int32_t* next_tokens() const { return device_int(few_.tokens); }

 private:
  // Places in both copies, in int32; of steps with few rows, and with many.
  struct Places {
    int64_t tokens = 0, logit_rows = 0, positions = 0, row_sequences = 0, q_begin = 0, kv_len = 0;
    int64_t prompt_len = 0, end = 0;
  };
  // Rows of the page table that are not on the GPU as they should be.
  struct ChangedPages {
    int64_t begin = 0, end = 0;  // sequences
    int64_t pages = 0;           // the most of one
  };

  [[nodiscard]] int32_t* device_int(int64_t at) const { return device_.as<int32_t>() + at; }
  [[nodiscard]] const Places& places() const { return is_many_ ? many_ : few_; }
  [[nodiscard]] Places place_rows(size_t& end, int64_t rows, int64_t logit_rows) const;
  void fill(const StepInput& input, const StepShape& shape);
  ChangedPages fill_pages(const StepPlan& plan, int64_t pool);
  Status copy_pages(const ChangedPages& changed, int64_t pool, cudaStream_t stream);

  StepLimits limits_;
  int64_t pages_per_sequence_ = 0;
  Places few_, many_;
  bool is_many_ = false;  // the step written last
  int64_t pages_at_ = 0;
  std::vector<int64_t> sent_pages_;  // [pools, sequences]: that the GPU has as the host
  DeviceBuffer device_;
  DeviceBuffer pinned_;
  Event copied_;
  StepMetadata metadata_;
};

}  // namespace nibble::cuda
