#include "checkpoint/linear_slots.h"

#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "base/math.h"
#include "checkpoint/safetensors.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr int64_t kCodesPerWord = 8;
constexpr int64_t kBytesPerWord = 4;

std::vector<int64_t> scale_shape(const WeightFormat& format, int64_t n, int64_t k) {
  switch (format.scale_per) {
    case ScalePer::kTensor:
      return {1};
    case ScalePer::kBlock:
      return {ceil_div(n, format.group_size), format.groups(k)};
    case ScalePer::kNone:
    case ScalePer::kChannel:
    case ScalePer::kGroup:
      break;
  }
  return {n, format.groups(k)};
}

}  // namespace

bool stores_int8_in_words(const QuantScheme& scheme) {
  return scheme.weight.code == WeightCode::kInt8 && scheme.act == ActFormat::kFloat;
}

std::vector<TensorSlot> linear_slots(const QuantScheme& scheme,
                                     Dialect dialect,
                                     int64_t n,
                                     int64_t k) {
  const WeightFormat& format = scheme.weight;
  const std::vector<int64_t> words = {n, ceil_div(k, kCodesPerWord)};
  const TensorSlot scales = {dialect == Dialect::kFp8 ? "weight_scale_inv" : "weight_scale",
                             format.scale_dtype, scale_shape(format, n, k)};
  switch (format.code) {
    case WeightCode::kInt4: {
      if (dialect == Dialect::kQuark) {
        return {{"weight", DType::kI32, words},
                {"weight_scale", DType::kF32, {1}},
                {"weight_scale_2", DType::kF32, {n}}};
      }
      const TensorSlot shape = {"weight_shape", DType::kI64, {2}};
      if (format.zero_points == ZeroPoints::kNone) {
        return {{"weight_packed", DType::kI32, words}, scales, shape};
      }
      return {{"weight_packed", DType::kI32, words},
              scales,
              {"weight_zero_point", DType::kI32, {ceil_div(n, kCodesPerWord), format.groups(k)}},
              shape};
    }
    case WeightCode::kFp4E2M1:
      return {{"weight_packed", DType::kU8, {n, ceil_div(k, 2)}},
              {"weight_scale", DType::kU8, {n, format.groups(k)}}};
    case WeightCode::kInt8:
      if (stores_int8_in_words(scheme)) {
        return {{"weight_packed", DType::kI32, {n, ceil_div(k, kBytesPerWord)}},
                scales,
                {"weight_shape", DType::kI64, {2}}};
      }
      return {{"weight", DType::kI8, {n, k}}, scales};
    case WeightCode::kFp8E4M3:
      return {{"weight", DType::kF8E4M3, {n, k}}, scales};
    case WeightCode::kF32:
      return {{"weight", DType::kF32, {n, k}}};
    case WeightCode::kF16:
      return {{"weight", DType::kF16, {n, k}}};
    case WeightCode::kBf16:
      return {{"weight", DType::kBF16, {n, k}}};
  }
  return {};
}

std::vector<TensorSlot> linear_slots(const QuantScheme& scheme, int64_t n, int64_t k) {
  return linear_slots(scheme, Dialect::kCompressedTensors, n, k);
}

Result<std::vector<std::byte>> slot_bytes(const TensorSlot& slot, const QuantTensor& weight) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t size, tensor_bytes(slot.dtype, slot.shape));
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  if (slot.suffix == "weight_shape") {
    const int64_t shape[2] = {weight.n, weight.k};
    std::memcpy(bytes.data(), shape, sizeof(shape));
  } else if (slot.suffix == "weight_scale") {
    const auto scales = weight.scales.as<float>();
    for (size_t i = 0; i < scales.size(); ++i) {
      if (slot.dtype == DType::kBF16) {
        const uint16_t bits = f32_to_bf16(scales[i]);
        CHECK_EQ(bf16_to_f32(bits), scales[i]);
        std::memcpy(bytes.data() + i * 2, &bits, 2);
      } else {
        std::memcpy(bytes.data() + i * 4, &scales[i], 4);
      }
    }
  } else if (slot.suffix == "weight_packed" && weight.format.code == WeightCode::kInt8) {
    const auto stride = static_cast<size_t>(slot.shape[1] * kBytesPerWord);
    const auto codes = weight.codes.as<std::byte>();
    const auto k = static_cast<size_t>(weight.k);
    for (size_t i = 0; i < codes.size(); ++i) {
      bytes[i / k * stride + i % k] = codes[i] ^ kInt8WordOffset;
    }
  } else {
    CHECK_EQ(bytes.size(), weight.codes.size());
    std::memcpy(bytes.data(), weight.codes.data(), bytes.size());
  }
  return bytes;
}

}  // namespace nibble
