#include "checkpoint/source_matrix.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "checkpoint/source_kernels.h"

namespace nibble {
namespace {

// All 65536 halves, in a row longer than a block and starting at an odd address.
TEST(DecodePlain, EveryHalfEqualsTheScalarConversion) {
  std::vector<std::byte> bytes(1 + 65536 * 2);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(bytes.data() + 1 + i * 2, &bits, 2);
  }
  std::vector<float> out(65536);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    decode_plain(dtype, bytes.data() + 1, 65536, out.data());
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const float expected = dtype == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

}  // namespace
}  // namespace nibble
