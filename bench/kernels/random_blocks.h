#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "quant/block_precision.h"

namespace nibble {

/// What rows of k channels become in a benchmark of weights in this format: blocks of its groups,
/// or of 128, of which a share of a4_share, at random places, has 4 bits.
inline std::shared_ptr<const BlockPrecision> random_blocks(const WeightFormat& weight,
                                                           int64_t k,
                                                           double a4_share) {
  BlockPrecision blocks{.block = weight.grouped() ? weight.group_size : 128, .bits = {}};
  const auto count = static_cast<size_t>(k / blocks.block);
  const auto four = static_cast<size_t>(a4_share * static_cast<double>(count) + 0.5);
  blocks.bits.assign(count, 8);
  std::fill_n(blocks.bits.begin(), std::min(four, count), uint8_t{4});
  std::mt19937 random(4);
  std::ranges::shuffle(blocks.bits, random);
  return std::make_shared<const BlockPrecision>(std::move(blocks));
}

}  // namespace nibble
