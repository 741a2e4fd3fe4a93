#include "base/json_number.h"

#include <array>
#include <charconv>

namespace nibble {

Json shortest_number(float x) {
  std::array<char, 32> text{};
  const auto [end, ignored] = std::to_chars(text.data(), text.data() + text.size(), x);
  double value = 0;
  std::from_chars(text.data(), end, value);
  return value;
}

}  // namespace nibble
