#include "checkpoint/linear_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "checkpoint/finite.h"
#include "checkpoint/linear_repack.h"

namespace nibble {
namespace {

// What the reading functions share.
struct Source {
  const CheckpointReader& reader;
  const QuantConfig& config;
  std::string module;

  [[nodiscard]] const TensorInfo* find(std::string_view suffix) const {
    return reader.find(fmt::format("{}.{}", module, suffix));
  }
};

Status corrupt(const Source& source, const TensorInfo& tensor, const std::string& what) {
  return make_error(StatusCode::kCorrupt, "{}: {}", source.reader.where(tensor), what);
}

Status check_matrix(const Source& source, const TensorInfo& tensor) {
  if (tensor.shape.size() != 2 || tensor.shape[0] <= 0 || tensor.shape[1] <= 0) {
    return corrupt(source, tensor,
                   fmt::format("expected a matrix, got shape {}", shape_text(tensor.shape)));
  }
  return {};
}

// Refuses tensors that would change the meaning of the codes.
Status refuse_extras(const Source& source) {
  for (const std::string_view suffix :
       {"weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale",
        "input_zero_point", "qweight", "weight_scale_inv", "weight_scale_2"}) {
    if (const TensorInfo* tensor = source.find(suffix)) {
      return make_error(
          StatusCode::kUnsupported,
          "{}: this kind of quantization cannot be run; quantize the checkpoint again: "
          "nibble quantize SRC DST --scheme NAME",
          source.reader.where(*tensor));
    }
  }
  return {};
}

Result<const QuantGroup*> require_group(const Source& source, const TensorInfo& tensor) {
  const QuantGroup* group = source.config.group_for(source.module);
  if (group == nullptr) {
    return make_error(StatusCode::kCorrupt,
                      "{}: stored quantized, but no group of quantization_config in config.json "
                      "targets it",
                      source.reader.where(tensor));
  }
  return group;
}

Result<DType> scale_type(const Source& source, const TensorInfo& scale) {
  if (scale.dtype != DType::kF32 && scale.dtype != DType::kBF16 && scale.dtype != DType::kF16) {
    return corrupt(
        source, scale,
        fmt::format("scales of type {}; expected F32, BF16 or F16", dtype_name(scale.dtype)));
  }
  // An F16 scale is exact in F32.
  return scale.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

// Points `weight` to its scales: [n, groups], [n] (channel) or one number (tensor).
Status map_scales(const Source& source, const TensorInfo& scale, QuantView& weight) {
  const int64_t groups = weight.format.groups(weight.k);
  const bool channel = weight.format.scale_per == ScalePer::kChannel;
  const std::vector<int64_t> full = {weight.n, groups};
  const bool fits = scale.shape == full || (channel && scale.shape == std::vector{weight.n});
  const bool single = channel && scale.elements() == 1 && scale.shape.size() <= 2;
  if (!fits && !single) {
    return corrupt(source, scale,
                   fmt::format("expected scales {}, got {}; group_size in config.json may be wrong",
                               shape_text(full), shape_text(scale.shape)));
  }
  weight.scales = scale.data.data();
  weight.scale_type = scale.dtype;
  weight.scale_count = single ? QuantView::Scales::kOneForAll : QuantView::Scales::kEach;
  if (all_finite(scale.dtype, scale.data)) {
    return {};
  }
  int64_t index = 0;
  while (std::isfinite(weight.scale(index))) {
    ++index;
  }
  return corrupt(source, scale,
                 fmt::format("scale {} is {}; the quantizer that wrote it divided by zero", index,
                             weight.scale(index)));
}

// Codes and scales of a module whose group is known, for codes that need no other form. `shape`:
// the logical one, [n, k].
Result<MappedLinear> map_quantized(const Source& source,
                                   const TensorInfo& codes,
                                   const QuantGroup& group,
                                   std::pair<int64_t, int64_t> shape) {
  const TensorInfo* scale = source.find("weight_scale");
  if (scale == nullptr) {
    return make_error(StatusCode::kNotFound, "{}: its scales {}.weight_scale are missing",
                      source.reader.where(codes), source.module);
  }
  MappedLinear linear;
  linear.act = group.act;
  QuantView& weight = linear.weight;
  weight.format = group.weight;
  NIBBLE_ASSIGN_OR_RETURN(weight.format.scale_dtype, scale_type(source, *scale));
  weight.n = shape.first;
  weight.k = shape.second;
  weight.codes = codes.data.data();
  weight.name = source.reader.where(codes);
  if (weight.format.scale_per == ScalePer::kGroup && weight.k % weight.format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{}: {} input channels are not a multiple of the group size {}", weight.name,
                      weight.k, weight.format.group_size);
  }
  NIBBLE_RETURN_IF_ERROR(map_scales(source, *scale, weight));
  return linear;
}

// [n, k] from weight_shape when it is there (two I32 or I64), else from the packed words.
Result<int64_t> packed_k(const Source& source, const TensorInfo& packed, int64_t per_word) {
  const int64_t words = packed.shape[1];
  const TensorInfo* shape = source.find("weight_shape");
  if (shape == nullptr || shape->elements() == 0) {
    return words * per_word;
  }
  const bool wide = shape->dtype == DType::kI64;
  if ((!wide && shape->dtype != DType::kI32) || shape->elements() != 2) {
    return corrupt(source, *shape,
                   fmt::format("expected two I32 or I64, got {} {}", dtype_name(shape->dtype),
                               shape_text(shape->shape)));
  }
  int64_t values[2] = {};
  for (size_t i = 0; i < 2; ++i) {
    int32_t narrow = 0;
    std::memcpy(&narrow, shape->data.data() + i * 4, 4);
    values[i] = narrow;
    if (wide) {
      std::memcpy(&values[i], shape->data.data() + i * 8, 8);
    }
  }
  if (values[0] != packed.shape[0] || values[1] <= (words - 1) * per_word ||
      values[1] > words * per_word) {
    return corrupt(source, *shape,
                   fmt::format("says [{}, {}], which contradicts weight_packed {}", values[0],
                               values[1], shape_text(packed.shape)));
  }
  return values[1];
}

// 8-bit codes that the file stores as code + 128, in rows of whole words.
Status unpack_bytes(const TensorInfo& packed, MappedLinear& linear) {
  QuantView& weight = linear.weight;
  NIBBLE_ASSIGN_OR_RETURN(linear.repacked,
                          Buffer::allocate(static_cast<size_t>(weight.n * weight.k)));
  for (int64_t row = 0; row < weight.n; ++row) {
    const std::byte* in = packed.data.data() + row * packed.shape[1] * 4;
    std::transform(in, in + weight.k, linear.repacked.data() + row * weight.k,
                   [](std::byte code) { return code ^ kInt8WordOffset; });
  }
  weight.codes = linear.repacked.data();
  return {};
}

Result<MappedLinear> map_packed(const Source& source, const TensorInfo& packed) {
  NIBBLE_RETURN_IF_ERROR(check_matrix(source, packed));
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, require_group(source, packed));
  if (source.config.source.method != SourceMethod::kNone) {
    return corrupt(source, packed,
                   fmt::format("a tensor of compressed-tensors, but {} names another quant_method",
                               source.config.source.where));
  }
  const WeightCode code = group->weight.code;
  if (packed.dtype != DType::kI32 || (code != WeightCode::kInt4 && code != WeightCode::kInt8)) {
    return make_error(
        StatusCode::kUnsupported,
        "{}: packed {} codes whose group in config.json is not 4-bit or 8-bit integer",
        source.reader.where(packed), dtype_name(packed.dtype));
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t k,
                          packed_k(source, packed, code == WeightCode::kInt4 ? 8 : 4));
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear linear,
                          map_quantized(source, packed, *group, {packed.shape[0], k}));
  if (code == WeightCode::kInt8) {
    NIBBLE_RETURN_IF_ERROR(unpack_bytes(packed, linear));
  }
  return linear;
}

// 4-bit codes that the file stores one per byte.
Status pack_bytes(const Source& source, const TensorInfo& codes, MappedLinear& linear) {
  QuantView& weight = linear.weight;
  NIBBLE_ASSIGN_OR_RETURN(linear.repacked,
                          Buffer::allocate(static_cast<size_t>(weight.n * weight.row_bytes())));
  std::memset(linear.repacked.data(), 0, linear.repacked.size());
  for (int64_t row = 0; row < weight.n; ++row) {
    const std::byte* in = codes.data.data() + row * weight.k;
    std::byte* out = linear.repacked.data() + row * weight.row_bytes();
    for (int64_t i = 0; i < weight.k; ++i) {
      const auto value = std::to_integer<uint8_t>(in[i]);
      const int code = static_cast<int8_t>(value);
      if (code < -8 || code > 7) {
        return corrupt(source, codes,
                       fmt::format("code {} at [{}, {}] is no 4-bit number", code, row, i));
      }
      out[i / 2] |= static_cast<std::byte>((code + 8) << (i % 2 * 4));
    }
  }
  weight.codes = linear.repacked.data();
  return {};
}

Result<MappedLinear> map_bytes(const Source& source, const TensorInfo& codes) {
  NIBBLE_RETURN_IF_ERROR(check_matrix(source, codes));
  NIBBLE_ASSIGN_OR_RETURN(const QuantGroup* group, require_group(source, codes));
  const bool fp8 = codes.dtype == DType::kF8E4M3;
  if (fp8 != (group->weight.code == WeightCode::kFp8E4M3)) {
    return corrupt(source, codes,
                   fmt::format("{} codes contradict num_bits or type of its group in "
                               "config.json",
                               dtype_name(codes.dtype)));
  }
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear linear,
                          map_quantized(source, codes, *group, {codes.shape[0], codes.shape[1]}));
  if (group->weight.code == WeightCode::kInt4) {
    NIBBLE_RETURN_IF_ERROR(pack_bytes(source, codes, linear));
  }
  return linear;
}

Result<MappedLinear> map_plain(const Source& source, const TensorInfo& tensor) {
  NIBBLE_RETURN_IF_ERROR(check_matrix(source, tensor));
  MappedLinear linear;
  QuantView& weight = linear.weight;
  weight.format = {WeightCode::kBf16, ScalePer::kNone, 0, DType::kF32};
  if (tensor.dtype == DType::kF32) {
    weight.format.code = WeightCode::kF32;
  } else if (tensor.dtype == DType::kF16) {
    weight.format.code = WeightCode::kF16;
  } else if (tensor.dtype != DType::kBF16) {
    return make_error(StatusCode::kUnsupported,
                      "{}: weights of type {} without scales; expected BF16, F16 or F32",
                      source.reader.where(tensor), dtype_name(tensor.dtype));
  }
  weight.n = tensor.shape[0];
  weight.k = tensor.shape[1];
  weight.codes = tensor.data.data();
  weight.name = source.reader.where(tensor);
  return linear;
}

}  // namespace

Result<MappedLinear> map_linear_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        std::string_view module) {
  const Source source{reader, config, std::string(module)};
  if (is_repacked(reader, config, source.module)) {
    return map_repacked(reader, config, source.module);
  }
  NIBBLE_RETURN_IF_ERROR(refuse_extras(source));
  if (const TensorInfo* packed = source.find("weight_packed")) {
    return map_packed(source, *packed);
  }
  NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* weight,
                          reader.require(fmt::format("{}.weight", module)));
  if (weight->dtype == DType::kI8 || weight->dtype == DType::kF8E4M3) {
    return map_bytes(source, *weight);
  }
  return map_plain(source, *weight);
}

}  // namespace nibble
