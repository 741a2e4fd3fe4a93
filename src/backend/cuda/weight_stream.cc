#include "backend/cuda/weight_stream.h"

#include <algorithm>
#include <array>
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

/// BF16 numbers, aligned to nothing, as f32.
void widen(const std::byte* from, std::span<float> out) {
  constexpr size_t kBlock = 16;  // the compiler turns loops of this fixed length into vector code
  size_t i = 0;
  for (; i + kBlock <= out.size(); i += kBlock) {
    uint16_t halves[kBlock];
    std::memcpy(halves, from + 2 * i, sizeof(halves));
    uint32_t bits[kBlock];
    for (size_t j = 0; j < kBlock; ++j) {
      bits[j] = uint32_t{halves[j]} << 16;
    }
    std::memcpy(&out[i], bits, sizeof(bits));
  }
  for (; i < out.size(); ++i) {
    uint16_t half = 0;
    std::memcpy(&half, from + 2 * i, sizeof(half));
    out[i] = bf16_to_f32(half);
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

void WeightStream::write_codes(const QuantView& part,
                               size_t begin,
                               size_t count,
                               std::byte* out) const {
  part.for_pieces(static_cast<int64_t>(begin), static_cast<int64_t>(count),
                  [&](const std::byte* from, int64_t piece) {
                    copy_(from, static_cast<size_t>(piece), out);
                    if (part.nibbles != NibbleForm()) {
                      canonical_words(part.nibbles, out, piece / 4, out);
                    }
                    out += piece;
                  });
}

void WeightStream::write_scales(const QuantView& part, int64_t first, std::span<float> out) const {
  const bool in_a_row = part.scale_count == QuantView::Scales::kEach && part.scale_stride == 0;
  if (!in_a_row || part.scale_type != DType::kBF16) {
    return part.read_scales(first, out);
  }
  constexpr size_t kPiece = size_t{32} << 10;
  std::array<std::byte, kPiece> piece;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  const std::byte* from = part.scales + first * 2;
  while (!out.empty()) {
    const size_t count = std::min(out.size(), kPiece / 2);
    copy_(from, 2 * count, piece.data());
    widen(piece.data(), out.first(count));
    from += 2 * count;
    out = out.subspan(count);
  }
}

void WeightStream::write_run(const Run& run, size_t begin, size_t count, std::byte* out) const {
  const QuantView& part = *run.part;
  if (run.field == WeightField::kCodes) {
    return device_format(part.format).code != part.format.code
               ? round_to_bf16(part, begin / 2, count / 2, out)
               : write_codes(part, begin, count, out);
  }
  const std::span<float> numbers(reinterpret_cast<float*>(out), count / sizeof(float));
  const auto first = static_cast<int64_t>(begin / sizeof(float));
  if (run.field == WeightField::kScales) {
    write_scales(part, first, numbers);
  } else if (run.field == WeightField::kMinimums) {
    part.read_minimums(first, numbers);
  } else {
    std::transform(part.zeros + first, part.zeros + first + numbers.size(), numbers.begin(),
                   [](int8_t zero) { return static_cast<float>(zero); });
  }
}

void WeightStream::write(size_t begin, size_t count, std::byte* out) const {
  const size_t end = begin + count;
  auto run = std::ranges::upper_bound(runs_, begin, {}, &Run::end);
  for (; run != runs_.end() && run->begin < end; ++run) {
    const size_t first = std::max(begin, run->begin);
    const size_t last = std::min(end, run->end);
    write_run(*run, first - run->begin, last - first, out + (first - begin));
  }
}

}  // namespace nibble::cuda
