#include <array>

#include "quant/block_precision.h"
#include "quant/code_traits.h"
#include "quant/levels.h"
#include "quant/scheme.h"

namespace nibble {
namespace {

using enum WeightCode;
using enum ScalePer;

// The only list of schemes.
constexpr std::array kSchemes = {
    QuantScheme{"bf16", {kBf16, kNone, 0, DType::kF32}, ActFormat::kFloat},
    QuantScheme{"w8a8_int8", {kInt8, kChannel, 0, DType::kF32}, ActFormat::kInt8Token},
    QuantScheme{"w8a8_fp8", {kFp8E4M3, kChannel, 0, DType::kF32}, ActFormat::kFp8Token},
    QuantScheme{"w8a8_fp8_expert", {kFp8E4M3, kTensor, 0, DType::kF32}, ActFormat::kFp8Token},
    QuantScheme{"w8a8_fp8_block", {kFp8E4M3, kBlock, 128, DType::kF32}, ActFormat::kFp8Group},
    QuantScheme{"w8a16_channel", {kInt8, kChannel, 0, DType::kBF16}, ActFormat::kFloat},
    QuantScheme{"w4a16_g32", {kInt4, kGroup, 32, DType::kBF16}, ActFormat::kFloat},
    QuantScheme{"w4a16_g128", {kInt4, kGroup, 128, DType::kBF16}, ActFormat::kFloat},
    QuantScheme{"w4a16_channel", {kInt4, kChannel, 0, DType::kBF16}, ActFormat::kFloat},
    QuantScheme{"w4a16_g32_asym",
                {kInt4, kGroup, 32, DType::kBF16, ZeroPoints::kPerScale},
                ActFormat::kFloat},
    QuantScheme{"w4a16_g128_asym",
                {kInt4, kGroup, 128, DType::kBF16, ZeroPoints::kPerScale},
                ActFormat::kFloat},
    QuantScheme{"mxfp4", {kFp4E2M1, kGroup, 32, DType::kF8E8M0}, ActFormat::kFloat},
    QuantScheme{"mxfp4_fp8", {kFp4E2M1, kGroup, 32, DType::kF8E8M0}, ActFormat::kFp8Token},
    QuantScheme{"w4a8", {kInt4, kChannel, 0, DType::kF32}, ActFormat::kInt8Token},
    QuantScheme{"w4a8_g64",
                {kInt4, kGroup, 64, DType::kBF16, ZeroPoints::kPerScale},
                ActFormat::kInt8Token},
    QuantScheme{"w4a8_g128",
                {kInt4, kGroup, 128, DType::kBF16, ZeroPoints::kPerScale},
                ActFormat::kInt8Token},
    QuantScheme{"w4ax", {kInt4, kGroup, 128, DType::kBF16}, ActFormat::kIntBlocks},
    QuantScheme{"w4ax_b64", {kInt4, kGroup, 64, DType::kBF16}, ActFormat::kIntBlocks},
    QuantScheme{"w4ax_b32", {kInt4, kGroup, 32, DType::kBF16}, ActFormat::kIntBlocks},
    QuantScheme{"w4ax_class", {kInt4, kChannel, 0, DType::kF32}, ActFormat::kIntBlocks},
    QuantScheme{"w4a8_bf16", {kInt4, kChannel, 0, DType::kF32}, ActFormat::kBf16Blocks},
};

// One integer sum per scale: what integer activations are multiplied with are integers, and no
// scale changes within a sum. A row that has one scale needs weights with one for the row; scales
// of groups are integers below it (quant/levels.h). Rows with a scale for each block have a sum for
// each, which groups of as many weights scale, or, with one for the row, a sum for each class of
// bits or for the INT8 blocks and each in BF16 (quant/block_precision.h).
constexpr bool one_sum_per_scale(const QuantScheme& scheme) {
  const WeightFormat& weight = scheme.weight;
  const bool integers = is_integer(weight.code);
  const bool symmetric = weight.zero_points == ZeroPoints::kNone;
  switch (scheme.act) {
    case ActFormat::kInt8Token:
      return in_two_levels(weight, scheme.act) || (weight.scale_per == kChannel && integers);
    case ActFormat::kIntBlocks:
      return integers && symmetric &&
             (weight.scale_per == kChannel ||
              (weight.scale_per == kGroup && is_block_size(weight.group_size)));
    case ActFormat::kBf16Blocks:
      return integers && symmetric && weight.scale_per == kChannel;
    default:
      return true;
  }
}

constexpr bool legal(const QuantScheme& scheme) {
  const bool grouped = scheme.weight.grouped();
  const bool integer_weight = is_integer(scheme.weight.code);
  const bool group_ok = grouped == (scheme.weight.group_size > 0);
  const bool zeros_ok = scheme.weight.zero_points == ZeroPoints::kNone || integer_weight;
  return group_ok && one_sum_per_scale(scheme) && zeros_ok &&
         scheme.weight.quantized() != is_plain(scheme.weight.code);
}

constexpr bool all_legal() {
  for (const QuantScheme& scheme : kSchemes) {
    if (!legal(scheme)) {
      return false;
    }
  }
  return true;
}
static_assert(all_legal());

}  // namespace

std::span<const QuantScheme> all_schemes() { return kSchemes; }

Result<QuantScheme> find_scheme(std::string_view name) {
  std::string known;
  for (const QuantScheme& scheme : kSchemes) {
    if (scheme.name == name) {
      return scheme;
    }
    known += known.empty() ? "" : ", ";
    known += scheme.name;
  }
  return make_error(StatusCode::kInvalidArgument, "unknown scheme \"{}\"; choose one of {}", name,
                    known);
}

std::string_view scheme_name(const WeightFormat& weight, ActFormat act) {
  for (const QuantScheme& scheme : kSchemes) {
    if (scheme.weight.code == weight.code && scheme.weight.scale_per == weight.scale_per &&
        scheme.weight.group_size == weight.group_size &&
        scheme.weight.zero_points == weight.zero_points && scheme.act == act) {
      return scheme.name;  // the stored type of the scales is the file's affair
    }
  }
  return {};
}

double bits_per_weight(const WeightFormat& format, int64_t k) {
  const auto code_bits = static_cast<double>(code_traits(format.code).bits);
  if (format.scale_per == kTensor) {
    return code_bits;  // one scale for all rows
  }
  int zero_bits = 0;
  if (format.zero_points == ZeroPoints::kPerScale) {
    zero_bits = code_traits(format.code).bits;
  } else if (format.zero_points == ZeroPoints::kMinimum) {
    zero_bits = dtype_bits(format.scale_dtype);
  }
  const int rows = format.scale_per == kBlock ? format.group_size : 1;
  const auto scales = static_cast<double>(format.groups(k)) / rows;
  return code_bits + scales * (dtype_bits(format.scale_dtype) + zero_bits) / static_cast<double>(k);
}

}  // namespace nibble
