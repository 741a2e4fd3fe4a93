#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "quant/scheme.h"

namespace nibble {

/// The weights of one linear layer [n, k] in their canonical form: what dialects read and write,
/// what quantizers produce and what kernels pack. Unquantized weights use it too.
///
///   codes   n rows of row_bytes(): f32, bf16, f16 little-endian; int8 two's complement; fp8 E4M3
///           bytes; int4 as offset binary (code + 8), eight per 32-bit word, element i of the word
///           in bits 4i..4i+3 (the layout of compressed-tensors), rows padded to whole words with
///           0; fp4 E2M1 in the same order of nibbles, rows padded to whole bytes with 0.
///   scales  [n, groups] f32, row-major; exact copies of what the file stores (a BF16 scale stays
///           representable in BF16), repeated for every row where they cover several. Empty when
///           the format is not quantized.
///   zeros   [n, groups] int8, the zero points; empty without.
///   minimums  [n, groups] f32, exact copies like the scales; empty without.
struct QuantTensor {
  WeightFormat format;
  int64_t n = 0;
  int64_t k = 0;
  Buffer codes;
  Buffer scales;
  Buffer zeros;
  Buffer minimums;

  /// Allocates codes, scales, zero points and minimums, uninitialised. k must be a multiple of the
  /// group size.
  static Result<QuantTensor> allocate(const WeightFormat& format, int64_t n, int64_t k);
  /// Bytes of one row of codes.
  [[nodiscard]] int64_t row_bytes() const { return code_row_bytes(format.code, k); }
  [[nodiscard]] static int64_t code_row_bytes(WeightCode code, int64_t k);
};

}  // namespace nibble
