#pragma once

#include "base/check.h"
#include "core/dtype.h"

namespace nibble {

/// Rows of activations in a backend's memory: F32, or BF16 where Backend::activation_type() says
/// that layers exchange them so; numbers are rounded to nearest, ties to even. Converts from
/// float*, which is F32.
struct Activations {
  void* data = nullptr;
  DType type = DType::kF32;

  Activations() = default;
  Activations(float* f32) : data(f32) {}  // NOLINT(google-explicit-constructor)
  Activations(void* memory, DType kind) : data(memory), type(kind) {}

  [[nodiscard]] float* f32() const {
    CHECK(type == DType::kF32);
    return static_cast<float*>(data);
  }
  /// What begins `elements` later.
  [[nodiscard]] Activations at(int64_t elements) const {
    return {static_cast<std::byte*>(data) + elements * dtype_bits(type) / 8, type};
  }
};

/// The same, read only.
struct ConstActivations {
  const void* data = nullptr;
  DType type = DType::kF32;

  ConstActivations() = default;
  ConstActivations(const float* f32) : data(f32) {}  // NOLINT(google-explicit-constructor)
  ConstActivations(Activations rows)                 // NOLINT(google-explicit-constructor)
      : data(rows.data), type(rows.type) {}
  ConstActivations(const void* memory, DType kind) : data(memory), type(kind) {}

  [[nodiscard]] const float* f32() const {
    CHECK(type == DType::kF32);
    return static_cast<const float*>(data);
  }
  /// What begins `elements` later.
  [[nodiscard]] ConstActivations at(int64_t elements) const {
    return {static_cast<const std::byte*>(data) + elements * dtype_bits(type) / 8, type};
  }
};

}  // namespace nibble
