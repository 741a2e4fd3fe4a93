#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// Memory that all products of a backend share, one after the other in stream order. It grows while
/// layers are prepared; what is recorded in a graph afterwards may keep its addresses.
class GemmScratch final {
 public:
  /// Activations [m, k] of up to two bytes, with scales of rows.
  struct Rows {
    int64_t m = 0;
    int64_t k = 0;
    int64_t row_scales = 0;
  };
  /// Makes room for rows, and `workspace` bytes.
  Status reserve(const Rows& rows, size_t workspace) {
    NIBBLE_RETURN_IF_ERROR(grow(values_, static_cast<size_t>(rows.m * rows.k) * 2));
    NIBBLE_RETURN_IF_ERROR(
        grow(scales_, static_cast<size_t>(rows.m * rows.row_scales) * sizeof(float)));
    return grow(workspace_, workspace);
  }
  /// Room for the canonical form of matrices on their way to or from their packed one. Waits for
  /// `stream`, which may still read what is there, before that is replaced.
  Status stage(size_t codes, size_t scales, cudaStream_t stream) {
    if (codes > staged_codes_.size() || scales > staged_scales_.size()) {
      NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "packing weights"));
    }
    NIBBLE_RETURN_IF_ERROR(grow(staged_codes_, codes));
    return grow(staged_scales_, scales);
  }
  /// At the end of loading: what remains is for the cache.
  void release_stage() {
    staged_codes_ = DeviceBuffer();
    staged_scales_ = DeviceBuffer();
  }
  [[nodiscard]] std::byte* staged_codes() const { return staged_codes_.as<std::byte>(); }
  [[nodiscard]] float* staged_scales() const { return staged_scales_.as<float>(); }
  [[nodiscard]] void* values() const { return values_.as<void>(); }
  [[nodiscard]] float* scales() const { return scales_.as<float>(); }
  [[nodiscard]] void* workspace() const { return workspace_.as<void>(); }

 private:
  static Status grow(DeviceBuffer& buffer, size_t bytes) {
    if (bytes <= buffer.size()) {
      return {};
    }
    buffer = DeviceBuffer();
    NIBBLE_ASSIGN_OR_RETURN(buffer, allocate_zeroed(bytes, "scratch memory"));
    return {};
  }

  DeviceBuffer staged_codes_;
  DeviceBuffer staged_scales_;
  DeviceBuffer values_;
  DeviceBuffer scales_;
  DeviceBuffer workspace_;  // zero between products
};

}  // namespace nibble::cuda
