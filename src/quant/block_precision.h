#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "quant/scheme.h"

namespace nibble {

/// Rows of activations in integers of 4 and of 8 bits (ActFormat::kIntBlocks), as FMPQ has them
/// (COMET, https://arxiv.org/abs/2410.12168): neighbouring channels are a block, and all its codes,
/// of every row, have as many bits.
struct BlockPrecision {
  int block = 128;            // channels: 32, 64 or 128
  std::vector<uint8_t> bits;  // [k / block], each 4 or 8
  float clip = 0.9F;          // what part of a largest magnitude 4 bits span, in (0, 1]

  [[nodiscard]] bool operator==(const BlockPrecision&) const = default;
  [[nodiscard]] int64_t k() const { return static_cast<int64_t>(bits.size()) * block; }
};

/// How many scales a row has.
enum class BlockScales : uint8_t {
  kEach,   // one for each block, [k / block]
  kClass,  // one for all blocks of 4 bits, then one for all of 8, [2]; 0 for a class without blocks
};

/// Which of them a product takes follows from its weights: a scale for each of its sums.
[[nodiscard]] constexpr BlockScales block_scales_of(const WeightFormat& weight) {
  return weight.grouped() ? BlockScales::kEach : BlockScales::kClass;
}

[[nodiscard]] constexpr bool is_block_size(int64_t block) {
  return block == 32 || block == 64 || block == 128;
}

inline constexpr size_t kClassOf4Bits = 0;
inline constexpr size_t kClassOf8Bits = 1;

/// Scales of a row.
[[nodiscard]] inline int64_t scale_count(const BlockPrecision& blocks, BlockScales scales) {
  return scales == BlockScales::kEach ? static_cast<int64_t>(blocks.bits.size()) : 2;
}

/// kInvalidArgument, naming the field, unless products of weights in this format with k input
/// channels can take such rows: k is a multiple of the block, each block has its bits, and grouped
/// weights have groups of a block.
[[nodiscard]] Status check_blocks(const BlockPrecision& blocks,
                                  const WeightFormat& weight,
                                  int64_t k);

/// Channels whose codes have 4 bits, of all: between 0 and 1.
[[nodiscard]] double share_of_4_bits(const BlockPrecision& blocks);

}  // namespace nibble
