#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::reference {

/// The line of numbers in 4 bits, as reference operations find it (KvFormat says how), in double
/// precision.
struct FittedLine {
  double scale;  // nearest codes on this one
  double offset;
  double end_scale;  // stand for values on this one
  double end_offset;
};
[[nodiscard]] FittedLine fit_int4(const float* values, int64_t dim);

/// The code of a value on a line, 0 to 15.
[[nodiscard]] double code_of(double value, double scale, double offset);
/// Code d of a row, two in a byte, the first in the low nibble.
[[nodiscard]] int int4_code(const std::byte* row, int64_t d);
void store_code(std::byte* row, int64_t d, double code);

}  // namespace nibble::reference
