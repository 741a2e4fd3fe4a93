#include "checkpoint/source_plain.h"

#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace nibble {
namespace {

// The compiler turns loops of this fixed length into vector code.
constexpr int64_t kBlock = 64;

float f32_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// f16_to_f32() without a branch: both cases are computed, so that it can be vector code.
float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t magnitude = bits & 0x7fffU;
  const uint32_t special = magnitude >= 0x7c00U ? 0x7f800000U : 0U;
  const uint32_t normal = ((magnitude << 13) + (112U << 23)) | special;
  const auto small =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F);
  return std::bit_cast<float>(sign | (magnitude < 0x400U ? small : normal));
}

template <float (*kConvert)(uint16_t)>
void convert_halves(const std::byte* in, int64_t count, float* out) {
  int64_t at = 0;
  for (; at + kBlock <= count; at += kBlock) {
    uint16_t block[kBlock];
    std::memcpy(block, in + at * 2, sizeof(block));
    for (int64_t i = 0; i < kBlock; ++i) {
      out[at + i] = kConvert(block[i]);
    }
  }
  for (; at < count; ++at) {
    uint16_t bits = 0;
    std::memcpy(&bits, in + at * 2, 2);
    out[at] = kConvert(bits);
  }
}

class PlainMatrix final : public SourceMatrix {
 public:
  PlainMatrix(const CheckpointReader& reader, const TensorInfo& tensor, std::string module)
      : tensor_(tensor) {
    module_ = std::move(module);
    n_ = tensor.shape[0];
    k_ = tensor.shape[1];
    format_ = dtype_name(tensor.dtype);
    tensors_ = {&tensor};
    where_ = reader.where(tensor);
  }

  Status decode(int64_t row, int64_t rows, float* out) const override {
    CHECK(row >= 0 && rows >= 0 && row + rows <= n_);
    const int64_t begin = row * k_ * dtype_bits(tensor_.dtype) / 8;
    decode_plain(tensor_.dtype, tensor_.data.data() + begin, rows * k_, out);
    return {};
  }

  [[nodiscard]] std::vector<std::span<const std::byte>> touched(int64_t row,
                                                                int64_t rows) const override {
    const auto row_bytes = static_cast<size_t>(k_ * dtype_bits(tensor_.dtype) / 8);
    return {tensor_.data.subspan(static_cast<size_t>(row) * row_bytes,
                                 static_cast<size_t>(rows) * row_bytes)};
  }

 private:
  const TensorInfo& tensor_;
};

}  // namespace

bool is_plain_matrix(const TensorInfo& tensor) {
  const bool floats =
      tensor.dtype == DType::kF32 || tensor.dtype == DType::kF16 || tensor.dtype == DType::kBF16;
  return floats && tensor.shape.size() == 2 && tensor.shape[0] > 0 && tensor.shape[1] > 0;
}

std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const TensorInfo& tensor,
                                                std::string module) {
  return std::make_unique<PlainMatrix>(reader, tensor, std::move(module));
}

void decode_plain(DType dtype, const std::byte* in, int64_t count, float* out) {
  switch (dtype) {
    case DType::kF32:
      std::memcpy(out, in, static_cast<size_t>(count) * 4);
      return;
    case DType::kF16:
      return convert_halves<f32_from_f16>(in, count, out);
    case DType::kBF16:
      return convert_halves<f32_from_bf16>(in, count, out);
    default:
      CHECK_MSG(false, "{} is no plain type", dtype_name(dtype));
  }
}

}  // namespace nibble
