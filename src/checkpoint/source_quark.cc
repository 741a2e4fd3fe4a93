#include "checkpoint/source_formats.h"

namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

// Quark's conversion from file to file packs single stages in order whatever its config says; its
// files are the ones without metadata.
bool reordered(const SourceContext& context, const TensorInfo& codes, const QuantGroup& group) {
  const bool file_to_file = !group.progressive && context.reader.metadata_of(codes).empty();
  return context.config.quark_reorder && !file_to_file;
}

// [n, k / 8] words along the input channels.
Result<CodedFacts> int4_channels(const SourceContext& context,
                                 const TensorInfo& codes,
                                 const QuantGroup& group,
                                 CodedFacts facts) {
  if (!group.symmetric || group.number != Number::kInt) {
    return context.unsupported(codes, "4-bit codes per channel with zero points are not read");
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kNibbles, 8, facts));
  facts.codes.nibbles = {.reordered = reordered(context, codes, group), .signed_code = true};
  const std::string_view suffix = group.progressive ? "weight_scale_2" : "weight_scale";
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale, context.require(codes, facts.module, suffix));
  NIBBLE_RETURN_IF_ERROR(
      use_scales(context, *scale, ScaleGrid::kChannel, ScaleTypes::kFloats, facts));
  if (group.progressive) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* outer,
                            context.require(codes, facts.module, "weight_scale"));
    NIBBLE_RETURN_IF_ERROR(use_outer_scale(context, *outer, facts));
  }
  facts.format = fmt::format("Quark int4 per channel{}{}", group.progressive ? " over fp8" : "",
                             facts.codes.nibbles.reordered ? "" : ", in order");
  return facts;
}

// [k, n / 8] words along the output channels, scales and zero points transposed likewise.
Result<CodedFacts> int4_groups(const SourceContext& context,
                               const TensorInfo& codes,
                               const QuantGroup& group,
                               CodedFacts facts) {
  NIBBLE_RETURN_IF_ERROR(context.expect_matrix(codes));
  facts.k = codes.shape[0];
  if (__builtin_mul_overflow(codes.shape[1], int64_t{8}, &facts.n)) {
    return context.corrupt(codes, fmt::format("shape {} overflows", shape_text(codes.shape)));
  }
  const NibbleForm nibbles{.reordered = context.config.quark_reorder,
                           .signed_code = group.number == Number::kInt};
  facts.codes = {.tensor = &codes,
                 .form = CodeForm::kNibbles,
                 .nibbles = nibbles,
                 .axis = CodeLayout::Axis::kAcross,
                 .row_bytes = codes.shape[1] * 4};
  NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group.group_size, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  NIBBLE_RETURN_IF_ERROR(
      use_scales(context, *scale, ScaleGrid::kColumns, ScaleTypes::kFloats, facts));
  const TensorInfo* zeros = context.find(facts.module, "weight_zero_point");
  if (zeros == nullptr && !group.symmetric) {
    return context.corrupt(codes, fmt::format("{}.weight_zero_point is missing", facts.module));
  }
  if (zeros != nullptr) {
    NIBBLE_RETURN_IF_ERROR(context.expect(*zeros, DType::kI32, {facts.groups(), codes.shape[1]}));
    facts.zero = {.form = ZeroLayout::Form::kColumns,
                  .tensor = zeros,
                  .nibbles = nibbles,
                  .is_fixed = group.symmetric};
  }
  facts.format = fmt::format("Quark {} g{}", group.symmetric ? "int4" : "uint4", group.group_size);
  return facts;
}

Result<CodedFacts> int8_channels(const SourceContext& context,
                                 const TensorInfo& codes,
                                 const QuantGroup& group,
                                 CodedFacts facts) {
  if (group.strategy == Strategy::kGroup || !group.symmetric) {
    return context.unsupported(codes, "8-bit codes in groups or with zero points are not read");
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kInt8, 1, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  const bool one = group.strategy == Strategy::kTensor;
  NIBBLE_RETURN_IF_ERROR(use_scales(context, *scale, one ? ScaleGrid::kTensor : ScaleGrid::kChannel,
                                    ScaleTypes::kFloats, facts));
  facts.format = one ? "Quark int8 per tensor" : "Quark int8 per channel";
  return facts;
}

// U8 pairs of E2M1: E4M3 scales and weight_scale_2 are NVFP4 (ModelOpt too), E8M0 ones MXFP4.
Result<CodedFacts> fp4_groups(const SourceContext& context,
                              const TensorInfo& codes,
                              const QuantGroup& group,
                              CodedFacts facts) {
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  const bool nvfp4 = scale->dtype == DType::kF8E4M3;
  const int64_t group_size = nvfp4 ? 16 : 32;
  if (group.strategy != Strategy::kGroup || group.group_size != group_size) {
    return context.corrupt(codes, fmt::format("pairs of 4-bit floats with {} scales need groups of "
                                              "{}, but {} says otherwise",
                                              dtype_name(scale->dtype), group_size, group.where));
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kE2M1, 2, facts));
  NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group_size, facts));
  NIBBLE_RETURN_IF_ERROR(use_scales(context, *scale, ScaleGrid::kGroup,
                                    nvfp4 ? ScaleTypes::kE4M3 : ScaleTypes::kE8M0, facts));
  if (nvfp4) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* outer,
                            context.require(codes, facts.module, "weight_scale_2"));
    NIBBLE_RETURN_IF_ERROR(use_outer_scale(context, *outer, facts));
  }
  facts.format = nvfp4 ? "NVFP4" : "MXFP4";
  return facts;
}

Result<CodedFacts> facts_by_type(const SourceContext& context,
                                 const TensorInfo& codes,
                                 const QuantGroup& group,
                                 CodedFacts facts) {
  const bool floats = group.number == Number::kFloat;
  if (codes.dtype == DType::kI32 && group.bits == 4 && !floats) {
    return group.strategy == Strategy::kGroup
               ? int4_groups(context, codes, group, std::move(facts))
               : int4_channels(context, codes, group, std::move(facts));
  }
  if (codes.dtype == DType::kI8 && group.bits == 8 && !floats) {
    return int8_channels(context, codes, group, std::move(facts));
  }
  if (codes.dtype == DType::kU8 && group.bits == 4 && floats) {
    return fp4_groups(context, codes, group, std::move(facts));
  }
  return context.corrupt(
      codes, fmt::format("codes of type {} contradict the {}-bit {} of {}", dtype_name(codes.dtype),
                         group.bits, floats ? "floats" : "integers", group.where));
}

}  // namespace

Result<CodedFacts> quark_facts(const SourceContext& context,
                               const TensorInfo& codes,
                               const std::string& module,
                               const QuantGroup& group) {
  if (codes.dtype == DType::kF8E4M3) {
    return fp8_facts(context, codes, module, group);
  }
  CodedFacts facts;
  facts.module = module;
  for (const std::string_view suffix : {"input_scale", "input_scale_2"}) {
    if (const TensorInfo* tensor = context.find(module, suffix)) {
      facts.unused.push_back(tensor);
    }
  }
  return facts_by_type(context, codes, group, std::move(facts));
}

}  // namespace nibble
