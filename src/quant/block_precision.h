#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "quant/scheme.h"

namespace nibble {

/// Rows of activations in two precisions: neighbouring channels are a block, and all its codes, of
/// every row, have as many bits. Integers of 4 and of 8 bits (ActFormat::kIntBlocks) as FMPQ has
/// them (COMET, https://arxiv.org/abs/2410.12168), or integers of 8 bits and BF16
/// (ActFormat::kBf16Blocks), whose codes have 16 bits.
struct BlockPrecision {
  int block = 128;            // channels: 32, 64 or 128
  std::vector<uint8_t> bits;  // [k / block], each 4 or 8; of kBf16Blocks 8 or 16
  float clip = 0.9F;          // what part of a largest magnitude 4 bits span, in (0, 1]

  [[nodiscard]] bool operator==(const BlockPrecision&) const = default;
  [[nodiscard]] int64_t k() const { return static_cast<int64_t>(bits.size()) * block; }
};

/// How many scales a row has.
enum class BlockScales : uint8_t {
  kEach,   // one for each block, [k / block]
  kClass,  // one for all blocks: those of 4 bits count a power of two of it
  kWide,   // of kBf16Blocks: one for all blocks of 8 bits, then one for each block of 16
};

/// Which of them a product takes follows from its rows and weights: a scale for each of its sums.
[[nodiscard]] constexpr BlockScales block_scales_of(const WeightFormat& weight, ActFormat act) {
  if (act == ActFormat::kBf16Blocks) {
    return BlockScales::kWide;
  }
  return weight.grouped() ? BlockScales::kEach : BlockScales::kClass;
}

/// The fewer bits of the two that blocks have; the others have twice as many.
[[nodiscard]] constexpr uint8_t low_bits(BlockScales scales) {
  return scales == BlockScales::kWide ? 8 : 4;
}

[[nodiscard]] constexpr bool is_block_size(int64_t block) {
  return block == 32 || block == 64 || block == 128;
}

/// Scales of a row.
[[nodiscard]] int64_t scale_count(const BlockPrecision& blocks, BlockScales scales);

/// kInvalidArgument, naming the field, unless products of weights in this format with k input
/// channels can take such rows, of kIntBlocks or kBf16Blocks: k is a multiple of the block, each
/// block has its bits, and grouped weights have groups of a block, or none with BF16.
[[nodiscard]] Status check_blocks(const BlockPrecision& blocks,
                                  ActFormat act,
                                  const WeightFormat& weight,
                                  int64_t k);

/// Channels whose codes have so many bits, of all: between 0 and 1.
[[nodiscard]] double share_of_bits(const BlockPrecision& blocks, uint8_t bits);

}  // namespace nibble
