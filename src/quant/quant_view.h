#pragma once

#include <algorithm>
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
///   codes   n rows of row_bytes(), row_stride bytes apart (every second one of a fused matrix), 0
///           where one follows the other; aligned to nothing; what lies past k in the last word
///           of an int4 row may be anything; other nibbles than canonical ones have k % 8 == 0
///   scales  [n, groups] in scale_type, aligned to nothing, or one number for all of them; those of
///           a row scale_stride numbers behind the row before, 0 where one follows the other
///   zeros   [n, groups], where the format has zero points
///   minimums  [n, groups] in scale_type, aligned to nothing, where the format has minimums
struct QuantView {
  enum class Scales : uint8_t { kEach, kOneForAll };

  WeightFormat format;
  int64_t n = 0;
  int64_t k = 0;
  const std::byte* codes = nullptr;
  int64_t row_stride = 0;
  NibbleForm nibbles;  // of int4 codes
  const std::byte* scales = nullptr;
  DType scale_type = DType::kF32;  // kF32, kBF16, kF16 or kF8E8M0
  Scales scale_count = Scales::kEach;
  int64_t scale_stride = 0;
  const int8_t* zeros = nullptr;
  const std::byte* minimums = nullptr;
  std::string name;  // what error messages call it

  [[nodiscard]] int64_t row_bytes() const { return QuantTensor::code_row_bytes(format.code, k); }
  [[nodiscard]] const std::byte* code_row(int64_t row) const {
    return codes + row * (row_stride == 0 ? row_bytes() : row_stride);
  }
  /// Scale `index` of [n, groups], and those from `first` on.
  [[nodiscard]] float scale(int64_t index) const;
  void read_scales(int64_t first, std::span<float> out) const;
  /// The same of minimums.
  [[nodiscard]] float minimum(int64_t index) const;
  void read_minimums(int64_t first, std::span<float> out) const;
  /// visit(from, bytes) for each piece of `bytes` bytes that follow byte `begin` of row 0 in the
  /// rows laid end to end.
  template <typename Visit>
  void for_pieces(int64_t begin, int64_t bytes, const Visit& visit) const {
    if (row_stride == 0) {
      return visit(codes + begin, bytes);
    }
    while (bytes > 0) {
      const int64_t piece = std::min(bytes, row_bytes() - begin % row_bytes());
      visit(code_row(begin / row_bytes()) + begin % row_bytes(), piece);
      begin += piece;
      bytes -= piece;
    }
  }
  /// `bytes` bytes of the canonical codes, from byte `begin` of row 0 on, the rows laid end to end;
  /// both whole words where the nibbles are not canonical.
  void copy_codes(int64_t begin, int64_t bytes, std::byte* out) const;
};

/// A view of all of `tensor`, which must stay where it is.
[[nodiscard]] QuantView view_of(const QuantTensor& tensor);
/// The weights in memory of their own, padding cleared. kUnsupported when k is no multiple of the
/// group size, kResourceExhausted.
[[nodiscard]] Result<QuantTensor> copy_of(const QuantView& view);

}  // namespace nibble
