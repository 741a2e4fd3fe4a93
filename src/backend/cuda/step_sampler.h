#pragma once

#include <array>
#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "backend/cuda/memory.h"
#include "backend/cuda/sampling.h"
#include "ops/sampling.h"

namespace nibble::cuda {

/// Samples steps' tokens on the GPU: parameters travel there, tokens back. A step may be started
/// while the samples of the one before are under way, so there are two page-locked copies.
class StepSampler final {
 public:
  static constexpr int kKinds = 16;

  static Result<StepSampler> create(int64_t max_rows);

  /// Takes down how the next step's tokens are sampled.
  Status start(const SamplingInput& input);
  /// Which kernels that takes, below kKinds: records of them serve steps of the same kind alone.
  [[nodiscard]] int kind() const;
  /// Copies what start() took down to the GPU; rows past it are sampled greedily.
  Status upload(int64_t rows, cudaStream_t stream);
  /// Launches the kernels for logits [rows, vocab] f32 in device memory, which are overwritten.
  ///   next [rows]: gets the tokens too, or none
  Status sample(float* logits, int64_t vocab, int64_t rows, int32_t* next, cudaStream_t stream);
  /// Copies the tokens back.
  Status download(cudaStream_t stream);
  /// Waits for the earliest step's tokens that have not been asked for.
  Status finish(std::span<SampledRow> out);

 private:
  // Both ways, in device and page-locked memory alike.
  struct Places {
    size_t sampling = 0, edit_count = 0, edits = 0;        // to the GPU
    size_t tokens = 0, status = 0, logprobs = 0, top = 0;  // and back
    size_t end = 0;
  };
  struct Copy {
    DeviceBuffer pinned;
    DeviceBuffer masks;  // [max_rows] i32 and [max_rows, words]; made with the first mask
    Event done;
    int64_t rows = 0, edits = 0;
    size_t mask_words = 0;  // of all masks together
    bool draws = false, logprobs = false;

    template <typename T>
    [[nodiscard]] T* at(size_t place) const {
      return reinterpret_cast<T*>(pinned.as<std::byte>() + place);
    }
  };
  template <typename T>
  [[nodiscard]] T* on_device(size_t at) const {
    return reinterpret_cast<T*>(device_.as<std::byte>() + at);
  }
  Status make_masks(size_t words);
  /// Of the step started last.
  [[nodiscard]] const Copy& latest() const { return copies_[(started_ + 1) % 2]; }

  int64_t max_rows_ = 0;
  Places places_;
  DeviceBuffer device_;
  DeviceBuffer workspace_;
  DeviceBuffer masks_;
  std::array<Copy, 2> copies_;  // of steps with even and odd numbers
  uint64_t started_ = 0;        // steps
  uint64_t finished_ = 0;
};

}  // namespace nibble::cuda
