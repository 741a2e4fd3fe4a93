#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "core/dtype.h"

namespace nibble {

/// How one weight element is coded.
enum class WeightCode : uint8_t { kF32, kF16, kBf16, kInt8, kFp8E4M3, kInt4, kFp4E2M1 };

/// What one weight scale covers: nothing, a row, group_size weights of a row, the matrix, or
/// group_size rows of group_size weights.
enum class ScalePer : uint8_t { kNone, kChannel, kGroup, kTensor, kBlock };

/// What each scale has beside it: nothing; a zero point, an integer in the range of the codes; or a
/// minimum, a number of the scale's type.
enum class ZeroPoints : uint8_t { kNone, kPerScale, kMinimum };

/// Weight numbers of a matrix [n, k] (n output channels): value = (code - zero point) * scale, or
/// (code - lowest code) * scale + minimum. Integer codes are signed: int4 -8..7, int8 -128..127.
struct WeightFormat {
  WeightCode code = WeightCode::kBf16;
  ScalePer scale_per = ScalePer::kNone;
  int group_size = 0;               // for kGroup, where k must be a multiple, and kBlock
  DType scale_dtype = DType::kF32;  // the type in the file: kF32, kBF16, kF16, kF8E8M0
  ZeroPoints zero_points = ZeroPoints::kNone;

  constexpr bool operator==(const WeightFormat&) const = default;
  [[nodiscard]] constexpr bool quantized() const { return scale_per != ScalePer::kNone; }
  [[nodiscard]] constexpr bool grouped() const {
    return scale_per == ScalePer::kGroup || scale_per == ScalePer::kBlock;
  }
  /// Scales that one row of k weights uses.
  [[nodiscard]] constexpr int64_t groups(int64_t k) const {
    if (grouped()) {
      return (k + group_size - 1) / group_size;
    }
    return quantized() ? 1 : 0;
  }
};

/// How activations enter the product. A file says kFloat; a model whose dtype is BF16 then rounds
/// them to BF16 (kBf16), as its training did. The token forms take one scale per row of
/// activations, absmax/127 or absmax/448, computed at run time; kFp8Group takes one for every 128
/// of a row. Those of kIntBlocks are integers of 4 or 8 bits, by block of channels, and those of
/// kBf16Blocks integers of 8 bits or BF16 (quant/block_precision.h).
enum class ActFormat : uint8_t {
  kFloat,
  kBf16,
  kInt8Token,
  kFp8Token,
  kFp8Group,
  kIntBlocks,
  kBf16Blocks
};

/// Whether blocks of channels differ in how rows are rounded.
[[nodiscard]] constexpr bool in_blocks(ActFormat act) {
  return act == ActFormat::kIntBlocks || act == ActFormat::kBf16Blocks;
}

/// Whether rows are multiplied as integers: so is BF16 in blocks, in fixed point.
[[nodiscard]] constexpr bool is_integer(ActFormat act) {
  return act == ActFormat::kInt8Token || in_blocks(act);
}

/// One row of the table that drives quantizer, file format, kernels and QAT.
struct QuantScheme {
  std::string_view name;
  WeightFormat weight;
  ActFormat act = ActFormat::kFloat;

  constexpr bool operator==(const QuantScheme&) const = default;
};

/// All schemes, in the order that help texts and docs list them.
[[nodiscard]] std::span<const QuantScheme> all_schemes();
/// kInvalidArgument with the list of names when there is none of this name.
[[nodiscard]] Result<QuantScheme> find_scheme(std::string_view name);
/// Name of the row with these formats, or empty.
[[nodiscard]] std::string_view scheme_name(const WeightFormat& weight, ActFormat act);
/// Bits stored per weight of a row of k weights, scales, zero points and minimums included.
[[nodiscard]] double bits_per_weight(const WeightFormat& format, int64_t k);

}  // namespace nibble
