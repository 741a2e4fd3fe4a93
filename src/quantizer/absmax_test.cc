#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quantizer/encoder.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

// Numbers from the second byte on: aligned to nothing.
std::vector<std::byte> stored(const std::vector<uint16_t>& numbers) {
  std::vector<std::byte> bytes(1 + numbers.size() * 2);
  std::memcpy(bytes.data() + 1, numbers.data(), numbers.size() * 2);
  return bytes;
}

TEST(Absmax, OfStoredNumbersIsThatOfDecodedOnes) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (size_t count = 1; count < 200; ++count) {
    std::vector<uint16_t> numbers(count);
    std::vector<float> decoded(count);
    for (size_t i = 0; i < count; ++i) {
      numbers[i] = f32_to_bf16(normal(random));
      decoded[i] = bf16_to_f32(numbers[i]);
    }
    const float expected = absmax_of(decoded.data(), 0, 1, static_cast<int64_t>(count)).value();
    const std::vector<std::byte> bytes = stored(numbers);
    EXPECT_EQ(absmax_of_bf16(std::span(bytes).subspan(1)), expected);
    for (const char* isa : {"scalar", "avx2", "avx512"}) {
      if (const auto kernels = rows::find_row_kernels(isa); kernels.ok()) {
        const uint16_t bits = (*kernels)->absmax_bf16(
            reinterpret_cast<const uint8_t*>(bytes.data() + 1), static_cast<int64_t>(count));
        EXPECT_EQ(bf16_to_f32(bits), expected) << isa << " " << count;
      }
    }
  }
}

TEST(Absmax, OfStoredNumbersThatAreNotFinite) {
  for (const float odd : {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), std::nanf(""), -std::nanf("")}) {
    for (const size_t at : {size_t{0}, size_t{31}, size_t{32}, size_t{98}}) {
      std::vector<uint16_t> numbers(99, f32_to_bf16(-3));
      numbers[at] = f32_to_bf16(odd);
      const std::vector<std::byte> bytes = stored(numbers);
      EXPECT_FALSE(absmax_of_bf16(std::span(bytes).subspan(1)).has_value());
    }
  }
}

}  // namespace
}  // namespace nibble
