#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/buffer.h"
#include "core/dtype.h"

namespace nibble {
namespace {

TEST(DType, NamesAndBitsAreThoseOfSafetensors) {
  EXPECT_EQ(dtype_from_name("BF16"), DType::kBF16);
  EXPECT_EQ(dtype_from_name("bf16"), std::nullopt);
  EXPECT_EQ(dtype_bits(DType::kF4E2M1), 4);
  EXPECT_EQ(dtype_bits(DType::kU64), 64);
  for (int i = 0; i <= static_cast<int>(DType::kU64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
}

TEST(Buffer, IsAlignedAndMoves) {
  for (const size_t size : {size_t{1}, size_t{4096}, (size_t{2} << 20) + 5, size_t{9} << 20}) {
    auto buffer = Buffer::allocate(size);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(buffer->size(), size);
    const size_t alignment = size >= (size_t{2} << 20) ? size_t{2} << 20 : 64;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % alignment, 0U);
    buffer->data()[0] = std::byte{1};
    buffer->data()[size - 1] = std::byte{2};
    Buffer moved = std::move(*buffer);
    EXPECT_EQ(moved.data()[size - 1], std::byte{2});
    EXPECT_EQ(buffer->data(), nullptr);
  }
  EXPECT_EQ(Buffer::allocate(0)->size(), 0U);
}

TEST(Buffer, RefusesWhatCannotBeHad) {
  const auto result = Buffer::allocate(size_t{1} << 60);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kResourceExhausted);
}

TEST(BufferArena, CutsBuffersThatOutliveIt) {
  std::vector<Buffer> buffers;
  {
    BufferArena arena;
    for (const size_t size : {size_t{1}, size_t{100}, size_t{3} << 20, size_t{200} << 20}) {
      auto buffer = arena.allocate(size);
      ASSERT_TRUE(buffer.ok());
      EXPECT_EQ(buffer->size(), size);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0U);
      buffers.push_back(std::move(*buffer));
    }
    EXPECT_EQ(arena.allocate(0)->size(), 0U);
  }
  EXPECT_EQ(buffers[1].data() - buffers[0].data(), 64);  // neighbours in one block
  for (size_t i = 0; i < buffers.size(); ++i) {
    std::fill_n(buffers[i].data(), buffers[i].size(), static_cast<std::byte>(i + 1));
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer moved = std::move(buffers[i]);
    EXPECT_EQ(moved.data()[0], static_cast<std::byte>(i + 1));
    EXPECT_EQ(moved.data()[moved.size() - 1], static_cast<std::byte>(i + 1));
  }
}

// Layers that are loaded one after the other took more and more of a block.
TEST(BufferArena, ABlockOfWhichNothingLivesIsCutAnew) {
  BufferArena arena;
  const std::byte* first = nullptr;
  for (int round = 0; round < 3; ++round) {
    const Buffer a = arena.allocate(1000).value();
    const Buffer b = arena.allocate(500).value();
    first = round == 0 ? a.data() : first;
    EXPECT_EQ(a.data(), first);
    EXPECT_EQ(b.data() - a.data(), 1024);
  }
  const Buffer kept = arena.allocate(1000).value();
  EXPECT_EQ(kept.data(), first);
  EXPECT_NE(arena.allocate(1000)->data(), first);
}

}  // namespace
}  // namespace nibble
