#pragma once

#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "backend/cuda/memory.h"
#include "backend/cuda/sampling.h"
#include "ops/picks.h"

namespace nibble::cuda {

/// Picks a step's tokens on the GPU: parameters travel there, tokens back.
class Picker final {
 public:
  static Result<Picker> create(int64_t max_rows);

  /// Picks from logits [rows, vocab] f32 in device memory, which are overwritten, and waits.
  Status pick(float* logits,
              int64_t vocab,
              const PickInput& input,
              std::span<PickedRow> out,
              cudaStream_t stream);

 private:
  // Both ways, in device and page-locked memory alike.
  struct Places {
    size_t sampling = 0, edit_count = 0, edits = 0;        // to the GPU
    size_t tokens = 0, status = 0, logprobs = 0, top = 0;  // and back
    size_t end = 0;
  };
  template <typename T>
  [[nodiscard]] T* on_device(size_t at) const {
    return reinterpret_cast<T*>(device_.as<std::byte>() + at);
  }
  template <typename T>
  [[nodiscard]] T* on_host(size_t at) const {
    return reinterpret_cast<T*>(pinned_.as<std::byte>() + at);
  }
  void collect(const PickInput& input, std::span<PickedRow> out) const;

  int64_t max_rows_ = 0;
  Places places_;
  DeviceBuffer device_;
  DeviceBuffer pinned_;
  DeviceBuffer workspace_;
};

}  // namespace nibble::cuda
