#include "gguf/block_parts.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "gguf/decode.h"

namespace nibble::gguf {
namespace {

constexpr std::byte kPoison{0xa5};

// Random blocks whose F16 scales are finite.
std::vector<std::byte> random_blocks(Type type, int64_t blocks) {
  std::mt19937 random(static_cast<uint32_t>(type));
  const int64_t bytes = type_traits(type).bytes;
  std::vector<std::byte> data(static_cast<size_t>(blocks * bytes));
  for (std::byte& byte : data) {
    byte = static_cast<std::byte>(random());
  }
  for (int64_t i = 0; i < blocks && type != Type::kMXFP4; ++i) {
    data[static_cast<size_t>(i * bytes + 1)] &= std::byte{0xbf};
    data[static_cast<size_t>(i * bytes + 3)] &=
        type == Type::kQ4_1 ? std::byte{0xbf} : std::byte{0xff};
  }
  return data;
}

struct Parts {
  std::vector<std::byte> codes, scales, minimums;
};

Parts split(Type type, const std::vector<std::byte>& data, int64_t blocks) {
  Parts parts;
  parts.codes.assign(static_cast<size_t>(blocks * code_bytes(type)) + 1, kPoison);
  parts.scales.assign(static_cast<size_t>(blocks * scale_bytes(type)) + 1, kPoison);
  parts.minimums.assign(static_cast<size_t>(blocks * 2) + 1, kPoison);
  split_blocks(type, data.data(), blocks,
               {.codes = parts.codes.data(),
                .scales = parts.scales.data(),
                .minimums = parts.minimums.data()});
  EXPECT_EQ(parts.codes.back(), kPoison);
  EXPECT_EQ(parts.scales.back(), kPoison);
  EXPECT_EQ(parts.minimums.back(), kPoison);
  return parts;
}

float half_at(const std::vector<std::byte>& bytes, size_t i) {
  uint16_t half = 0;
  std::memcpy(&half, bytes.data() + 2 * i, 2);
  return f16_to_f32(half);
}

int nibble_at(const std::vector<std::byte>& codes, size_t element) {
  uint32_t word = 0;
  std::memcpy(&word, codes.data() + element / 8 * 4, 4);
  return static_cast<int>((word >> (4 * (element % 8))) & 15U);
}

// One element's value by the formula of block_parts.h.
float value_of(Type type, const Parts& parts, size_t element) {
  const size_t block = element / 32;
  if (type == Type::kQ8_0) {
    return half_at(parts.scales, block) *
           static_cast<float>(static_cast<int8_t>(parts.codes[element]));
  }
  const int code = nibble_at(parts.codes, element);
  if (type == Type::kQ4_0) {
    return half_at(parts.scales, block) * static_cast<float>(code - 8);
  }
  if (type == Type::kQ4_1) {
    return half_at(parts.scales, block) * static_cast<float>(code - 8 + 8) +
           half_at(parts.minimums, block);
  }
  constexpr float kE2M1[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const int exponent = std::to_integer<int>(parts.scales[block]) - 127;
  return std::ldexp(code < 8 ? kE2M1[code] : -kE2M1[code - 8], exponent);
}

class GgufBlockParts : public testing::TestWithParam<Type> {};

TEST_P(GgufBlockParts, HaveTheValuesOfTheBlocks) {
  const Type type = GetParam();
  for (const int64_t blocks : {1, 2, 37}) {
    const auto data = random_blocks(type, blocks);
    const Parts parts = split(type, data, blocks);
    std::vector<float> values(static_cast<size_t>(blocks * 32));
    decode_blocks(type, data.data(), blocks, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      if (type == Type::kMXFP4) {  // +0 and -0 alike
        ASSERT_EQ(value_of(type, parts, i), values[i]) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(value_of(type, parts, i)),
                  std::bit_cast<uint32_t>(values[i]))
            << i;
      }
    }
  }
}

TEST_P(GgufBlockParts, OfNoBlocksTouchNothing) { split(GetParam(), {}, 0); }

INSTANTIATE_TEST_SUITE_P(Types,
                         GgufBlockParts,
                         testing::Values(Type::kQ4_0, Type::kQ4_1, Type::kQ8_0, Type::kMXFP4),
                         [](const auto& info) {
                           return std::string(type_traits(info.param).name);
                         });

TEST(GgufBlockParts, OfOtherTypesAreRefused) {
  EXPECT_FALSE(has_parts(Type::kQ4_K));
  EXPECT_FALSE(has_parts(Type::kF16));
  EXPECT_THROW(split_blocks(Type::kQ5_0, nullptr, 0, {}), InternalError);
  EXPECT_THROW(static_cast<void>(code_bytes(Type::kBF16)), InternalError);
}

// All codes of MXFP4 with a scale of 1: the E2M1 table, in order.
TEST(GgufBlockParts, KeepTheCodesOfE2m1) {
  std::vector<std::byte> block(17);
  block[0] = std::byte{127};
  for (size_t j = 0; j < 16; ++j) {  // element j has code j, element j + 16 code 15 - j
    block[1 + j] = static_cast<std::byte>(j | ((15 - j) << 4));
  }
  const Parts parts = split(Type::kMXFP4, block, 1);
  EXPECT_EQ(parts.scales[0], std::byte{127});
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(nibble_at(parts.codes, i), static_cast<int>(i));
    EXPECT_EQ(nibble_at(parts.codes, 16 + i), static_cast<int>(15 - i));
  }
}

}  // namespace
}  // namespace nibble::gguf
