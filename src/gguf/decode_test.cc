#include "gguf/decode.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "base/file.h"
#include "gguf/file.h"

namespace nibble::gguf {
namespace {

std::vector<float> decode(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.elements()), -12345.0F);
  decode_blocks(tensor.type, tensor.data.data(), tensor.blocks(), values.data());
  return values;
}

// Tensors "TYPE" of one file against "TYPE.values", which gguf-py decoded.
void check_file(const std::string& path) {
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto content = parse_gguf(file->bytes(), path);
  ASSERT_TRUE(content.ok()) << content.status().message();
  const auto types = content->metadata.require_string("blocks.types");
  ASSERT_TRUE(types.ok()) << types.status().message();
  std::istringstream names{std::string(*types)};
  int checked = 0;
  for (std::string name; names >> name; ++checked) {
    SCOPED_TRACE(name);
    const Tensor* blocks = content->find(name);
    const Tensor* expected = content->find(name + ".values");
    ASSERT_TRUE(blocks != nullptr && expected != nullptr);
    ASSERT_EQ(type_traits(blocks->type).name, name);
    ASSERT_EQ(blocks->shape, expected->shape);
    const std::vector<float> values = decode(*blocks);
    const std::vector<float> oracle = decode(*expected);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(oracle[i]))
          << "element " << i << ": " << values[i] << " instead of " << oracle[i];
    }
  }
  EXPECT_EQ(checked, 13);
}

TEST(GgufDecode, GivesTheBitsOfGgufPy) { check_file("tests/data/gguf/blocks.gguf"); }

// Of tests/interop/check_gguf.py: a larger file that it has just written.
TEST(GgufDecode, GivesTheBitsOfGgufPyInAGivenFile) {
  const char* path = std::getenv("NIBBLE_GGUF_BLOCKS");
  if (path == nullptr) {
    GTEST_SKIP() << "NIBBLE_GGUF_BLOCKS names no file of gguf-py; run tests/interop/check_gguf.py";
  }
  check_file(path);
}

TEST(GgufDecode, EveryHalfIsItsValue) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(halves.data());
  std::vector<float> f16(halves.size());
  std::vector<float> bf16(halves.size());
  decode_blocks(Type::kF16, bytes, 1 << 16, f16.data());
  decode_blocks(Type::kBF16, bytes, 1 << 16, bf16.data());
  for (size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(f16[i]), std::bit_cast<uint32_t>(f16_to_f32(halves[i]))) << i;
    ASSERT_EQ(std::bit_cast<uint32_t>(bf16[i]), static_cast<uint32_t>(i) << 16);
  }
}

template <typename T>
float decode_number(Type type, T value) {
  float out = 0;
  decode_blocks(type, reinterpret_cast<const std::byte*>(&value), 1, &out);
  return out;
}

TEST(GgufDecode, RoundsWiderNumbers) {
  EXPECT_EQ(decode_number(Type::kI8, int8_t{-128}), -128.0F);
  EXPECT_EQ(decode_number(Type::kI16, int16_t{-32768}), -32768.0F);
  EXPECT_EQ(decode_number(Type::kI32, int32_t{(1 << 24) + 1}), 16777216.0F);
  EXPECT_EQ(decode_number(Type::kI64, int64_t{-3} << 40), -3298534883328.0F);
  EXPECT_EQ(decode_number(Type::kF64, 0.1), 0.1F);
}

TEST(GgufDecode, ReadsBlocksAtAnyAddressAndWritesNoMore) {
  std::vector<std::byte> bytes(1 + 3 * 84, std::byte{0});
  bytes[1 + 84] = std::byte{0x21};       // scale 1, minimum 2 of the second block's group 0
  bytes[1 + 84 + 16] = std::byte{0x03};  // code 3 of element 0
  bytes[1 + 84 + 81] = std::byte{0x3c};  // 1.0
  bytes[1 + 84 + 83] = std::byte{0xbc};  // -1.0
  std::vector<float> values(3 * 256 + 1, 7.0F);
  decode_blocks(Type::kQ2_K, bytes.data() + 1, 3, values.data());
  EXPECT_EQ(values[256], 5.0F);
  EXPECT_EQ(values[257], 2.0F);
  EXPECT_EQ(values[3 * 256 - 1], 0.0F);
  EXPECT_EQ(values[3 * 256], 7.0F);
}

TEST(GgufDecode, ANonFiniteScaleGivesNonFiniteValues) {
  std::vector<std::byte> block(34, std::byte{1});
  block[0] = std::byte{0};
  block[1] = std::byte{0x7c};
  std::vector<float> values(32);
  decode_blocks(Type::kQ8_0, block.data(), 1, values.data());
  EXPECT_TRUE(std::isinf(values[5]));
  block[1] = std::byte{0x7e};
  decode_blocks(Type::kQ8_0, block.data(), 1, values.data());
  EXPECT_TRUE(std::isnan(values[5]));
}

}  // namespace
}  // namespace nibble::gguf
