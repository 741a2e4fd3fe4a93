#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "quant/block_precision.h"
#include "quant/scheme.h"

namespace nibble {

/// How rows of activations enter a product, beside the weights' own form.
struct ActSpec {
  ActFormat format = ActFormat::kFloat;
  /// Of the token forms: the scale of every row, where the file stores one; 0: each row has its
  /// own. Values beyond the codes' range become its ends.
  float static_scale = 0.0F;
  /// Column i of the weights meets element columns[i] of the row (a permutation of 0..k-1: what
  /// GPTQ's act-order needs to have groups of neighbours); null: element i.
  std::shared_ptr<const std::vector<int32_t>> columns;
  /// Of kIntBlocks and kBf16Blocks, which need them: the bits of each block, in the order of the
  /// weights' columns.
  std::shared_ptr<const BlockPrecision> blocks;

  ActSpec() = default;
  // A format alone is a spec.
  ActSpec(ActFormat only_format) : format(only_format) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool operator==(const ActSpec& other) const {
    return format == other.format && static_scale == other.static_scale &&
           equal(columns, other.columns) && equal(blocks, other.blocks);
  }

 private:
  template <typename T>
  [[nodiscard]] static bool equal(const std::shared_ptr<const T>& a,
                                  const std::shared_ptr<const T>& b) {
    return a == b || (a != nullptr && b != nullptr && *a == *b);
  }
};

}  // namespace nibble
