#pragma once

#include <memory>
#include <random>

#include "quant/act_spec.h"

namespace nibble {

/// Blocks of a scheme's two precisions in no order for k channels: those of a group of the weights,
/// or where there are none of 32.
inline ActSpec random_blocks(const QuantScheme& scheme, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  const WeightFormat& weight = scheme.weight;
  BlockPrecision blocks{.block = weight.grouped() ? weight.group_size : 32, .clip = 0.875F};
  const uint8_t low = low_bits(block_scales_of(weight, scheme.act));
  for (int64_t i = 0; i < k / blocks.block; ++i) {
    blocks.bits.push_back(static_cast<uint8_t>(random() % 3 == 0 ? 2 * low : low));
  }
  ActSpec act(scheme.act);
  act.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  return act;
}

/// The activations of a scheme: those in blocks get some.
inline ActSpec random_act(const QuantScheme& scheme, int64_t k, uint32_t seed) {
  return in_blocks(scheme.act) ? random_blocks(scheme, k, seed) : ActSpec(scheme.act);
}

}  // namespace nibble
