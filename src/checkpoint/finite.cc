#include "checkpoint/finite.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/f16.h"
#include "base/mapped_bytes.h"

namespace nibble {
namespace {

// The compiler turns loops of this fixed length into vector code.
constexpr int64_t kBlock = 64;

// Whether no number has all the bits of `exponent`: those of infinity and NaN.
template <typename Bits>
bool none_has(std::span<const std::byte> numbers, Bits exponent) {
  const auto count = static_cast<int64_t>(numbers.size() / sizeof(Bits));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    Bits block[kBlock] = {};
    const int64_t size = std::min(kBlock, count - begin);
    std::memcpy(block, numbers.data() + begin * static_cast<int64_t>(sizeof(Bits)),
                static_cast<size_t>(size) * sizeof(Bits));
    Bits found = 0;
    for (const Bits bits : block) {
      found |= static_cast<Bits>((bits & exponent) == exponent);
    }
    if (found != 0) {
      return false;
    }
  }
  return true;
}

// Of one byte, only whether it is NaN.
float number_at(const TensorInfo& tensor, int64_t index) {
  if (tensor.dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, tensor.data.data() + index * 4, sizeof(value));
    return value;
  }
  if (tensor.dtype == DType::kF8E4M3 || tensor.dtype == DType::kF8E8M0) {
    const auto bits = std::to_integer<uint8_t>(tensor.data[static_cast<size_t>(index)]);
    const bool nan = tensor.dtype == DType::kF8E8M0 ? bits == 0xffU : (bits & 0x7fU) == 0x7fU;
    return nan ? std::numeric_limits<float>::quiet_NaN() : 0;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, tensor.data.data() + index * 2, sizeof(bits));
  return tensor.dtype == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

/// Of numbers in memory.
bool all_finite_here(DType dtype, std::span<const std::byte> numbers) {
  switch (dtype) {
    case DType::kF32:
      return none_has<uint32_t>(numbers, 0x7f800000U);
    case DType::kBF16:
      return none_has<uint16_t>(numbers, 0x7f80U);
    case DType::kF16:
      return none_has<uint16_t>(numbers, 0x7c00U);
    case DType::kF8E4M3:  // has no infinity
      return none_has<uint8_t>(numbers, 0x7fU);
    case DType::kF8E8M0:  // has neither infinity nor another NaN
      return std::memchr(numbers.data(), 0xff, numbers.size()) == nullptr;
    default:
      return true;
  }
}

}  // namespace

bool all_finite(DType dtype, std::span<const std::byte> numbers) {
  constexpr size_t kPiece = size_t{32} << 10;  // stays in the first cache
  std::array<std::byte, kPiece> piece;         // NOLINT(cppcoreguidelines-pro-type-member-init)
  while (!numbers.empty()) {
    const size_t count = std::min(numbers.size(), kPiece);
    copy_bytes(numbers.data(), count, piece.data());
    if (!all_finite_here(dtype, {piece.data(), count})) {
      return false;
    }
    numbers = numbers.subspan(count);
  }
  return true;
}

std::string describe_not_finite(const TensorInfo& tensor) {
  if (all_finite(tensor.dtype, tensor.data)) {
    return {};
  }
  int64_t index = 0;
  while (std::isfinite(number_at(tensor, index))) {
    ++index;
  }
  const float number = number_at(tensor, index);
  std::vector<int64_t> place(tensor.shape.size());
  for (size_t axis = place.size(); axis-- > 0;) {
    place[axis] = index % tensor.shape[axis];
    index /= tensor.shape[axis];
  }
  return fmt::format("element {} is {}", shape_text(place), number);
}

Status check_finite(const CheckpointReader& reader, const TensorInfo& tensor) {
  const std::string found = describe_not_finite(tensor);
  return found.empty() ? Status()
                       : make_error(StatusCode::kCorrupt, "{}: {}; {}", reader.where(tensor), found,
                                    kNotFiniteRemedy);
}

Status check_all_finite(const CheckpointReader& reader) {
  for (const TensorInfo* tensor : reader.tensors()) {
    const Status status = check_finite(reader, *tensor);
    reader.drop_pages(*tensor);
    NIBBLE_RETURN_IF_ERROR(status);
  }
  return {};
}

}  // namespace nibble
