#pragma once

#include <cstdint>

// Activations of 4 bits stored two a byte. Of eight neighbours the first four are the low halves of
// a word's bytes, the others the high ones: what has eight numbers stores a word, and masks make
// eight bytes of it in their order, 16 times the codes.
namespace nibble::cuda {

/// How a product's INT8 blocks of activations of 4 bits lie in memory.
enum class ActStore : uint8_t { kBytes, kNibbles };

/// Four codes of -8..7 and the four behind them, a byte each, as one word.
constexpr uint32_t join_nibbles(uint32_t first, uint32_t second) {
  return (first & 0x0f0f0f0fU) | (second << 4 & 0xf0f0f0f0U);
}
/// And back.
constexpr uint32_t first_of_nibbles(uint32_t word) { return word << 4 & 0xf0f0f0f0U; }
constexpr uint32_t second_of_nibbles(uint32_t word) { return word & 0xf0f0f0f0U; }

/// Where a step's tile of kTokens x 128 codes lies, in bytes: as it is copied, rows of 64 bytes in
/// the second half of the room that it takes as bytes, rows of 128 in wgmma's swizzle. Chunks are
/// of 16 bytes; a copied one becomes two. Threads take chunks in turns.
template <int kTokens>
struct NibbleTile {
  static constexpr int kChunks = 4 * kTokens;  // copied
  static constexpr uint32_t kCopied = kTokens * 64;
  static constexpr uint32_t copied(int chunk) {
    return kCopied + 16 * static_cast<uint32_t>(chunk);
  }
  /// half: the first or second 16 of the chunk's 32 codes. Chunks that are a multiple of kEvery
  /// apart lie 32 bytes apart for each chunk between them.
  static constexpr int kEvery = 32;
  static constexpr uint32_t unpacked(int chunk, int half) {
    const auto token = static_cast<uint32_t>(chunk) / 4;
    const uint32_t column = 2 * (static_cast<uint32_t>(chunk) % 4) + static_cast<uint32_t>(half);
    return 128 * token + 16 * (column ^ token % 8);
  }
  /// Turns of so many threads, and those of them whose chunks become bytes in front of all that is
  /// copied.
  static constexpr int turns(int threads) { return (kChunks + threads - 1) / threads; }
  static constexpr int free_turns(int threads) { return kChunks / 2 / threads; }
};

}  // namespace nibble::cuda
