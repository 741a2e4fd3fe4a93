#include "checkpoint/linear_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "checkpoint/gguf_matrix.h"
#include "checkpoint/source_formats.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

WeightFormat plain_format(DType type) {
  const WeightCode code = type == DType::kF32   ? WeightCode::kF32
                          : type == DType::kF16 ? WeightCode::kF16
                                                : WeightCode::kBf16;
  return {code, ScalePer::kNone, 0, DType::kF32};
}

Result<MappedLinear> map_plain(const SourceContext& context, const TensorInfo& tensor) {
  NIBBLE_RETURN_IF_ERROR(context.expect_matrix(tensor));
  MappedLinear linear;
  QuantView& weight = linear.weight;
  weight.format = plain_format(tensor.dtype);
  weight.n = tensor.shape[0];
  weight.k = tensor.shape[1];
  weight.codes = tensor.data.data();
  weight.name = context.reader.where(tensor);
  linear.tensors = {&tensor};
  return linear;
}

/// Numbers of one type, `column_stride` and `row_stride` apart, row by row.
template <typename Number>
void copy_transposed(const PlainLayout& layout, const std::byte* data, std::byte* out) {
  constexpr int64_t kSquare = 32;  // rows and columns whose lines stay in the first-level cache
  for (int64_t row = 0; row < layout.n; row += kSquare) {
    for (int64_t column = 0; column < layout.k; column += kSquare) {
      for (int64_t j = column; j < std::min(column + kSquare, layout.k); ++j) {
        for (int64_t i = row; i < std::min(row + kSquare, layout.n); ++i) {
          const int64_t from = layout.offset + i * layout.row_stride + j * layout.column_stride;
          constexpr auto kSize = static_cast<int64_t>(sizeof(Number));
          std::memcpy(out + (i * layout.k + j) * kSize, data + from * kSize, sizeof(Number));
        }
      }
    }
  }
}

Result<MappedLinear> map_part(const SourceContext& context, const PlainLayout& layout) {
  const TensorInfo& tensor = *layout.tensor;
  const int64_t size = dtype_bits(tensor.dtype) / 8;
  MappedLinear linear;
  QuantView& weight = linear.weight;
  weight.format = plain_format(tensor.dtype);
  weight.n = layout.n;
  weight.k = layout.k;
  weight.name = context.reader.where(tensor);
  linear.tensors = {&tensor};
  if (layout.column_stride == 1) {
    weight.codes = tensor.data.data() + layout.offset * size;
    weight.row_stride = layout.row_stride == layout.k ? 0 : layout.row_stride * size;
    return linear;
  }
  NIBBLE_ASSIGN_OR_RETURN(linear.codes,
                          Buffer::allocate(static_cast<size_t>(layout.n * layout.k * size)));
  if (size == 2) {
    copy_transposed<uint16_t>(layout, tensor.data.data(), linear.codes.data());
  } else {
    copy_transposed<float>(layout, tensor.data.data(), linear.codes.data());
  }
  weight.codes = linear.codes.data();
  return linear;
}

// The one scale of a module's activations.
Result<float> read_input_scale(const SourceContext& context,
                               const TensorInfo& codes,
                               const std::string& module) {
  const TensorInfo* tensor = nullptr;
  for (const std::string_view suffix : {"input_scale", "activation_scale"}) {
    tensor = tensor == nullptr ? context.find(module, suffix) : tensor;
  }
  if (tensor == nullptr) {
    return context.corrupt(codes,
                           fmt::format("{}.input_scale is missing, the scale that {} announces "
                                       "for the activations. It was cut from the checkpoint, or "
                                       "the config belongs to another",
                                       module, context.config.where));
  }
  if (!is_plain(tensor->dtype) || tensor->elements() != 1) {
    return context.corrupt(
        *tensor, fmt::format("expected one F32, F16 or BF16, got {} {}", dtype_name(tensor->dtype),
                             shape_text(tensor->shape)));
  }
  float scale = 0;
  decode_plain(tensor->dtype, tensor->data.data(), 1, &scale);
  if (!std::isfinite(scale) || scale <= 0) {
    return context.corrupt(*tensor, fmt::format("the scale of activations is {}", scale));
  }
  return scale;
}

// Whether a tensor "X.weight" can only be meant as numbers of a type that is none of weights.
bool is_no_code(const SourceContext& context, const TensorInfo& tensor, const std::string& module) {
  const bool codes = tensor.dtype == DType::kI8 || tensor.dtype == DType::kU8 ||
                     tensor.dtype == DType::kI32 || tensor.dtype == DType::kF8E4M3;
  const bool scales = context.find(module, "weight_scale") != nullptr ||
                      context.find(module, "weight_scale_inv") != nullptr;
  return split_name(tensor.name).suffix == "weight" &&
         (!codes || (context.config.dialect == Dialect::kNone && !scales));
}

Status read_activations(const SourceContext& context,
                        const TensorInfo& codes,
                        const std::string& module,
                        MappedLinear& linear) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, context.group_for(codes, module));
  const StoredActivations& stored = group->activations;
  if (!stored.unknown.empty()) {
    return make_error(StatusCode::kUnsupported,
                      "{}: no product computes {}; quantize the checkpoint again: nibble quantize "
                      "SRC DST --scheme NAME",
                      stored.where.empty() ? group->where : stored.where, stored.unknown);
  }
  linear.act.format = stored.format;
  linear.dropped = stored.dropped;
  if (stored.scale == StoredActivations::Scale::kStatic) {
    NIBBLE_ASSIGN_OR_RETURN(linear.act.static_scale, read_input_scale(context, codes, module));
  }
  return {};
}

}  // namespace

Result<MappedLinear> map_linear_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        const std::string& module,
                                        const RunsFormat& runs) {
  const SourceContext context{reader, config};
  const TensorInfo* codes = nullptr;
  for (const std::string_view suffix : {"weight_packed", "qweight", "weight"}) {
    codes = codes == nullptr ? context.find(module, suffix) : codes;
  }
  if (codes == nullptr) {
    return reader.require(module + ".weight").status();
  }
  if (lies_as_in_gguf(*codes)) {
    return map_gguf(reader, *codes, runs);
  }
  if (is_plain(codes->dtype)) {
    NIBBLE_RETURN_IF_ERROR(check_plain_alone(context, *codes, module));
    return map_plain(context, *codes);
  }
  if (is_no_code(context, *codes, module)) {
    return context.unsupported(*codes, fmt::format("weights of type {} without scales; expected "
                                                   "BF16, F16 or F32",
                                                   dtype_name(codes->dtype)));
  }
  NIBBLE_ASSIGN_OR_RETURN(const CodedFacts facts, stored_facts(context, *codes, module));
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear linear, map_coded(reader, facts));
  NIBBLE_RETURN_IF_ERROR(read_activations(context, *codes, module, linear));
  return linear;
}

Result<MappedLinear> map_expert_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        const std::string& module,
                                        const ExpertOwner& owner) {
  const SourceContext context{reader, config};
  NIBBLE_ASSIGN_OR_RETURN(const std::optional<ExpertPlace> place,
                          find_fused_expert(context, module, {owner.family, owner.hidden_size}));
  if (!place) {
    return map_linear_weights(reader, config, module, owner.runs);
  }
  if (place->plain) {
    return map_part(context, *place->plain);
  }
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear linear, map_coded(reader, *place->coded));
  NIBBLE_RETURN_IF_ERROR(read_activations(context, *place->coded->codes.tensor, module, linear));
  return linear;
}

}  // namespace nibble
