#include "checkpoint/linear_reader.h"

#include <cmath>
#include <utility>

#include "checkpoint/gguf_matrix.h"
#include "checkpoint/source_formats.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

Result<MappedLinear> map_plain(const SourceContext& context, const TensorInfo& tensor) {
  NIBBLE_RETURN_IF_ERROR(context.expect_matrix(tensor));
  MappedLinear linear;
  QuantView& weight = linear.weight;
  weight.format = {WeightCode::kBf16, ScalePer::kNone, 0, DType::kF32};
  if (tensor.dtype == DType::kF32) {
    weight.format.code = WeightCode::kF32;
  } else if (tensor.dtype == DType::kF16) {
    weight.format.code = WeightCode::kF16;
  }
  weight.n = tensor.shape[0];
  weight.k = tensor.shape[1];
  weight.codes = tensor.data.data();
  weight.name = context.reader.where(tensor);
  linear.tensors = {&tensor};
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

}  // namespace nibble
