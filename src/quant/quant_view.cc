#include "quant/quant_view.h"

#include <cstring>

#include "base/f16.h"
#include "quant/codec.h"

namespace nibble {

namespace {

// The compiler turns loops of this fixed length into vector code.
constexpr size_t kBlock = 16;

// The numbers of decode_e8m0(): a code is an exponent, but that 0 and NaN have a bit below it.
void read_powers(const std::byte* from, std::span<float> out) {
  size_t i = 0;
  for (; i + kBlock <= out.size(); i += kBlock) {
    uint32_t bits[kBlock];
    for (size_t j = 0; j < kBlock; ++j) {
      const auto code = std::to_integer<uint32_t>(from[i + j]);
      bits[j] = code << 23 | (((code + 1) & 255U) <= 1 ? 0x00400000U : 0U);
    }
    std::memcpy(&out[i], bits, sizeof(bits));
  }
  for (; i < out.size(); ++i) {
    out[i] = decode_e8m0(std::to_integer<uint8_t>(from[i]));
  }
}

// Number `index` of those that lie at `from` in a type of scales.
float number_at(const std::byte* from, DType type, int64_t index) {
  if (type == DType::kF8E8M0) {
    return decode_e8m0(std::to_integer<uint8_t>(from[index]));
  }
  if (type == DType::kF32) {
    float value = 0;
    std::memcpy(&value, from + index * 4, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from + index * 2, 2);
  return type == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void read_numbers(const std::byte* from, DType type, int64_t first, std::span<float> out) {
  if (out.empty()) {
    return;  // a matrix without scales has no memory for them
  }
  if (type == DType::kF32) {
    std::memcpy(out.data(), from + first * 4, out.size_bytes());
  } else if (type == DType::kBF16) {
    from += first * 2;  // groups, which are many
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + i * 2, 2);
      out[i] = bf16_to_f32(bits);
    }
  } else if (type == DType::kF8E8M0) {
    read_powers(from + first, out);
  } else {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = number_at(from, type, first + static_cast<int64_t>(i));
    }
  }
}

}  // namespace

float QuantView::scale(int64_t index) const {
  if (scale_stride != 0) {
    const int64_t groups = format.groups(k);
    index = index / groups * scale_stride + index % groups;
  }
  return number_at(scales, scale_type, scale_count == Scales::kEach ? index : 0);
}

void QuantView::read_scales(int64_t first, std::span<float> out) const {
  if (scale_count == Scales::kOneForAll) {
    std::ranges::fill(out, scale(0));
    return;
  }
  if (scale_stride == 0) {
    return read_numbers(scales, scale_type, first, out);
  }
  const int64_t groups = format.groups(k);
  while (!out.empty()) {
    const int64_t group = first % groups;
    const int64_t count = std::min(groups - group, std::ssize(out));
    read_numbers(scales, scale_type, first / groups * scale_stride + group,
                 out.first(static_cast<size_t>(count)));
    out = out.subspan(static_cast<size_t>(count));
    first += count;
  }
}

float QuantView::minimum(int64_t index) const { return number_at(minimums, scale_type, index); }

void QuantView::read_minimums(int64_t first, std::span<float> out) const {
  read_numbers(minimums, scale_type, first, out);
}

void QuantView::copy_codes(int64_t begin, int64_t bytes, std::byte* out) const {
  for_pieces(begin, bytes, [&](const std::byte* from, int64_t piece) {
    if (nibbles == NibbleForm()) {
      std::memcpy(out, from, static_cast<size_t>(piece));
    } else {
      canonical_words(nibbles, from, piece / 4, out);
    }
    out += piece;
  });
}

QuantView view_of(const QuantTensor& tensor) {
  return {.format = tensor.format,
          .n = tensor.n,
          .k = tensor.k,
          .codes = tensor.codes.data(),
          .scales = tensor.scales.data(),
          .scale_type = DType::kF32,
          .scale_count = QuantView::Scales::kEach,
          .zeros = tensor.format.zero_points == ZeroPoints::kPerScale
                       ? reinterpret_cast<const int8_t*>(tensor.zeros.data())
                       : nullptr,
          .minimums =
              tensor.format.zero_points == ZeroPoints::kMinimum ? tensor.minimums.data() : nullptr,
          .name = fmt::format("weights [{}, {}]", tensor.n, tensor.k)};
}

Result<QuantTensor> copy_of(const QuantView& view) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor tensor, QuantTensor::allocate(view.format, view.n, view.k));
  view.copy_codes(0, std::ssize(tensor.codes), tensor.codes.data());
  if (view.format.code == WeightCode::kInt4 && view.k % 8 != 0) {
    const uint32_t kept = (1U << (4 * (view.k % 8))) - 1;
    for (int64_t row = 1; row <= view.n; ++row) {
      std::byte* last = tensor.codes.data() + row * view.row_bytes() - 4;
      uint32_t word = 0;
      std::memcpy(&word, last, 4);
      word &= kept;
      std::memcpy(last, &word, 4);
    }
  }
  view.read_scales(0, tensor.scales.as<float>());
  if (tensor.zeros.size() > 0) {
    std::memcpy(tensor.zeros.data(), view.zeros, tensor.zeros.size());
  }
  if (tensor.minimums.size() > 0) {
    view.read_minimums(0, tensor.minimums.as<float>());
  }
  return tensor;
}

}  // namespace nibble
