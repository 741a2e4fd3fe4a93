#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "quant/nibbles.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// Weights in the form of QuantTensor, but for the order of nibbles, that lie in memory of somebody
/// else: a mapped file, or a QuantTensor. Copying them is left to whoever needs another form.
///
///   codes   n rows of row_bytes(), aligned to nothing; what lies past k in the last word of
///           an int4 row may be anything; other nibbles than canonical ones have k % 8 == 0
///   scales  [n, groups] in scale_type, aligned to nothing, or one number for all of them
///   zeros   [n, groups], where the format has zero points
struct QuantView {
  enum class Scales : uint8_t { kEach, kOneForAll };

  WeightFormat format;
  int64_t n = 0;
  int64_t k = 0;
  const std::byte* codes = nullptr;
  NibbleForm nibbles;  // of int4 codes
  const std::byte* scales = nullptr;
  DType scale_type = DType::kF32;  // kF32, kBF16 or kF16
  Scales scale_count = Scales::kEach;
  const int8_t* zeros = nullptr;
  std::string name;  // what error messages call it

  [[nodiscard]] int64_t row_bytes() const { return QuantTensor::code_row_bytes(format.code, k); }
  /// Scale `index` of [n, groups], and those from `first` on.
  [[nodiscard]] float scale(int64_t index) const;
  void read_scales(int64_t first, std::span<float> out) const;
  /// `bytes` bytes of the canonical codes, from byte `begin` of row 0 on; both whole words where
  /// the nibbles are not canonical.
  void copy_codes(int64_t begin, int64_t bytes, std::byte* out) const;
};

/// A view of all of `tensor`, which must stay where it is.
[[nodiscard]] QuantView view_of(const QuantTensor& tensor);
/// The weights in memory of their own, padding cleared. kUnsupported when k is no multiple of the
/// group size, kResourceExhausted.
[[nodiscard]] Result<QuantTensor> copy_of(const QuantView& view);

}  // namespace nibble
