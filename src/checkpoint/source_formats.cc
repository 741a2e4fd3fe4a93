#include "checkpoint/source_formats.h"

#include <algorithm>

namespace nibble {
namespace {

bool has_type(DType dtype, ScaleTypes types) {
  switch (types) {
    case ScaleTypes::kFloats:
      return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
    case ScaleTypes::kE4M3:
      return dtype == DType::kF8E4M3;
    case ScaleTypes::kE8M0:
      return dtype == DType::kU8 || dtype == DType::kF8E8M0;
  }
  return false;
}

std::string_view type_names(ScaleTypes types) {
  return types == ScaleTypes::kFloats ? "F32, F16 or BF16"
         : types == ScaleTypes::kE4M3 ? "F8_E4M3"
                                      : "U8 or F8_E8M0";
}

Status check_type(const SourceContext& context, const TensorInfo& scale, ScaleTypes types) {
  return has_type(scale.dtype, types)
             ? Status()
             : context.corrupt(scale, fmt::format("scales of type {}; expected {}",
                                                  dtype_name(scale.dtype), type_names(types)));
}

Status wrong_shape(const SourceContext& context,
                   const TensorInfo& scale,
                   std::span<const int64_t> expected,
                   const CodedFacts& facts) {
  return context.corrupt(
      scale, fmt::format("expected shape {} for weights [{}, {}], got {}; its group or block size "
                         "in {} may be wrong",
                         shape_text(expected), facts.n, facts.k, shape_text(scale.shape),
                         context.config.where));
}

// None of these may stand beside the tensor.
Status check_alone(const SourceContext& context,
                   const TensorInfo& tensor,
                   const std::string& module,
                   std::initializer_list<std::string_view> suffixes) {
  for (const std::string_view suffix : suffixes) {
    if (const TensorInfo* other = context.find(module, suffix)) {
      return context.corrupt(tensor, fmt::format("there is also {}; the weights of {} are "
                                                 "described twice",
                                                 other->name, module));
    }
  }
  return {};
}

}  // namespace

SplitName split_name(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? SplitName{{}, name}
                                       : SplitName{name.substr(0, dot), name.substr(dot + 1)};
}

const TensorInfo* SourceContext::find(std::string_view module, std::string_view suffix) const {
  return reader.find(fmt::format("{}.{}", module, suffix));
}

Result<const TensorInfo*> SourceContext::require(const TensorInfo& codes,
                                                 std::string_view module,
                                                 std::string_view suffix) const {
  const TensorInfo* tensor = find(module, suffix);
  if (tensor == nullptr) {
    return corrupt(codes, fmt::format("{}.{} is missing; without it the codes mean nothing. It was "
                                      "cut from the checkpoint, or {} describes another format",
                                      module, suffix, config.where));
  }
  return tensor;
}

Result<const QuantGroup*> SourceContext::group_for(const TensorInfo& codes,
                                                   std::string_view module) const {
  if (config.dialect == Dialect::kNone) {
    return corrupt(codes,
                   "stored quantized, but config.json has no quantization_config that says how; "
                   "add the config.json that belongs to the checkpoint");
  }
  const QuantGroup* group = config.group_for(module);
  if (group == nullptr) {
    return corrupt(codes, fmt::format("stored quantized, but no group of {} targets {}",
                                      config.where, module));
  }
  return group;
}

Status SourceContext::corrupt(const TensorInfo& tensor, const std::string& what) const {
  return make_error(StatusCode::kCorrupt, "{}: {}", reader.where(tensor), what);
}

Status SourceContext::unsupported(const TensorInfo& tensor, const std::string& what) const {
  return make_error(StatusCode::kUnsupported, "{}: {}", reader.where(tensor), what);
}

Status SourceContext::expect(const TensorInfo& tensor,
                             DType dtype,
                             const std::vector<int64_t>& shape) const {
  return tensor.dtype == dtype && tensor.shape == shape
             ? Status()
             : corrupt(tensor, fmt::format("expected {} {}, got {} {}", dtype_name(dtype),
                                           shape_text(shape), dtype_name(tensor.dtype),
                                           shape_text(tensor.shape)));
}

Status SourceContext::expect_matrix(const TensorInfo& tensor) const {
  return tensor.shape.size() == 2 && tensor.shape[0] > 0 && tensor.shape[1] > 0
             ? Status()
             : corrupt(tensor,
                       fmt::format("expected a matrix, got shape {}", shape_text(tensor.shape)));
}

Status use_scales(const SourceContext& context,
                  const TensorInfo& scale,
                  ScaleGrid grid,
                  ScaleTypes types,
                  CodedFacts& facts) {
  NIBBLE_RETURN_IF_ERROR(check_type(context, scale, types));
  ScaleLayout& layout = facts.scale;
  layout.tensor = &scale;
  if (grid == ScaleGrid::kTensor || grid == ScaleGrid::kChannel) {
    facts.group_size = facts.k;
  }
  const int64_t groups = facts.groups();
  std::vector<int64_t> expected = {facts.n, groups};
  bool fits = scale.shape == expected;
  layout.row_stride = groups;
  layout.group_stride = 1;
  switch (grid) {
    case ScaleGrid::kTensor:
      expected = {1};
      fits = scale.elements() == 1 && scale.shape.size() <= 2;
      layout.row_stride = 0;
      break;
    case ScaleGrid::kChannel:
      fits = fits || scale.shape == std::vector{facts.n};
      break;
    case ScaleGrid::kGroup:
      break;
    case ScaleGrid::kColumns:
      expected = {groups, facts.n};
      fits = scale.shape == expected;
      layout.row_stride = 1;
      layout.group_stride = facts.n;
      break;
  }
  return fits ? Status() : wrong_shape(context, scale, expected, facts);
}

Status use_block_scales(const SourceContext& context,
                        const TensorInfo& scale,
                        int64_t block_rows,
                        int64_t block_columns,
                        CodedFacts& facts) {
  NIBBLE_RETURN_IF_ERROR(check_type(context, scale, ScaleTypes::kFloats));
  facts.group_size = std::min(block_columns, facts.k);
  block_rows = std::min(block_rows, facts.n);
  const int64_t rows = (facts.n + block_rows - 1) / block_rows;
  const std::vector<int64_t> expected = {rows, facts.groups()};
  facts.scale = {.tensor = &scale,
                 .row_stride = facts.groups(),
                 .group_stride = 1,
                 .rows_per_scale = block_rows};
  return scale.shape == expected ? Status() : wrong_shape(context, scale, expected, facts);
}

Status use_outer_scale(const SourceContext& context, const TensorInfo& scale, CodedFacts& facts) {
  NIBBLE_RETURN_IF_ERROR(check_type(context, scale, ScaleTypes::kFloats));
  facts.outer = {.tensor = &scale};
  return scale.elements() == 1 && scale.shape.size() <= 2
             ? Status()
             : context.corrupt(scale, fmt::format("expected one number, got shape {}",
                                                  shape_text(scale.shape)));
}

Status use_groups(const SourceContext& context,
                  const TensorInfo& codes,
                  int64_t group_size,
                  CodedFacts& facts) {
  facts.grouped = group_size != -1;
  facts.group_size = group_size == -1 ? facts.k : std::min(group_size, facts.k);
  return facts.k % facts.group_size == 0
             ? Status()
             : context.corrupt(codes, fmt::format("{} input channels are no multiple of the group "
                                                  "size {} in {}",
                                                  facts.k, group_size, context.config.where));
}

Status use_rows(const SourceContext& context,
                const TensorInfo& codes,
                CodeForm form,
                int64_t per_element,
                CodedFacts& facts) {
  NIBBLE_RETURN_IF_ERROR(context.expect_matrix(codes));
  facts.n = codes.shape[0];
  if (__builtin_mul_overflow(codes.shape[1], per_element, &facts.k)) {
    return context.corrupt(codes, fmt::format("shape {} overflows", shape_text(codes.shape)));
  }
  facts.codes.tensor = &codes;
  facts.codes.form = form;
  facts.codes.row_bytes = codes.shape[1] * dtype_bits(codes.dtype) / 8;
  return {};
}

Result<CodedFacts> stored_facts(const SourceContext& context,
                                const TensorInfo& codes,
                                const std::string& module) {
  const std::string_view suffix = split_name(codes.name).suffix;
  if (suffix == "weight_packed") {
    NIBBLE_RETURN_IF_ERROR(check_alone(context, codes, module, {"weight", "qweight"}));
    return packed_facts(context, codes, module);
  }
  if (suffix == "qweight") {
    NIBBLE_RETURN_IF_ERROR(check_alone(context, codes, module, {"weight"}));
    return word_facts(context, codes, module);
  }
  return weight_facts(context, codes, module);
}

Status check_plain_alone(const SourceContext& context,
                         const TensorInfo& tensor,
                         const std::string& module) {
  return check_alone(context, tensor, module,
                     {"weight_scale", "weight_scale_inv", "weight_scale_2"});
}

}  // namespace nibble
