#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// Memory that all products of a backend share, one after the other in stream order. It grows while
/// layers are prepared; what is recorded in a graph afterwards may keep its addresses.
class GemmScratch final {
 public:
  /// Makes room for activations [m, k] of up to two bytes, their scales, and `workspace` bytes.
  Status reserve(int64_t m, int64_t k, size_t workspace) {
    NIBBLE_RETURN_IF_ERROR(grow(values_, static_cast<size_t>(m * k) * 2));
    NIBBLE_RETURN_IF_ERROR(grow(scales_, static_cast<size_t>(m) * sizeof(float)));
    return grow(workspace_, workspace);
  }
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

  DeviceBuffer values_;
  DeviceBuffer scales_;
  DeviceBuffer workspace_;  // zero between products
};

}  // namespace nibble::cuda
