#pragma once

#include <memory>
#include <random>

#include "quant/act_spec.h"

namespace nibble {

/// Blocks of 4 and 8 bits in no order for k channels of weights in this format: those of a group,
/// or where there are none of 32.
inline ActSpec random_blocks(const WeightFormat& weight, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  BlockPrecision blocks{.block = weight.grouped() ? weight.group_size : 32, .clip = 0.875F};
  for (int64_t i = 0; i < k / blocks.block; ++i) {
    blocks.bits.push_back(random() % 3 == 0 ? 8 : 4);
  }
  ActSpec act(ActFormat::kIntBlocks);
  act.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  return act;
}

/// The activations of a scheme: those in blocks get some.
inline ActSpec random_act(const QuantScheme& scheme, int64_t k, uint32_t seed) {
  return scheme.act == ActFormat::kIntBlocks ? random_blocks(scheme.weight, k, seed)
                                             : ActSpec(scheme.act);
}

}  // namespace nibble
