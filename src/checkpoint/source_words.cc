#include "checkpoint/source_formats.h"

namespace nibble {
namespace {

std::string group_text(const QuantGroup& group) {
  return group.group_size == -1 ? "per channel" : fmt::format("g{}", group.group_size);
}

// Zero points in words along the output channels: [groups, n / 8].
Status use_zero_words(const SourceContext& context,
                      const TensorInfo& codes,
                      ZeroLayout zero,
                      CodedFacts& facts) {
  NIBBLE_ASSIGN_OR_RETURN(zero.tensor, context.require(codes, facts.module, "qzeros"));
  NIBBLE_RETURN_IF_ERROR(context.expect(*zero.tensor, DType::kI32, {facts.groups(), facts.n / 8}));
  zero.form = ZeroLayout::Form::kColumns;
  facts.zero = zero;
  return {};
}

Status use_columns(const SourceContext& context,
                   const TensorInfo& codes,
                   const QuantGroup& group,
                   CodedFacts& facts) {
  NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group.group_size, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale, context.require(codes, facts.module, "scales"));
  return use_scales(context, *scale, ScaleGrid::kColumns, ScaleTypes::kFloats, facts);
}

Result<CodedFacts> gptq_facts(const SourceContext& context,
                              const TensorInfo& codes,
                              const QuantGroup& group,
                              CodedFacts facts) {
  facts.n = codes.shape[1];
  if (__builtin_mul_overflow(codes.shape[0], int64_t{8}, &facts.k) || facts.n % 8 != 0) {
    return context.corrupt(codes, fmt::format("shape {}: output channels are no multiple of 8",
                                              shape_text(codes.shape)));
  }
  facts.codes = {.tensor = &codes,
                 .form = CodeForm::kNibbles,
                 .axis = CodeLayout::Axis::kWordColumns,
                 .row_bytes = codes.shape[1] * 4};
  NIBBLE_RETURN_IF_ERROR(use_columns(context, codes, group, facts));
  const bool one_less = group.symmetric || !context.config.gptq_v2;
  NIBBLE_RETURN_IF_ERROR(use_zero_words(
      context, codes, {.add = one_less ? 1 : 0, .is_fixed = group.symmetric}, facts));
  facts.group_index = context.find(facts.module, "g_idx");
  if (facts.group_index != nullptr) {
    NIBBLE_RETURN_IF_ERROR(context.expect(*facts.group_index, DType::kI32, {facts.k}));
  }
  facts.format =
      fmt::format("GPTQ int4 {}{}", group_text(group), group.symmetric ? "" : ", zero points");
  return facts;
}

Result<CodedFacts> awq_facts(const SourceContext& context,
                             const TensorInfo& codes,
                             const QuantGroup& group,
                             CodedFacts facts) {
  facts.k = codes.shape[0];
  if (__builtin_mul_overflow(codes.shape[1], int64_t{8}, &facts.n)) {
    return context.corrupt(codes, fmt::format("shape {} overflows", shape_text(codes.shape)));
  }
  facts.codes = {.tensor = &codes,
                 .form = CodeForm::kNibbles,
                 .nibbles = {.reordered = true},
                 .axis = CodeLayout::Axis::kAcross,
                 .row_bytes = codes.shape[1] * 4};
  NIBBLE_RETURN_IF_ERROR(use_columns(context, codes, group, facts));
  NIBBLE_RETURN_IF_ERROR(use_zero_words(context, codes, {.nibbles = {.reordered = true}}, facts));
  facts.format = fmt::format("AWQ int4 {}, zero points", group_text(group));
  return facts;
}

}  // namespace

Result<CodedFacts> word_facts(const SourceContext& context,
                              const TensorInfo& codes,
                              const std::string& module) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, context.group_for(codes, module));
  NIBBLE_RETURN_IF_ERROR(context.expect_matrix(codes));
  if (codes.dtype != DType::kI32) {
    return context.corrupt(codes,
                           fmt::format("expected I32 words, got {}", dtype_name(codes.dtype)));
  }
  CodedFacts facts;
  facts.module = module;
  if (context.config.dialect == Dialect::kGptq) {
    return gptq_facts(context, codes, *group, std::move(facts));
  }
  if (context.config.dialect == Dialect::kAwq) {
    return awq_facts(context, codes, *group, std::move(facts));
  }
  return context.corrupt(codes, fmt::format("a tensor of GPTQ or AWQ, but {} names another "
                                            "quant_method",
                                            context.config.where));
}

}  // namespace nibble
