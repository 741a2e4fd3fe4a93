#include "checkpoint/source_coded.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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

std::span<const std::byte> part(const TensorInfo& tensor, int64_t begin, int64_t bytes) {
  return tensor.data.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
}

/// Scales and zero points of one row, and where each column finds them.
struct RowScales {
  std::vector<float> scales;
  std::vector<float> zeros;
};

class CodedMatrix final : public SourceMatrix {
 public:
  CodedMatrix(const CheckpointReader& reader, CodedFacts facts)
      : reader_(reader), facts_(std::move(facts)) {
    module_ = facts_.module;
    n_ = facts_.n;
    k_ = facts_.k;
    format_ = facts_.format;
    where_ = reader.where(*facts_.codes.tensor);
    for (const TensorInfo* tensor : {facts_.codes.tensor, facts_.scale.tensor, facts_.outer.tensor,
                                     facts_.zero.tensor, facts_.group_index, facts_.shape}) {
      if (tensor != nullptr) {
        tensors_.push_back(tensor);
      }
    }
    tensors_.insert(tensors_.end(), facts_.unused.begin(), facts_.unused.end());
  }

  Status decode(int64_t row, int64_t rows, float* out) const override {
    CHECK(row >= 0 && rows >= 0 && row + rows <= n_);
    NIBBLE_RETURN_IF_ERROR(check_shape());
    std::vector<int32_t> index;
    NIBBLE_RETURN_IF_ERROR(read_index(index));
    const auto groups = static_cast<size_t>(facts_.groups());
    RowScales row_scales{std::vector<float>(groups), {}};
    if (facts_.zero.form != ZeroLayout::Form::kNone) {
      row_scales.zeros.resize(groups);
    }
    if (facts_.codes.axis == CodeLayout::Axis::kWordColumns) {
      decode_word_columns(row, rows, out);
    } else if (facts_.codes.axis == CodeLayout::Axis::kAcross) {
      decode_all_across(row, rows, out);
    }
    for (int64_t i = 0; i < rows; ++i) {
      NIBBLE_RETURN_IF_ERROR(read_scales(row + i, row_scales));
      NIBBLE_RETURN_IF_ERROR(decode_one(row + i, row_scales, index, out + i * k_));
    }
    return {};
  }

  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t row,
                                                                int64_t rows) const override {
    std::vector<std::span<const std::byte>> spans;
    if (rows == 0) {
      return spans;
    }
    const CodeLayout& codes = facts_.codes;
    if (codes.axis == CodeLayout::Axis::kRows) {
      const int64_t last = code_offset(row + rows - 1) + row_code_bytes();
      spans.push_back(part(*codes.tensor, code_offset(row), last - code_offset(row)));
    } else {  // pages of all rows interleave
      spans.push_back(codes.tensor->data);
    }
    const ScaleLayout& scale = facts_.scale;
    const int64_t bytes = dtype_bits(scale.tensor->dtype) / 8;
    const int64_t begin = scale.index(row, 0) * bytes;
    const int64_t end = (scale.index(row + rows - 1, facts_.groups() - 1) + 1) * bytes;
    spans.push_back(part(*scale.tensor, begin, end - begin));
    if (facts_.zero.tensor != nullptr) {
      spans.push_back(facts_.zero.tensor->data);
    }
    return spans;
  }

  /// Scales of all rows, and whether there are kernels for what is not said by codes and scales.
  Status read_symmetric(float* scales) const {
    NIBBLE_RETURN_IF_ERROR(check_shape());
    std::vector<int32_t> index;
    NIBBLE_RETURN_IF_ERROR(read_index(index));
    if (!index.empty()) {
      return make_error(StatusCode::kUnsupported,
                        "{}: columns out of the order of their groups (act-order) do not run; "
                        "quantize the checkpoint again: nibble quantize SRC DST --scheme NAME",
                        reader_.where(*facts_.group_index));
    }
    const auto groups = static_cast<size_t>(facts_.groups());
    RowScales row_scales{std::vector<float>(groups), {}};
    if (facts_.zero.form != ZeroLayout::Form::kNone) {
      row_scales.zeros.resize(groups);
    }
    for (int64_t row = 0; row < n_; ++row) {
      NIBBLE_RETURN_IF_ERROR(read_scales(row, row_scales));
      if (std::any_of(row_scales.zeros.begin(), row_scales.zeros.end(),
                      [](float zero) { return zero != 0; })) {
        return make_error(StatusCode::kUnsupported,
                          "{}: zero points do not run; quantize the checkpoint again: nibble "
                          "quantize SRC DST --scheme NAME",
                          reader_.where(*facts_.zero.tensor));
      }
      std::copy(row_scales.scales.begin(), row_scales.scales.end(), scales + row * facts_.groups());
    }
    return {};
  }

  /// Words in columns, in rows.
  void transpose_words(std::byte* out) const {
    const std::byte* data = facts_.codes.tensor->data.data();
    for (int64_t row = 0; row < n_; ++row) {
      for (int64_t word = 0; word < k_ / 8; ++word, out += 4) {
        std::memcpy(out, data + code_offset(word) + row * 4, 4);
      }
    }
  }

 private:
  [[nodiscard]] int64_t code_offset(int64_t row) const {
    return facts_.codes.offset + row * facts_.codes.row_bytes;
  }

  [[nodiscard]] int64_t row_code_bytes() const {
    switch (facts_.codes.form) {
      case CodeForm::kNibbles:
        return (k_ + 7) / 8 * 4;
      case CodeForm::kE2M1:
        return k_ / 2;
      default:
        return k_;
    }
  }

  [[nodiscard]] Status corrupt(const TensorInfo& tensor, const std::string& what) const {
    return make_error(StatusCode::kCorrupt, "{}: {}", reader_.where(tensor), what);
  }

  [[nodiscard]] Status check_shape() const {
    if (facts_.shape == nullptr) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(const auto shape, read_shape_tensor(reader_, *facts_.shape));
    if (shape != std::pair(n_, k_)) {
      return corrupt(*facts_.shape, fmt::format("says [{}, {}], which contradicts {} of shape [{}, "
                                                "{}] that codes and scales describe",
                                                shape.first, shape.second, module_, n_, k_));
    }
    return {};
  }

  // Empty when the groups are runs of columns.
  [[nodiscard]] Status read_index(std::vector<int32_t>& index) const {
    if (facts_.group_index == nullptr) {
      return {};
    }
    index.resize(static_cast<size_t>(k_));
    std::memcpy(index.data(), facts_.group_index->data.data(), index.size() * 4);
    bool plain = true;
    for (int64_t i = 0; i < k_; ++i) {
      const int32_t g = index[static_cast<size_t>(i)];
      if (g < 0 || g >= facts_.groups()) {
        return corrupt(*facts_.group_index,
                       fmt::format("column {} is in group {}, but there are {} groups", i, g,
                                   facts_.groups()));
      }
      plain = plain && g == i / facts_.group_size;
    }
    if (plain) {
      index.clear();
    }
    return {};
  }

  // One row, whose levels are already there unless codes lie in rows.
  [[nodiscard]] Status decode_one(int64_t row,
                                  const RowScales& row_scales,
                                  const std::vector<int32_t>& index,
                                  float* x) const {
    const CodeLayout& codes = facts_.codes;
    const float* scales = row_scales.scales.data();
    const float* zeros = row_scales.zeros.empty() ? nullptr : row_scales.zeros.data();
    if (codes.axis == CodeLayout::Axis::kRows) {
      const std::byte* in = codes.tensor->data.data() + code_offset(row);
      NIBBLE_RETURN_IF_ERROR(check_codes(row, in));
      const bool one = facts_.groups() == 1;
      if (zeros == nullptr && index.empty() && (one || facts_.group_size % 32 == 0)) {
        decode_scaled({.form = codes.form,
                       .nibbles = codes.nibbles,
                       .in = in,
                       .count = k_,
                       .scales = scales,
                       .group_size = one ? k_ : facts_.group_size},
                      x);
        return {};
      }
      decode_levels(codes.form, codes.nibbles, in, k_, x);
    }
    if (index.empty()) {
      apply_scales(scales, zeros, facts_.group_size, k_, x);
    } else {
      apply_scales_by_index(scales, zeros, index.data(), k_, x);
    }
    return {};
  }

  // Codes that mean no number.
  [[nodiscard]] Status check_codes(int64_t row, const std::byte* in) const {
    const CodeLayout& codes = facts_.codes;
    if (codes.form == CodeForm::kE4M3 && has_e4m3_nan(in, k_)) {
      int64_t column = 0;
      while (!has_e4m3_nan(in + column, 1)) {
        ++column;
      }
      return corrupt(*codes.tensor,
                     fmt::format("{}: code at [{}, {}] is NaN; the quantizer that wrote it divided "
                                 "by zero",
                                 module_, row, column));
    }
    return codes.four_bits ? check_narrow(row, in) : Status();
  }

  // 4-bit codes in bytes.
  [[nodiscard]] Status check_narrow(int64_t row, const std::byte* in) const {
    for (int64_t i = 0; i < k_; ++i) {
      const int code = static_cast<int8_t>(std::to_integer<uint8_t>(in[i]));
      if (code < -8 || code > 7) {
        return corrupt(*facts_.codes.tensor,
                       fmt::format("code {} at [{}, {}] is no 4-bit number", code, row, i));
      }
    }
    return {};
  }

  void decode_word_columns(int64_t row, int64_t rows, float* out) const {
    const CodeLayout& codes = facts_.codes;
    constexpr int64_t kWords = 8;
    const int64_t words = k_ / 8;
    for (int64_t begin = 0; begin < words; begin += kWords) {
      const int64_t size = std::min(kWords, words - begin);
      for (int64_t i = 0; i < rows; ++i) {
        std::byte gathered[kWords * 4];
        for (int64_t w = 0; w < size; ++w) {
          std::memcpy(gathered + w * 4,
                      codes.tensor->data.data() + code_offset(begin + w) + (row + i) * 4, 4);
        }
        decode_levels(codes.form, codes.nibbles, gathered, size * 8, out + i * k_ + begin * 8);
      }
    }
  }

  void decode_all_across(int64_t row, int64_t rows, float* out) const {
    const CodeLayout& codes = facts_.codes;
    constexpr int64_t kColumns = 64;
    for (int64_t begin = 0; begin < k_; begin += kColumns) {
      AcrossBlock block{
          .stride = codes.row_bytes, .count = std::min(kColumns, k_ - begin), .row_stride = k_};
      for (int64_t word = row / 8; word * 8 < row + rows; ++word) {
        block.in = codes.tensor->data.data() + code_offset(begin) + word * 4;
        block.first = static_cast<int>(std::max(row - word * 8, int64_t{0}));
        block.last = static_cast<int>(std::min(row + rows - word * 8, int64_t{8}));
        decode_across(codes.nibbles, block, out + (word * 8 + block.first - row) * k_ + begin);
      }
    }
  }

  [[nodiscard]] Status scale_error(const ScaleLayout& layout, int64_t index, float value) const {
    return corrupt(
        *layout.tensor,
        fmt::format("scale {} is {}; the quantizer that wrote it divided by zero", index, value));
  }

  [[nodiscard]] Status read_scales(int64_t row, RowScales& out) const {
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

  [[nodiscard]] Status apply_outer(int64_t row, RowScales& out) const {
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

  [[nodiscard]] Status read_zeros(int64_t row, RowScales& out) const {
    for (size_t g = 0; g < out.zeros.size(); ++g) {
      const auto group = static_cast<int64_t>(g);
      const int zero = facts_.zero.at(row, group, facts_.groups(), n_);
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

  const CheckpointReader& reader_;
  CodedFacts facts_;
};

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

std::unique_ptr<SourceMatrix> make_coded_source(const CheckpointReader& reader, CodedFacts facts) {
  return std::make_unique<CodedMatrix>(reader, std::move(facts));
}

Result<MappedInt4> map_int4(const CheckpointReader& reader, const CodedFacts& facts) {
  CHECK(facts.codes.form == CodeForm::kNibbles && facts.k % 8 == 0);
  CHECK(facts.codes.axis != CodeLayout::Axis::kAcross);
  const CodedMatrix matrix(reader, facts);
  MappedInt4 out;
  NIBBLE_ASSIGN_OR_RETURN(
      out.scales, Buffer::allocate(static_cast<size_t>(facts.n * facts.groups()) * sizeof(float)));
  NIBBLE_RETURN_IF_ERROR(matrix.read_symmetric(out.scales.as<float>().data()));
  out.nibbles = facts.codes.nibbles;
  if (facts.codes.axis == CodeLayout::Axis::kRows) {
    CHECK_EQ(facts.codes.row_bytes, facts.k / 2);
    out.codes = facts.codes.tensor->data.data() + facts.codes.offset;
    return out;
  }
  NIBBLE_ASSIGN_OR_RETURN(out.repacked,
                          Buffer::allocate(static_cast<size_t>(facts.n * facts.k / 2)));
  matrix.transpose_words(out.repacked.data());
  out.codes = out.repacked.data();
  return out;
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
