#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "checkpoint/coded_scales.h"
#include "checkpoint/finite.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/source_plain.h"

namespace nibble {
namespace {

WeightCode code_of(CodeForm form, bool four_bits) {
  switch (form) {
    case CodeForm::kNibbles:
      return WeightCode::kInt4;
    case CodeForm::kInt8:
    case CodeForm::kInt8Offset:
      return four_bits ? WeightCode::kInt4 : WeightCode::kInt8;
    case CodeForm::kE4M3:
      return WeightCode::kFp8E4M3;
    case CodeForm::kE2M1:
      return WeightCode::kFp4E2M1;
  }
  return WeightCode::kInt8;
}

WeightFormat format_of(const CodedFacts& facts) {
  WeightFormat format{.code = code_of(facts.codes.form, facts.codes.four_bits),
                      .scale_per = ScalePer::kChannel};
  if (facts.scale.rows_per_scale > 1) {
    format.scale_per = ScalePer::kBlock;
    format.group_size = static_cast<int>(facts.group_size);
  } else if (facts.grouped) {
    format.scale_per = ScalePer::kGroup;
    format.group_size = static_cast<int>(facts.group_size);
  }
  // An F16 scale is exact in F32, and so is a product of two scales rounded to it.
  const DType type = facts.scale.tensor->dtype;
  const bool single = facts.outer.tensor == nullptr;
  if (single && type == DType::kBF16) {
    format.scale_dtype = DType::kBF16;
  } else if (single && (type == DType::kU8 || type == DType::kF8E8M0)) {
    format.scale_dtype = DType::kF8E8M0;
  }
  if (facts.zero.form != ZeroLayout::Form::kNone && !facts.zero.is_fixed) {
    format.zero_points = ZeroPoints::kPerScale;
  }
  return format;
}

/// One matrix on its way into the form of QuantView.
class CodedView final {
 public:
  CodedView(const CheckpointReader& reader, const CodedFacts& facts)
      : reader_(reader), facts_(facts), reads_(reader, facts) {}

  Result<MappedLinear> map() {
    NIBBLE_RETURN_IF_ERROR(reads_.check_shape());
    QuantView& view = out_.weight;
    view.format = format_of(facts_);
    view.n = facts_.n;
    view.k = facts_.k;
    view.name = reader_.where(*facts_.codes.tensor);
    for (const TensorInfo* tensor : {facts_.codes.tensor, facts_.scale.tensor, facts_.outer.tensor,
                                     facts_.zero.tensor, facts_.group_index}) {
      if (tensor != nullptr) {
        out_.tensors.push_back(tensor);
      }
    }
    NIBBLE_RETURN_IF_ERROR(order_columns());
    NIBBLE_RETURN_IF_ERROR(map_codes());
    NIBBLE_RETURN_IF_ERROR(scales_lie_so() ? map_scales() : copy_scales());
    return std::move(out_);
  }

 private:
  [[nodiscard]] const std::byte* code_row(int64_t row) const {
    return facts_.codes.tensor->data.data() + facts_.codes.offset + row * facts_.codes.row_bytes;
  }
  [[nodiscard]] bool permuted() const { return out_.act.columns != nullptr; }

  // Columns sorted by their groups, each in the order that the file has.
  Status order_columns() {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<int32_t> groups, reads_.read_groups());
    if (groups.empty()) {
      return {};
    }
    std::vector<int32_t> columns(groups.size());
    std::iota(columns.begin(), columns.end(), 0);
    std::stable_sort(columns.begin(), columns.end(), [&](int32_t a, int32_t b) {
      return groups[static_cast<size_t>(a)] < groups[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < facts_.k; ++i) {
      const int32_t column = columns[static_cast<size_t>(i)];
      if (groups[static_cast<size_t>(column)] != i / facts_.group_size) {
        return make_error(StatusCode::kUnsupported,
                          "{}: groups of unequal sizes do not run; quantize the checkpoint again: "
                          "nibble quantize SRC DST --scheme NAME",
                          reader_.where(*facts_.group_index));
      }
    }
    out_.act.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
    return {};
  }

  Status map_codes() {
    const CodeLayout& codes = facts_.codes;
    QuantView& view = out_.weight;
    const bool as_is = codes.axis == CodeLayout::Axis::kRows && !codes.four_bits &&
                       codes.form != CodeForm::kInt8Offset && !permuted() &&
                       (facts_.n == 1 || codes.row_bytes >= view.row_bytes());
    if (as_is) {
      view.row_stride = codes.row_bytes > view.row_bytes() ? codes.row_bytes : 0;
      view.nibbles = codes.nibbles;
      view.codes = code_row(0);
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(out_.codes,
                            Buffer::allocate(static_cast<size_t>(view.n * view.row_bytes())));
    view.codes = out_.codes.data();
    if (view.format.code == WeightCode::kInt4) {
      NIBBLE_RETURN_IF_ERROR(copy_int4());
      return permuted() ? permute_int4() : Status();
    }
    if (view.format.code == WeightCode::kFp4E2M1 && permuted()) {
      return make_error(StatusCode::kUnsupported, "{}: 4-bit floats in act-order do not run",
                        view.name);
    }
    copy_bytes();
    return {};
  }

  Status copy_int4() {
    switch (facts_.codes.axis) {
      case CodeLayout::Axis::kWordColumns:
        copy_word_columns();
        return {};
      case CodeLayout::Axis::kAcross:
        copy_across();
        return {};
      case CodeLayout::Axis::kRows:
        break;
    }
    if (facts_.codes.four_bits) {
      return pack_bytes();
    }
    const int64_t words = out_.weight.row_bytes() / 4;
    for (int64_t row = 0; row < facts_.n; ++row) {
      canonical_words(facts_.codes.nibbles, code_row(row), words, code_out(row));
    }
    return {};
  }

  [[nodiscard]] std::byte* code_out(int64_t row) {
    return out_.codes.data() + row * out_.weight.row_bytes();
  }

  // GPTQ: row i of words holds columns 8i to 8i + 7 of all rows.
  void copy_word_columns() {
    constexpr int64_t kRows = 16;  // a cache line of words
    out_.weight.nibbles = facts_.codes.nibbles;
    if (permuted()) {
      CHECK(facts_.codes.nibbles == NibbleForm());
    }
    for (int64_t begin = 0; begin < facts_.n; begin += kRows) {
      const int64_t end = std::min(begin + kRows, facts_.n);
      for (int64_t word = 0; word < facts_.k / 8; ++word) {
        const std::byte* from = code_row(word);
        for (int64_t row = begin; row < end; ++row) {
          std::memcpy(code_out(row) + word * 4, from + row * 4, 4);
        }
      }
    }
  }

  // AWQ: a word holds eight rows of one column. Eight words are an 8 by 8 square of nibbles.
  void copy_across() {
    const int64_t words = out_.weight.row_bytes() / 4;
    for (int64_t block = 0; block < facts_.n / 8; ++block) {
      for (int64_t word = 0; word < words; ++word) {
        uint32_t square[8];
        for (int64_t i = 0; i < 8; ++i) {
          const int64_t column = word * 8 + i;
          square[i] = 0;
          if (column < facts_.k) {
            std::memcpy(&square[i], code_row(column) + block * 4, 4);
            square[i] = canonical_word(facts_.codes.nibbles, square[i]);
          }
        }
        transpose(square);
        for (int64_t i = 0; i < 8; ++i) {
          std::memcpy(code_out(block * 8 + i) + word * 4, &square[i], 4);
        }
      }
    }
  }

  // Nibble j of word i and nibble i of word j change places.
  static void transpose(uint32_t (&w)[8]) {
    const auto exchange = [&](int distance, uint32_t mask) {
      for (int i = 0; i < 8; ++i) {
        if ((i & distance) == 0) {
          const uint32_t moved = ((w[i] >> (4 * distance)) ^ w[i + distance]) & mask;
          w[i + distance] ^= moved;
          w[i] ^= moved << (4 * distance);
        }
      }
    };
    exchange(1, 0x0f0f0f0fU);
    exchange(2, 0x00ff00ffU);
    exchange(4, 0x0000ffffU);
  }

  // 4-bit codes that the file stores one per byte.
  Status pack_bytes() {
    std::memset(out_.codes.data(), 0, out_.codes.size());
    for (int64_t row = 0; row < facts_.n; ++row) {
      const std::byte* in = code_row(row);
      std::byte* out = code_out(row);
      for (int64_t i = 0; i < facts_.k; ++i) {
        const int code = static_cast<int8_t>(std::to_integer<uint8_t>(in[i]));
        if (code < -8 || code > 7) {
          return make_error(StatusCode::kCorrupt, "{}: code {} at [{}, {}] is no 4-bit number",
                            out_.weight.name, code, row, i);
        }
        out[i / 2] |= static_cast<std::byte>((code + 8) << (i % 2 * 4));
      }
    }
    return {};
  }

  Status permute_int4() {
    const std::vector<int32_t>& columns = *out_.act.columns;
    std::vector<std::byte> packed(static_cast<size_t>(out_.weight.row_bytes()));
    for (int64_t row = 0; row < facts_.n; ++row) {
      std::byte* codes = code_out(row);
      std::fill(packed.begin(), packed.end(), std::byte{0});
      for (size_t i = 0; i < columns.size(); ++i) {
        const auto from = static_cast<size_t>(columns[i]);
        const std::byte code = (codes[from / 2] >> (from % 2 * 4)) & std::byte{15};
        packed[i / 2] |= code << (i % 2 * 4);
      }
      std::ranges::copy(packed, codes);
    }
    return {};
  }

  // INT8 and FP8, of which the former may be stored with an offset of 128.
  void copy_bytes() {
    const std::byte flip{facts_.codes.form == CodeForm::kInt8Offset ? uint8_t{128} : uint8_t{0}};
    for (int64_t row = 0; row < facts_.n; ++row) {
      const std::byte* in = code_row(row);
      std::byte* out = code_out(row);
      for (int64_t i = 0; i < out_.weight.row_bytes(); ++i) {
        const int64_t from = permuted() ? (*out_.act.columns)[static_cast<size_t>(i)] : i;
        out[i] = in[from] ^ flip;
      }
    }
  }

  // Whether scales lie in the file as a view wants them. Zero points, also those that must be zero,
  // are read row by row with the scales.
  [[nodiscard]] bool scales_lie_so() const {
    const ScaleLayout& scale = facts_.scale;
    const bool each = scale.row_stride >= facts_.groups() && scale.rows_per_scale == 1;
    const bool one = scale.row_stride == 0 && facts_.groups() == 1;
    return (is_plain(scale.tensor->dtype) || powers()) && facts_.outer.tensor == nullptr &&
           !reads_.has_zeros() && scale.group_stride == 1 && (each || one);
  }

  /// Whether each scale is the exponent of a power of two.
  [[nodiscard]] bool powers() const {
    const DType type = facts_.scale.tensor->dtype;
    return type == DType::kU8 || type == DType::kF8E8M0;
  }

  Status map_scales() {
    QuantView& view = out_.weight;
    const ScaleLayout& scale = facts_.scale;
    const int64_t bytes = dtype_bits(scale.tensor->dtype) / 8;
    const int64_t groups = facts_.groups();
    const bool one = scale.row_stride == 0;
    view.scales = scale.tensor->data.data() + scale.offset * bytes;
    view.scale_type = powers() ? DType::kF8E8M0 : scale.tensor->dtype;
    view.scale_count = one ? QuantView::Scales::kOneForAll : QuantView::Scales::kEach;
    view.scale_stride = one || scale.row_stride == groups ? 0 : scale.row_stride;
    const int64_t rows = one || view.scale_stride == 0 ? 1 : facts_.n;
    const int64_t of_row = one ? 1 : facts_.n * groups / rows;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = scale.offset + row * scale.row_stride;
      const auto stored = scale.tensor->data.subspan(static_cast<size_t>(first * bytes),
                                                     static_cast<size_t>(of_row * bytes));
      if (!all_finite(view.scale_type, stored)) {
        return copy_scales();  // names the bad one
      }
    }
    return {};
  }

  Status copy_scales() {
    QuantView& view = out_.weight;
    const auto groups = static_cast<size_t>(facts_.groups());
    const auto count = static_cast<size_t>(facts_.n) * groups;
    const bool zeros = view.format.zero_points == ZeroPoints::kPerScale;
    NIBBLE_ASSIGN_OR_RETURN(out_.scales, Buffer::allocate(count * sizeof(float)));
    NIBBLE_ASSIGN_OR_RETURN(out_.zeros, Buffer::allocate(zeros ? count : 0));
    ScalesOfRow row_scales = reads_.one_row();
    for (int64_t row = 0; row < facts_.n; ++row) {
      NIBBLE_RETURN_IF_ERROR(reads_.read(row, row_scales));
      const auto first = static_cast<size_t>(row) * groups;
      std::ranges::copy(row_scales.scales, out_.scales.as<float>().subspan(first).begin());
      for (size_t g = 0; zeros && g < groups; ++g) {
        out_.zeros.as<int8_t>()[first + g] = static_cast<int8_t>(row_scales.zeros[g]);
      }
    }
    view.scales = out_.scales.data();
    view.scale_type = DType::kF32;
    view.scale_count = QuantView::Scales::kEach;
    view.scale_stride = 0;
    view.zeros = zeros ? out_.zeros.as<int8_t>().data() : nullptr;
    return {};
  }

  const CheckpointReader& reader_;
  const CodedFacts& facts_;
  CodedScales reads_;
  MappedLinear out_;
};

}  // namespace

Result<MappedLinear> map_coded(const CheckpointReader& reader, const CodedFacts& facts) {
  return CodedView(reader, facts).map();
}

}  // namespace nibble
