#include "checkpoint/gguf_matrix.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/f16.h"
#include "checkpoint/finite.h"
#include "checkpoint/source_kernels.h"
#include "checkpoint/source_plain.h"
#include "gguf/block_parts.h"
#include "gguf/decode.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr int64_t kGroup = 32;

int64_t row_bytes(const TensorInfo& tensor) {
  return static_cast<int64_t>(tensor.data.size()) / tensor.shape[0];
}

const std::byte* row_data(const TensorInfo& tensor, int64_t row) {
  return tensor.data.data() + stored_row(tensor, row) * row_bytes(tensor);
}

void decode_row(const TensorInfo& tensor, int64_t row, float* out) {
  const std::byte* in = row_data(tensor, row);
  if (tensor.blocks == nullptr) {
    decode_plain(tensor.dtype, in, tensor.shape[1], out);
  } else {
    gguf::decode_blocks(tensor.blocks->type, in, tensor.shape[1] / tensor.blocks->elements, out);
  }
}

Status check_matrix(const CheckpointReader& reader, const TensorInfo& tensor) {
  if (tensor.shape.size() != 2 || tensor.shape[0] < 1 || tensor.shape[1] < 1) {
    return make_error(StatusCode::kCorrupt, "{}: expected a matrix, got shape {}",
                      reader.where(tensor), shape_text(tensor.shape));
  }
  if (tensor.paired_heads > 0 && tensor.shape[0] % (2 * tensor.paired_heads) != 0) {
    return make_error(StatusCode::kCorrupt, "{}: {} rows are no pairs of {} heads",
                      reader.where(tensor), tensor.shape[0], tensor.paired_heads);
  }
  return {};
}

class GgufMatrix final : public SourceMatrix {
 public:
  GgufMatrix(const CheckpointReader& reader, const TensorInfo& tensor, std::string module)
      : tensor_(tensor) {
    module_ = std::move(module);
    n_ = tensor.shape[0];
    k_ = tensor.shape[1];
    format_ = tensor.type_name();
    tensors_ = {&tensor};
    where_ = reader.where(tensor);
  }

  Status decode(int64_t row, int64_t rows, float* out) const override {
    for (int64_t i = 0; i < rows; ++i) {
      decode_row(tensor_, row + i, out + i * k_);
    }
    return {};
  }

  // Rows of a head lie within it.
  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t row,
                                                                int64_t rows) const override {
    if (rows == 0) {
      return {};
    }
    const int64_t unit = tensor_.paired_heads == 0 ? 1 : n_ / tensor_.paired_heads;
    const auto begin = static_cast<size_t>(row / unit * unit * row_bytes(tensor_));
    const auto end =
        static_cast<size_t>((row + rows + unit - 1) / unit * unit * row_bytes(tensor_));
    return {tensor_.data.subspan(begin, end - begin)};
  }

 private:
  const TensorInfo& tensor_;
};

// The first of `count` numbers in F16 or BF16 that is NaN or infinite, or `count`.
int64_t first_not_finite(const std::byte* numbers, DType type, int64_t count) {
  const int exponent = type == DType::kF16 ? 0x7c00 : 0x7f80;
  int64_t i = 0;
  for (; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, numbers + i * 2, sizeof(bits));
    if ((bits & exponent) == exponent) {
      break;
    }
  }
  return i;
}

Status check_numbers(const QuantView& view,
                     std::string_view what,
                     const std::byte* numbers,
                     int64_t stored) {
  const int64_t groups = view.k / kGroup;
  const int64_t at = first_not_finite(numbers, view.scale_type, groups);
  if (at == groups) {
    return {};
  }
  return make_error(StatusCode::kCorrupt, "{}: the {} of row {}, block {} is NaN or infinite; {}",
                    view.name, what, stored, at, kNotFiniteRemedy);
}

// The view, whose facts are known, gets memory for its numbers.
Status allocate_parts(MappedLinear& linear) {
  QuantView& view = linear.weight;
  const auto numbers = static_cast<size_t>(view.n * (view.k / kGroup) * 2);
  NIBBLE_ASSIGN_OR_RETURN(linear.codes,
                          Buffer::allocate(static_cast<size_t>(view.n * view.row_bytes())));
  NIBBLE_ASSIGN_OR_RETURN(linear.scales, Buffer::allocate(numbers));
  view.codes = linear.codes.data();
  view.scales = linear.scales.data();
  if (view.format.zero_points == ZeroPoints::kMinimum) {
    NIBBLE_ASSIGN_OR_RETURN(linear.minimums, Buffer::allocate(numbers));
    view.minimums = linear.minimums.data();
  }
  return {};
}

Status take_apart(const TensorInfo& tensor, MappedLinear& linear) {
  QuantView& view = linear.weight;
  const gguf::Type type = tensor.blocks->type;
  const int64_t groups = view.k / kGroup;
  const bool powers = gguf::scale_bytes(type) == 1;
  const bool minimums = view.format.zero_points == ZeroPoints::kMinimum;
  view.scale_type = powers ? DType::kBF16 : DType::kF16;
  NIBBLE_RETURN_IF_ERROR(allocate_parts(linear));
  std::vector<std::byte> exponents(static_cast<size_t>(groups));
  for (int64_t row = 0; row < view.n; ++row) {
    std::byte* scales = linear.scales.data() + row * groups * 2;
    std::byte* row_minimums = minimums ? linear.minimums.data() + row * groups * 2 : nullptr;
    gguf::split_blocks(type, row_data(tensor, row), groups,
                       {.codes = linear.codes.data() + row * view.row_bytes(),
                        .scales = powers ? exponents.data() : scales,
                        .minimums = row_minimums});
    for (int64_t g = 0; powers && g < groups; ++g) {
      const auto exponent = std::to_integer<uint8_t>(exponents[static_cast<size_t>(g)]);
      const uint16_t bits = f32_to_bf16(decode_e8m0(exponent));
      std::memcpy(scales + g * 2, &bits, sizeof(bits));
    }
    const int64_t stored = stored_row(tensor, row);
    NIBBLE_RETURN_IF_ERROR(check_numbers(view, "scale", scales, stored));
    if (minimums) {
      NIBBLE_RETURN_IF_ERROR(check_numbers(view, "minimum", row_minimums, stored));
    }
  }
  return {};
}

Status decode_to_bf16(const TensorInfo& tensor, MappedLinear& linear) {
  QuantView& view = linear.weight;
  view.format = {WeightCode::kBf16, ScalePer::kNone, 0, DType::kF32};
  NIBBLE_ASSIGN_OR_RETURN(linear.codes, Buffer::allocate(static_cast<size_t>(view.n * view.k) * 2));
  std::vector<float> values(static_cast<size_t>(view.k));
  auto* out = linear.codes.as<uint16_t>().data();
  for (int64_t row = 0; row < view.n; ++row) {
    decode_row(tensor, row, values.data());
    out = std::transform(values.begin(), values.end(), out, f32_to_bf16);
  }
  view.codes = linear.codes.data();
  return {};
}

// Rows of plain numbers in their order.
Status copy_rows(const TensorInfo& tensor, MappedLinear& linear) {
  QuantView& view = linear.weight;
  view.format = {tensor.dtype == DType::kF32   ? WeightCode::kF32
                 : tensor.dtype == DType::kF16 ? WeightCode::kF16
                                               : WeightCode::kBf16,
                 ScalePer::kNone, 0, DType::kF32};
  NIBBLE_ASSIGN_OR_RETURN(linear.codes, Buffer::allocate(tensor.data.size()));
  for (int64_t row = 0; row < view.n; ++row) {
    std::memcpy(linear.codes.data() + row * row_bytes(tensor), row_data(tensor, row),
                static_cast<size_t>(row_bytes(tensor)));
  }
  view.codes = linear.codes.data();
  return {};
}

}  // namespace

bool lies_as_in_gguf(const TensorInfo& tensor) {
  return tensor.blocks != nullptr || tensor.paired_heads > 0;
}

std::optional<WeightFormat> gguf_weight_format(gguf::Type type) {
  using enum gguf::Type;
  switch (type) {
    case kQ4_0:
      return WeightFormat{WeightCode::kInt4, ScalePer::kGroup, kGroup, DType::kF16};
    case kQ4_1:
      return WeightFormat{WeightCode::kInt4, ScalePer::kGroup, kGroup, DType::kF16,
                          ZeroPoints::kMinimum};
    case kQ8_0:
      return WeightFormat{WeightCode::kInt8, ScalePer::kGroup, kGroup, DType::kF16};
    case kMXFP4:
      return WeightFormat{WeightCode::kFp4E2M1, ScalePer::kGroup, kGroup, DType::kF8E8M0};
    default:
      return std::nullopt;
  }
}

int64_t stored_row(const TensorInfo& tensor, int64_t row) {
  if (tensor.paired_heads == 0) {
    return row;
  }
  const int64_t size = tensor.shape[0] / tensor.paired_heads;
  const int64_t within = row % size;
  return row - within + within % (size / 2) * 2 + within / (size / 2);
}

Result<std::unique_ptr<SourceMatrix>> make_gguf_source(const CheckpointReader& reader,
                                                       const TensorInfo& tensor,
                                                       std::string module) {
  NIBBLE_RETURN_IF_ERROR(check_matrix(reader, tensor));
  return std::unique_ptr<SourceMatrix>(
      std::make_unique<GgufMatrix>(reader, tensor, std::move(module)));
}

Result<MappedLinear> map_gguf(const CheckpointReader& reader,
                              const TensorInfo& tensor,
                              const RunsFormat& runs) {
  NIBBLE_RETURN_IF_ERROR(check_matrix(reader, tensor));
  MappedLinear linear;
  linear.tensors = {&tensor};
  linear.weight.n = tensor.shape[0];
  linear.weight.k = tensor.shape[1];
  linear.weight.name = reader.where(tensor);
  const std::optional<WeightFormat> format =
      tensor.blocks == nullptr ? std::nullopt : gguf_weight_format(tensor.blocks->type);
  if (format.has_value() && (runs == nullptr || runs(*format, linear.weight.k))) {
    linear.weight.format = *format;
    NIBBLE_RETURN_IF_ERROR(take_apart(tensor, linear));
  } else if (tensor.blocks == nullptr) {
    NIBBLE_RETURN_IF_ERROR(copy_rows(tensor, linear));
  } else {
    NIBBLE_RETURN_IF_ERROR(decode_to_bf16(tensor, linear));
    linear.decoded = tensor.blocks->name;
  }
  return linear;
}

}  // namespace nibble
