#include "backend/cuda/weight_stream.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/f16.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

/// Weights [begin, begin + count) of an F16 or F32 matrix.
void round_to_bf16(const QuantView& part, size_t begin, size_t count, std::byte* out) {
  const auto convert = [&]<typename T>(auto widen) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    const auto round = [&](const std::byte* from, int64_t bytes) {
      for (int64_t at = 0; at < bytes; at += kSize) {
        T value;
        std::memcpy(&value, from + at, sizeof(T));
        const uint16_t rounded = f32_to_bf16(widen(value));
        std::memcpy(out, &rounded, sizeof(rounded));
        out += sizeof(rounded);
      }
    };
    part.for_pieces(static_cast<int64_t>(begin) * kSize, static_cast<int64_t>(count) * kSize,
                    round);
  };
  if (part.format.code == WeightCode::kF16) {
    convert.operator()<uint16_t>(f16_to_f32);
  } else {
    convert.operator()<float>([](float value) { return value; });
  }
}

/// Bytes [begin, begin + count) of a field.
void write_field(
    const QuantView& part, WeightField field, size_t begin, size_t count, std::byte* out) {
  if (field == WeightField::kCodes) {
    if (device_format(part.format).code != part.format.code) {
      return round_to_bf16(part, begin / 2, count / 2, out);
    }
    return part.copy_codes(static_cast<int64_t>(begin), static_cast<int64_t>(count), out);
  }
  const std::span<float> numbers(reinterpret_cast<float*>(out), count / sizeof(float));
  const auto first = static_cast<int64_t>(begin / sizeof(float));
  if (field == WeightField::kScales) {
    part.read_scales(first, numbers);
  } else if (field == WeightField::kMinimums) {
    part.read_minimums(first, numbers);
  } else {
    std::transform(part.zeros + first, part.zeros + first + numbers.size(), numbers.begin(),
                   [](int8_t zero) { return static_cast<float>(zero); });
  }
}

}  // namespace

WeightFormat device_format(WeightFormat format) {
  if (format.code == WeightCode::kF16 || format.code == WeightCode::kF32) {
    format.code = WeightCode::kBf16;
  }
  if (format.scale_per == ScalePer::kGroup &&
      (format.scale_dtype == DType::kF32 || format.scale_dtype == DType::kF16)) {
    format.scale_dtype = DType::kBF16;
  }
  if (format.scale_per == ScalePer::kTensor) {  // the same scale for every channel
    format.scale_per = ScalePer::kChannel;
  }
  return format;
}

size_t WeightStream::bytes_of(const QuantView& part, WeightField field) {
  const WeightFormat format = device_format(part.format);
  const int64_t row = field == WeightField::kCodes
                          ? QuantTensor::code_row_bytes(format.code, part.k)
                          : format.groups(part.k) * static_cast<int64_t>(sizeof(float));
  return static_cast<size_t>(part.n * row);
}

void WeightStream::add(const QuantView& part, WeightField field) {
  const size_t begin = end_;
  end_ += bytes_of(part, field);
  runs_.push_back({&part, field, begin, end_});
}

void WeightStream::align(size_t alignment) { end_ = round_up(end_, alignment); }

void WeightStream::write(size_t begin, size_t count, std::byte* out) const {
  const size_t end = begin + count;
  auto run = std::ranges::upper_bound(runs_, begin, {}, &Run::end);
  for (; run != runs_.end() && run->begin < end; ++run) {
    const size_t first = std::max(begin, run->begin);
    const size_t last = std::min(end, run->end);
    write_field(*run->part, run->field, first - run->begin, last - first, out + (first - begin));
  }
}

}  // namespace nibble::cuda
