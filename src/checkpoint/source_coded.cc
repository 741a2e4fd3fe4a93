#include "checkpoint/source_coded.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/coded_scales.h"

namespace nibble {
namespace {

std::span<const std::byte> part(const TensorInfo& tensor, int64_t begin, int64_t bytes) {
  return tensor.data.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
}

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
    const CodedScales scales(reader_, facts_);
    NIBBLE_RETURN_IF_ERROR(scales.check_shape());
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<int32_t> index, scales.read_groups());
    ScalesOfRow row_scales = scales.one_row();
    if (facts_.codes.axis == CodeLayout::Axis::kWordColumns) {
      decode_word_columns(row, rows, out);
    } else if (facts_.codes.axis == CodeLayout::Axis::kAcross) {
      decode_all_across(row, rows, out);
    }
    for (int64_t i = 0; i < rows; ++i) {
      NIBBLE_RETURN_IF_ERROR(scales.read(row + i, row_scales));
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

  // One row, whose levels are already there unless codes lie in rows.
  [[nodiscard]] Status decode_one(int64_t row,
                                  const ScalesOfRow& row_scales,
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

  const CheckpointReader& reader_;
  CodedFacts facts_;
};

}  // namespace

std::unique_ptr<SourceMatrix> make_coded_source(const CheckpointReader& reader, CodedFacts facts) {
  return std::make_unique<CodedMatrix>(reader, std::move(facts));
}

}  // namespace nibble
