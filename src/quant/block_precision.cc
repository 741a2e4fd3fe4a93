#include "quant/block_precision.h"

#include <algorithm>

namespace nibble {

int64_t scale_count(const BlockPrecision& blocks, BlockScales scales) {
  switch (scales) {
    case BlockScales::kEach:
      return std::ssize(blocks.bits);
    case BlockScales::kClass:
      return 1;
    case BlockScales::kWide:
      return 1 + std::ranges::count(blocks.bits, uint8_t{16});
  }
  return 0;
}

Status check_blocks(const BlockPrecision& blocks,
                    ActFormat act,
                    const WeightFormat& weight,
                    int64_t k) {
  const auto bad = [](const std::string& what) {
    return make_error(StatusCode::kInvalidArgument, "blocks of activations: {}", what);
  };
  if (!is_block_size(blocks.block)) {
    return bad(fmt::format("field block: {} is none of 32, 64 and 128", blocks.block));
  }
  const BlockScales scales = block_scales_of(weight, act);
  if (weight.grouped() && scales == BlockScales::kWide) {
    return bad(
        fmt::format("with blocks in BF16 weights have one scale for each output channel, not "
                    "groups of {}",
                    weight.group_size));
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
  const int low = low_bits(scales);
  const auto odd =
      std::ranges::find_if(blocks.bits, [&](int b) { return b != low && b != 2 * low; });
  if (odd != blocks.bits.end()) {
    return bad(fmt::format("field bits: block {} has {}, which is neither {} nor {}",
                           odd - blocks.bits.begin(), *odd, low, 2 * low));
  }
  if (!(blocks.clip > 0.0F && blocks.clip <= 1.0F)) {
    return bad(fmt::format("field clip: {} is not above 0 and at most 1", blocks.clip));
  }
  return {};
}

double share_of_bits(const BlockPrecision& blocks, uint8_t bits) {
  const auto found = static_cast<double>(std::ranges::count(blocks.bits, bits));
  return blocks.bits.empty() ? 0.0 : found / static_cast<double>(std::ssize(blocks.bits));
}

}  // namespace nibble
