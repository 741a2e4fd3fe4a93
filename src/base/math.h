#pragma once

#include <type_traits>

namespace nibble {

/// a / b rounded up, and the smallest multiple of `unit` that is not below `value`. For values that
/// are not negative.
template <typename T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}
template <typename T>
constexpr T round_up(T value, std::type_identity_t<T> unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace nibble
