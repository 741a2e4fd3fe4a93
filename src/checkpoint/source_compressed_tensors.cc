#include <array>
#include <utility>

#include "checkpoint/source_formats.h"

namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

std::string scheme_text(std::string_view codes, const QuantGroup& group) {
  const std::string_view zeros = group.symmetric ? "" : ", zero points";
  switch (group.strategy) {
    case Strategy::kTensor:
      return fmt::format("{} per tensor{}", codes, zeros);
    case Strategy::kChannel:
      return fmt::format("{} per channel{}", codes, zeros);
    case Strategy::kGroup:
      return fmt::format("{} g{}{}", codes, group.group_size, zeros);
    case Strategy::kBlock:
      return fmt::format("{} blocks of {}x{}{}", codes, group.block_rows, group.block_columns,
                         zeros);
  }
  return {};
}

// Scales of activations belong to the stored form, but say nothing about weights.
void use_activations(const SourceContext& context, CodedFacts& facts) {
  for (const std::string_view suffix :
       {"input_scale", "activation_scale", "input_zero_point", "input_global_scale"}) {
    if (const TensorInfo* tensor = context.find(facts.module, suffix)) {
      facts.unused.push_back(tensor);
    }
  }
}

// facts.k is what the words can hold; the scales or weight_shape know how much of it is meant.
Status use_shape(const SourceContext& context,
                 const TensorInfo& codes,
                 const QuantGroup& group,
                 const TensorInfo& scale,
                 CodedFacts& facts) {
  facts.shape = context.find(facts.module, "weight_shape");
  if (facts.shape != nullptr && facts.shape->elements() == 0) {
    facts.unused.push_back(facts.shape);  // under tensor parallelism it may be empty
    facts.shape = nullptr;
  }
  const int64_t per_word = 32 / group.bits;
  const int64_t most = facts.k;
  if (group.strategy == Strategy::kGroup && scale.shape.size() == 2 && scale.shape[1] > 1) {
    if (__builtin_mul_overflow(scale.shape[1], group.group_size, &facts.k)) {
      return context.corrupt(scale, fmt::format("shape {} overflows", shape_text(scale.shape)));
    }
  } else if (facts.shape != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const auto shape, read_shape_tensor(context.reader, *facts.shape));
    facts.k = shape.second;
  }
  if (facts.k <= most - per_word || facts.k > most) {
    return context.corrupt(
        codes, fmt::format(
                   "shape {} holds {} to {} input channels, but {} describes {}",
                   shape_text(codes.shape), most - per_word + 1, most,
                   group.strategy == Strategy::kGroup ? scale.name : facts.module + ".weight_shape",
                   facts.k));
  }
  return {};
}

Status use_zero_points(const SourceContext& context, const QuantGroup& group, CodedFacts& facts) {
  const TensorInfo* zeros = context.find(facts.module, "weight_zero_point");
  if (group.symmetric) {
    return zeros == nullptr
               ? Status()
               : context.corrupt(*zeros, fmt::format("zero points of weights that {} calls "
                                                     "symmetric",
                                                     group.where));
  }
  if (zeros == nullptr) {
    return context.corrupt(*facts.codes.tensor,
                           fmt::format("{}.weight_zero_point is missing, but {} says symmetric: "
                                       "false",
                                       facts.module, group.where));
  }
  facts.zero.tensor = zeros;
  facts.zero.bits = static_cast<int>(group.bits);
  const bool one = facts.scale.row_stride == 0;  // per tensor
  const int64_t rows = one ? 1 : facts.n;
  const int64_t per_word = 32 / group.bits;
  const int64_t words = (rows + per_word - 1) / per_word;
  if (zeros->dtype == DType::kI8 && (zeros->shape == std::vector{rows, facts.groups()} ||
                                     zeros->shape == facts.scale.tensor->shape)) {
    facts.zero.form = one ? ZeroLayout::Form::kOneByte : ZeroLayout::Form::kBytes;
    return {};
  }
  if (!one && zeros->dtype == DType::kI32 && zeros->shape == std::vector{words, facts.groups()}) {
    facts.zero.form = ZeroLayout::Form::kAlongN;
    return {};
  }
  return context.corrupt(
      *zeros, fmt::format("zero points {} {}; expected I32 {} (packed along the rows) or I8 {}. "
                          "Files with zero points in the order of AWQ are not read",
                          dtype_name(zeros->dtype), shape_text(zeros->shape),
                          shape_text(std::vector{words, facts.groups()}),
                          shape_text(std::vector{rows, facts.groups()})));
}

Status use_group_index(const SourceContext& context, CodedFacts& facts) {
  facts.group_index = context.find(facts.module, "weight_g_idx");
  return facts.group_index == nullptr ? Status()
                                      : context.expect(*facts.group_index, DType::kI32, {facts.k});
}

Status use_group_scales(const SourceContext& context,
                        const TensorInfo& codes,
                        const QuantGroup& group,
                        const TensorInfo& scale,
                        CodedFacts& facts) {
  switch (group.strategy) {
    case Strategy::kTensor:
      return use_scales(context, scale, ScaleGrid::kTensor, ScaleTypes::kFloats, facts);
    case Strategy::kChannel:
      return use_scales(context, scale,
                        scale.elements() == 1 ? ScaleGrid::kTensor : ScaleGrid::kChannel,
                        ScaleTypes::kFloats, facts);
    case Strategy::kGroup:
      NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group.group_size, facts));
      return use_scales(context, scale, ScaleGrid::kGroup, ScaleTypes::kFloats, facts);
    case Strategy::kBlock:
      return use_block_scales(context, scale, group.block_rows, group.block_columns, facts);
  }
  return {};
}

Result<CodedFacts> packed_integers(const SourceContext& context,
                                   const TensorInfo& codes,
                                   const QuantGroup& group,
                                   CodedFacts facts) {
  if (group.number != Number::kInt) {
    return context.corrupt(codes, fmt::format("I32 words, but {} says type float", group.where));
  }
  const CodeForm form = group.bits == 4 ? CodeForm::kNibbles : CodeForm::kInt8Offset;
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, form, 32 / group.bits, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  NIBBLE_RETURN_IF_ERROR(use_shape(context, codes, group, *scale, facts));
  NIBBLE_RETURN_IF_ERROR(use_group_scales(context, codes, group, *scale, facts));
  NIBBLE_RETURN_IF_ERROR(use_zero_points(context, group, facts));
  NIBBLE_RETURN_IF_ERROR(use_group_index(context, facts));
  facts.format = scheme_text(group.bits == 4 ? "int4" : "int8 packed", group);
  return facts;
}

// U8 pairs of E2M1: with a global scale NVFP4, else MXFP4.
Result<CodedFacts> packed_floats(const SourceContext& context,
                                 const TensorInfo& codes,
                                 const QuantGroup& group,
                                 CodedFacts facts) {
  const TensorInfo* global = context.find(facts.module, "weight_global_scale");
  const int64_t group_size = global == nullptr ? 32 : 16;
  if (group.number != Number::kFloat || group.bits != 4 || group.group_size != group_size) {
    return context.corrupt(
        codes, fmt::format("U8 codes {} weight_global_scale need 4-bit floats in groups of {}, but "
                           "{} says otherwise",
                           global == nullptr ? "without" : "with", group_size, group.where));
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kE2M1, 2, facts));
  NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group_size, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  NIBBLE_RETURN_IF_ERROR(use_scales(context, *scale, ScaleGrid::kGroup,
                                    global == nullptr ? ScaleTypes::kE8M0 : ScaleTypes::kE4M3,
                                    facts));
  if (global != nullptr) {
    NIBBLE_RETURN_IF_ERROR(use_outer_scale(context, *global, facts));
    facts.divide_by_outer = true;
  }
  facts.format = global == nullptr ? "MXFP4" : "NVFP4";
  return facts;
}

Result<CodedFacts> byte_integers(const SourceContext& context,
                                 const TensorInfo& codes,
                                 const QuantGroup& group,
                                 CodedFacts facts) {
  if (group.number != Number::kInt) {
    return context.corrupt(codes, fmt::format("I8 codes, but {} says type float", group.where));
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kInt8, 1, facts));
  facts.codes.four_bits = group.bits == 4;
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale,
                          context.require(codes, facts.module, "weight_scale"));
  NIBBLE_RETURN_IF_ERROR(use_group_scales(context, codes, group, *scale, facts));
  NIBBLE_RETURN_IF_ERROR(use_zero_points(context, group, facts));
  NIBBLE_RETURN_IF_ERROR(use_group_index(context, facts));
  facts.format = scheme_text(group.bits == 4 ? "int4 in bytes" : "int8", group);
  return facts;
}

// The two names for scales of FP8; both at once contradict each other.
Result<const TensorInfo*> fp8_scale(const SourceContext& context,
                                    const TensorInfo& codes,
                                    const std::string& module) {
  const TensorInfo* plain = context.find(module, "weight_scale");
  const TensorInfo* inverse = context.find(module, "weight_scale_inv");
  if (plain != nullptr && inverse != nullptr) {
    return context.corrupt(
        *inverse, fmt::format("there is also {}; only one of them can be meant", plain->name));
  }
  if (inverse != nullptr) {
    return inverse;
  }
  return context.require(codes, module, "weight_scale");
}

}  // namespace

Result<CodedFacts> fp8_facts(const SourceContext& context,
                             const TensorInfo& codes,
                             const std::string& module,
                             const QuantGroup& group) {
  CodedFacts facts;
  facts.module = module;
  if (group.number != Number::kFloat || group.bits != 8) {
    return context.corrupt(
        codes, fmt::format("F8_E4M3 codes, but {} says {}-bit {}", group.where, group.bits,
                           group.number == Number::kFloat ? "float" : "int"));
  }
  NIBBLE_RETURN_IF_ERROR(use_rows(context, codes, CodeForm::kE4M3, 1, facts));
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* scale, fp8_scale(context, codes, module));
  QuantGroup actual = group;
  const bool open = context.config.dialect != Dialect::kCompressedTensors;
  if (open && group.strategy != Strategy::kBlock) {
    actual.strategy = scale->elements() == 1 ? Strategy::kTensor : Strategy::kChannel;
  }
  if (group.strategy == Strategy::kGroup && scale->dtype == DType::kU8) {
    NIBBLE_RETURN_IF_ERROR(use_groups(context, codes, group.group_size, facts));
    NIBBLE_RETURN_IF_ERROR(
        use_scales(context, *scale, ScaleGrid::kGroup, ScaleTypes::kE8M0, facts));
  } else {
    NIBBLE_RETURN_IF_ERROR(use_group_scales(context, codes, actual, *scale, facts));
  }
  use_activations(context, facts);
  facts.format = scheme_text("fp8", actual);
  return facts;
}

Result<CodedFacts> packed_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, context.group_for(codes, module));
  if (context.config.dialect != Dialect::kCompressedTensors) {
    return context.corrupt(codes, fmt::format("a tensor of compressed-tensors, but {} names "
                                              "another quant_method",
                                              context.config.where));
  }
  CodedFacts facts;
  facts.module = module;
  auto result =
      codes.dtype == DType::kI32 ? packed_integers(context, codes, *group, facts)
      : codes.dtype == DType::kU8
          ? packed_floats(context, codes, *group, facts)
          : Result<CodedFacts>(context.corrupt(
                codes, fmt::format("expected I32 or U8, got {}", dtype_name(codes.dtype))));
  if (result.ok()) {
    use_activations(context, *result);
  }
  return result;
}

Result<CodedFacts> weight_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, context.group_for(codes, module));
  const Dialect method = context.config.dialect;
  if (method == Dialect::kQuark) {
    return quark_facts(context, codes, module, *group);
  }
  if (codes.dtype == DType::kF8E4M3) {
    return fp8_facts(context, codes, module, *group);
  }
  if (codes.dtype == DType::kU8 && method == Dialect::kModelOpt) {
    return quark_facts(context, codes, module, *group);
  }
  if (codes.dtype == DType::kI8 && method == Dialect::kCompressedTensors) {
    CodedFacts facts;
    facts.module = module;
    auto result = byte_integers(context, codes, *group, std::move(facts));
    if (result.ok()) {
      use_activations(context, *result);
    }
    return result;
  }
  return context.corrupt(codes, fmt::format("codes of type {} have no meaning in the format that "
                                            "{} names",
                                            dtype_name(codes.dtype), context.config.where));
}

}  // namespace nibble
