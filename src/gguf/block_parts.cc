#include "gguf/block_parts.h"

#include <array>
#include <cstring>

namespace nibble::gguf {
namespace {

constexpr int64_t kCodeBytes = 16;  // of 32 codes of 4 bits

// The low nibbles of eight bytes, next to each other.
uint32_t join_nibbles(uint64_t bytes) {
  const uint64_t low = bytes & 0x0f0f0f0f0f0f0f0fU;
  const uint64_t pairs = (low | (low >> 4)) & 0x00ff00ff00ff00ffU;
  const uint64_t fours = (pairs | (pairs >> 8)) & 0x0000ffff0000ffffU;
  return static_cast<uint32_t>(fours | (fours >> 16));
}

// From element j and j + 16 in byte j to element 2j and 2j + 1. Offset binary and E2M1 alike: the
// codes themselves stay what they are.
void order_nibbles(const std::byte* in, std::byte* out) {
  std::array<uint64_t, 2> bytes;
  std::memcpy(bytes.data(), in, kCodeBytes);
  const std::array<uint32_t, 4> words = {join_nibbles(bytes[0]), join_nibbles(bytes[1]),
                                         join_nibbles(bytes[0] >> 4), join_nibbles(bytes[1] >> 4)};
  std::memcpy(out, words.data(), kCodeBytes);
}

template <int64_t kHeader, typename Scale>
void split_nibbles(const std::byte* in, int64_t blocks, const BlockParts& out) {
  for (int64_t i = 0; i < blocks; ++i) {
    const std::byte* block = in + i * (kHeader + kCodeBytes);
    std::memcpy(out.scales + i * static_cast<int64_t>(sizeof(Scale)), block, sizeof(Scale));
    order_nibbles(block + kHeader, out.codes + i * kCodeBytes);
  }
}

void split_q4_1(const std::byte* in, int64_t blocks, const BlockParts& out) {
  split_nibbles<4, uint16_t>(in, blocks, out);
  for (int64_t i = 0; i < blocks; ++i) {
    std::memcpy(out.minimums + i * 2, in + i * (4 + kCodeBytes) + 2, 2);
  }
}

void split_q8_0(const std::byte* in, int64_t blocks, const BlockParts& out) {
  for (int64_t i = 0; i < blocks; ++i) {
    std::memcpy(out.scales + i * 2, in + i * 34, 2);
    std::memcpy(out.codes + i * 32, in + i * 34 + 2, 32);
  }
}

}  // namespace

bool has_parts(Type type) {
  return type == Type::kQ4_0 || type == Type::kQ4_1 || type == Type::kQ8_0 || type == Type::kMXFP4;
}

int64_t code_bytes(Type type) {
  CHECK(has_parts(type));
  return type == Type::kQ8_0 ? 32 : kCodeBytes;
}

int64_t scale_bytes(Type type) {
  CHECK(has_parts(type));
  return type == Type::kMXFP4 ? 1 : 2;
}

void split_blocks(Type type, const std::byte* in, int64_t blocks, const BlockParts& out) {
  switch (type) {
    case Type::kQ4_0:
      return split_nibbles<2, uint16_t>(in, blocks, out);
    case Type::kQ4_1:
      return split_q4_1(in, blocks, out);
    case Type::kQ8_0:
      return split_q8_0(in, blocks, out);
    case Type::kMXFP4:
      return split_nibbles<1, uint8_t>(in, blocks, out);
    default:
      CHECK_MSG(false, "{} has no parts", type_traits(type).name);
  }
}

}  // namespace nibble::gguf
