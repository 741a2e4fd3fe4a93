#include "checkpoint/source_plain.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "checkpoint/source_kernels.h"

namespace nibble {
namespace {

class PlainMatrix final : public SourceMatrix {
 public:
  PlainMatrix(const CheckpointReader& reader, const PlainLayout& layout, std::string module)
      : layout_(layout), bytes_(dtype_bits(layout.tensor->dtype) / 8) {
    module_ = std::move(module);
    n_ = layout.n;
    k_ = layout.k;
    format_ = dtype_name(layout.tensor->dtype);
    tensors_ = {layout.tensor};
    where_ = reader.where(*layout.tensor);
  }

  Status decode(int64_t row, int64_t rows, float* out) const override {
    CHECK(row >= 0 && rows >= 0 && row + rows <= n_);
    if (layout_.column_stride == 1 && layout_.row_stride == k_) {
      decode_plain(layout_.tensor->dtype, at(row, 0), rows * k_, out);
    } else if (layout_.column_stride == 1) {
      for (int64_t i = 0; i < rows; ++i) {
        decode_plain(layout_.tensor->dtype, at(row + i, 0), k_, out + i * k_);
      }
    } else {
      for (int64_t i = 0; i < rows; i += kRows) {
        decode_columns(row + i, std::min(kRows, rows - i), out + i * k_);
      }
    }
    return {};
  }

  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t row,
                                                                int64_t rows) const override {
    if (rows == 0) {
      return {};
    }
    const std::byte* begin = at(row, 0);
    const std::byte* end = at(row + rows - 1, k_ - 1) + bytes_;
    return {{begin, static_cast<size_t>(end - begin)}};
  }

 private:
  // A tile of this many rows and columns is turned at once.
  static constexpr int64_t kRows = 64;
  static constexpr int64_t kColumns = 16;
  static constexpr int64_t kMaxStride = 2;

  [[nodiscard]] const std::byte* at(int64_t row, int64_t column) const {
    return layout_.tensor->data.data() +
           (layout_.offset + row * layout_.row_stride + column * layout_.column_stride) * bytes_;
  }

  // At most kRows rows, each stored down a column.
  void decode_columns(int64_t row, int64_t rows, float* out) const {
    constexpr int64_t kWidth = kRows * kMaxStride;
    float tile[kColumns * kWidth];
    const int64_t stride = layout_.row_stride;
    const int64_t width = (rows - 1) * stride + 1;
    for (int64_t begin = 0; begin < k_; begin += kColumns) {
      const int64_t size = std::min(kColumns, k_ - begin);
      for (int64_t j = 0; j < size; ++j) {
        decode_plain(layout_.tensor->dtype, at(row, begin + j), width, tile + j * kWidth);
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < size; ++j) {
          out[i * k_ + begin + j] = tile[j * kWidth + i * stride];
        }
      }
    }
  }

  PlainLayout layout_;
  int64_t bytes_;
};

}  // namespace

bool is_plain(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

bool is_plain_matrix(const TensorInfo& tensor) {
  return is_plain(tensor.dtype) && tensor.shape.size() == 2 && tensor.shape[0] > 0 &&
         tensor.shape[1] > 0;
}

std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const TensorInfo& tensor,
                                                std::string module) {
  return make_plain_source(reader,
                           {.tensor = &tensor,
                            .n = tensor.shape[0],
                            .k = tensor.shape[1],
                            .row_stride = tensor.shape[1]},
                           std::move(module));
}

std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const PlainLayout& layout,
                                                std::string module) {
  CHECK(layout.column_stride == 1 || layout.row_stride <= 2);
  return std::make_unique<PlainMatrix>(reader, layout, std::move(module));
}

}  // namespace nibble
