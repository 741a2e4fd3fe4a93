#include "quant/block_precision.h"

#include <algorithm>

namespace nibble {

Status check_blocks(const BlockPrecision& blocks, const WeightFormat& weight, int64_t k) {
  const auto bad = [](const std::string& what) {
    return make_error(StatusCode::kInvalidArgument, "blocks of activations: {}", what);
  };
  if (!is_block_size(blocks.block)) {
    return bad(fmt::format("field block: {} is none of 32, 64 and 128", blocks.block));
  }
  if (weight.grouped() && weight.group_size != blocks.block) {
    return bad(fmt::format("field block: {} beside weights in groups of {}", blocks.block,
                           weight.group_size));
  }
  if (k % blocks.block != 0) {
    return bad(
        fmt::format("field block: {} input channels are no multiple of {}", k, blocks.block));
  }
  if (blocks.k() != k) {
    return bad(fmt::format("field bits: has {} blocks, but {} input channels are {} of {}",
                           blocks.bits.size(), k, k / blocks.block, blocks.block));
  }
  const auto odd = std::ranges::find_if(blocks.bits, [](uint8_t b) { return b != 4 && b != 8; });
  if (odd != blocks.bits.end()) {
    return bad(fmt::format("field bits: block {} has {}, which is neither 4 nor 8",
                           odd - blocks.bits.begin(), *odd));
  }
  if (!(blocks.clip > 0.0F && blocks.clip <= 1.0F)) {
    return bad(fmt::format("field clip: {} is not above 0 and at most 1", blocks.clip));
  }
  return {};
}

double share_of_4_bits(const BlockPrecision& blocks) {
  const auto four = std::ranges::count(blocks.bits, uint8_t{4});
  return blocks.bits.empty() ? 0.0 : static_cast<double>(four) / std::ssize(blocks.bits);
}

}  // namespace nibble
