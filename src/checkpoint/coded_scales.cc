#include "checkpoint/coded_scales.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "base/f16.h"
#include "checkpoint/source_plain.h"
#include "quant/codec.h"

namespace nibble {
namespace {

// Index of the first number that is NaN or infinite, or the number of them.
size_t first_not_finite(std::span<const float> values) {
  uint32_t found = 0;
  for (const float value : values) {
    found |= (std::bit_cast<uint32_t>(value) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  }
  if (found == 0) {
    return values.size();
  }
  return static_cast<size_t>(std::find_if(values.begin(), values.end(),
                                          [](float value) { return !std::isfinite(value); }) -
                             values.begin());
}

uint32_t load_word(const TensorInfo& tensor, int64_t index) {
  uint32_t word = 0;
  std::memcpy(&word, tensor.data.data() + index * 4, 4);
  return word;
}

// Element `slot` of a word, as an unsigned code: offset binary.
int nibble_of(uint32_t word, NibbleForm form, int64_t slot) {
  const int64_t place = form.reordered ? (slot % 2) * 4 + slot / 2 : slot;
  const auto code = static_cast<int>((word >> (4 * place)) & 15U);
  return form.signed_code ? code ^ 8 : code;
}

}  // namespace

float ScaleLayout::at(int64_t index) const {
  const std::byte* data = tensor->data.data();
  uint16_t half = 0;
  float single = 0;
  switch (tensor->dtype) {
    case DType::kF32:
      std::memcpy(&single, data + index * 4, 4);
      return single;
    case DType::kBF16:
      std::memcpy(&half, data + index * 2, 2);
      return bf16_to_f32(half);
    case DType::kF16:
      std::memcpy(&half, data + index * 2, 2);
      return f16_to_f32(half);
    case DType::kF8E4M3:
      return decode_e4m3(std::to_integer<uint8_t>(data[index]));
    default:  // U8 and F8_E8M0
      return decode_e8m0(std::to_integer<uint8_t>(data[index]));
  }
}

int ZeroLayout::at(int64_t row, int64_t group, int64_t groups, int64_t n) const {
  if (form == Form::kBytes) {
    return static_cast<int8_t>(
        std::to_integer<uint8_t>(tensor->data[static_cast<size_t>(row * groups + group)]));
  }
  if (form == Form::kOneByte) {
    return static_cast<int8_t>(std::to_integer<uint8_t>(tensor->data.front()));
  }
  if (form == Form::kAlongN) {
    const int64_t per_word = 32 / bits;
    const uint32_t word = load_word(*tensor, row / per_word * groups + group);
    const auto code = static_cast<int>((word >> (row % per_word * bits)) & ((1U << bits) - 1));
    return code - (1 << (bits - 1));
  }
  const uint32_t word = load_word(*tensor, group * (n / 8) + row / 8);
  const int code = nibble_of(word, nibbles, row % 8);
  if (is_fixed) {
    return code == 8 || (add == 1 && code == 7) ? 0 : code - 8;
  }
  return ((code + add) & 15) - 8;
}

ScalesOfRow CodedScales::one_row() const {
  const auto groups = static_cast<size_t>(facts_.groups());
  return {std::vector<float>(groups), std::vector<float>(has_zeros() ? groups : 0)};
}

Status CodedScales::corrupt(const TensorInfo& tensor, const std::string& what) const {
  return make_error(StatusCode::kCorrupt, "{}: {}", reader_.where(tensor), what);
}

Status CodedScales::check_shape() const {
  if (facts_.shape == nullptr) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto shape, read_shape_tensor(reader_, *facts_.shape));
  if (shape != std::pair(facts_.n, facts_.k)) {
    return corrupt(*facts_.shape,
                   fmt::format("says [{}, {}], which contradicts {} of shape [{}, "
                               "{}] that codes and scales describe",
                               shape.first, shape.second, facts_.module, facts_.n, facts_.k));
  }
  return {};
}

Result<std::vector<int32_t>> CodedScales::read_groups() const {
  std::vector<int32_t> index;
  if (facts_.group_index == nullptr) {
    return index;
  }
  index.resize(static_cast<size_t>(facts_.k));
  std::memcpy(index.data(), facts_.group_index->data.data(), index.size() * 4);
  bool plain = true;
  for (int64_t i = 0; i < facts_.k; ++i) {
    const int32_t g = index[static_cast<size_t>(i)];
    if (g < 0 || g >= facts_.groups()) {
      return corrupt(
          *facts_.group_index,
          fmt::format("column {} is in group {}, but there are {} groups", i, g, facts_.groups()));
    }
    plain = plain && g == i / facts_.group_size;
  }
  if (plain) {
    index.clear();
  }
  return index;
}

Status CodedScales::scale_error(const ScaleLayout& layout, int64_t index, float value) const {
  return corrupt(
      *layout.tensor,
      fmt::format("scale {} is {}; the quantizer that wrote it divided by zero", index, value));
}

Status CodedScales::read(int64_t row, ScalesOfRow& out) const {
  const ScaleLayout& layout = facts_.scale;
  const auto count = static_cast<int64_t>(out.scales.size());
  if (layout.group_stride == 1 && is_plain(layout.tensor->dtype)) {
    const int64_t bytes = dtype_bits(layout.tensor->dtype) / 8;
    decode_plain(layout.tensor->dtype, layout.tensor->data.data() + layout.index(row, 0) * bytes,
                 count, out.scales.data());
  } else {
    for (int64_t g = 0; g < count; ++g) {
      out.scales[static_cast<size_t>(g)] = layout.at(layout.index(row, g));
    }
  }
  if (const size_t bad = first_not_finite(out.scales); bad < out.scales.size()) {
    return scale_error(layout, layout.index(row, static_cast<int64_t>(bad)), out.scales[bad]);
  }
  if (facts_.outer.tensor != nullptr) {
    NIBBLE_RETURN_IF_ERROR(apply_outer(row, out));
  }
  return facts_.zero.form == ZeroLayout::Form::kNone ? Status() : read_zeros(row, out);
}

Status CodedScales::apply_outer(int64_t row, ScalesOfRow& out) const {
  const int64_t index = facts_.outer.index(row, 0);
  const float outer = facts_.outer.at(index);
  if (!std::isfinite(outer)) {
    return scale_error(facts_.outer, index, outer);
  }
  if (facts_.divide_by_outer && outer == 0) {
    return corrupt(*facts_.outer.tensor, "is zero, but the other scales are divided by it");
  }
  for (float& scale : out.scales) {
    scale = facts_.divide_by_outer ? scale / outer : scale * outer;
  }
  if (const size_t bad = first_not_finite(out.scales); bad < out.scales.size()) {
    return corrupt(
        *facts_.outer.tensor,
        fmt::format("its scale {} makes that of row {}, group {} infinite", outer, row, bad));
  }
  return {};
}

Status CodedScales::read_zeros(int64_t row, ScalesOfRow& out) const {
  for (size_t g = 0; g < out.zeros.size(); ++g) {
    const auto group = static_cast<int64_t>(g);
    const int zero = facts_.zero.at(row, group, facts_.groups(), facts_.n);
    if (facts_.zero.is_fixed && zero != 0) {
      return corrupt(*facts_.zero.tensor,
                     fmt::format("zero point {} of row {}, group {} in weights that "
                                 "quantization_config calls symmetric",
                                 zero + 8, row, group));
    }
    out.zeros[g] = static_cast<float>(zero);
  }
  return {};
}

Result<std::pair<int64_t, int64_t>> read_shape_tensor(const CheckpointReader& reader,
                                                      const TensorInfo& tensor) {
  const bool wide = tensor.dtype == DType::kI64;
  if ((!wide && tensor.dtype != DType::kI32) || tensor.shape != std::vector<int64_t>{2}) {
    return make_error(StatusCode::kCorrupt, "{}: expected two I32 or I64, got {} {}",
                      reader.where(tensor), dtype_name(tensor.dtype), shape_text(tensor.shape));
  }
  int64_t values[2] = {};
  for (size_t i = 0; i < 2; ++i) {
    int32_t narrow = 0;
    std::memcpy(&narrow, tensor.data.data() + i * 4, 4);
    values[i] = narrow;
    if (wide) {
      std::memcpy(&values[i], tensor.data.data() + i * 8, 8);
    }
  }
  return std::pair(values[0], values[1]);
}

}  // namespace nibble
