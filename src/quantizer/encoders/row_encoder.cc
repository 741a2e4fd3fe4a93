#include "quantizer/encoders/row_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "quant/codec.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

// Squares between these, and sums of 512 of them, stay normal numbers.
constexpr float kSquareLow = 0x1p-40F;
constexpr float kSquareHigh = 0x1p40F;

}  // namespace

RowEncoder::RowEncoder(const EncoderOptions& options,
                       const rows::RowKernels& kernels,
                       int64_t n,
                       int64_t k)
    : format_(options.scheme.weight), rule_(options.rule), kernels_(kernels), n_(n), k_(k) {
  slots_ = linear_slots(options.scheme, options.dialect, n, k);
}

MatrixEncoder::Place RowEncoder::place(size_t slot, int64_t row, int64_t rows) const {
  const TensorSlot& tensor = slots_[slot];
  if (tensor.shape.size() == 1 && tensor.shape[0] != n_) {  // a shape, or the tensor's one scale
    return {0, row == 0 ? tensor.shape[0] * dtype_bits(tensor.dtype) / 8 : 0};
  }
  const int64_t width = tensor.shape.size() == 1 ? 1 : tensor.shape[1];
  const int64_t bytes = width * dtype_bits(tensor.dtype) / 8;
  if (tensor.shape[0] == n_) {
    return {row * bytes, rows * bytes};
  }
  // Several rows share one of the tensor.
  return {row / row_block() * bytes, (rows + row_block() - 1) / row_block() * bytes};
}

Status RowEncoder::find_absmax(
    const Rows& all, const float* x, int64_t groups, int64_t width, float* absmax) const {
  kernels_.absmax(x, groups, width, absmax);
  if (std::all_of(absmax, absmax + groups, [](float value) { return std::isfinite(value); })) {
    return {};
  }
  return absmax_of(all.x, all.row, all.rows, k_).status();
}

bool RowEncoder::extreme(const Encoded& encoded) {
  return std::any_of(encoded.absmax, encoded.absmax + encoded.groups, [](float value) {
    return value != 0 && (value < kSquareLow || value > kSquareHigh);
  });
}

void RowEncoder::encode_groups(rows::RowKernels::Encode encode,
                               const Encoded& encoded,
                               std::byte* codes,
                               Tally& tally) const {
  const rows::EncodeArgs args = {.x = encoded.x,
                                 .groups = encoded.groups,
                                 .width = encoded.width,
                                 .scales = encoded.scales,
                                 .zeros = encoded.zeros,
                                 .codes = reinterpret_cast<uint8_t*>(codes)};
  note(encoded, tally);
  if (encoded.original != nullptr) {
    rows::Sums unused;
    encode(args, unused);
    add_given(encoded, tally);
    return;
  }
  if (!extreme(encoded)) {
    encode(args, tally.sums);
    return;
  }
  rows::Sums unused;
  encode(args, unused);
  tally.rest.clipped += unused.clipped;
  WeightFormat one = format_;
  one.scale_per = encoded.scales == nullptr ? ScalePer::kNone : ScalePer::kChannel;
  one.group_size = 0;
  std::vector<float> decoded(static_cast<size_t>(encoded.width));
  for (int64_t g = 0; g < encoded.groups; ++g) {
    const float* x = encoded.x + g * encoded.width;
    const auto zero = static_cast<int8_t>(encoded.zeros == nullptr ? 0 : encoded.zeros[g]);
    const float scale = encoded.scales == nullptr ? 1.0F : encoded.scales[g];
    one.zero_points = ZeroPoints::kNone;
    if (encoded.zeros != nullptr) {
      one.scale_per = ScalePer::kGroup;
      one.group_size = static_cast<int>(encoded.width);
      one.zero_points = ZeroPoints::kPerScale;
    }
    fake_quant_row(one, x, encoded.width, {&scale, &zero}, decoded.data());
    add_decoded(x, decoded.data(), encoded.width, tally.rest);
  }
}

void RowEncoder::add_given(const Encoded& encoded, Tally& tally) const {
  constexpr float kBeyondFp4 = 7;  // half a step past the largest number
  const bool integer = is_integer(format_.code);
  const CodeRange range = integer ? code_range(format_.code) : CodeRange{-kE2M1Max, kE2M1Max};
  const float slack = integer ? 0.5F : kBeyondFp4 - kE2M1Max;
  add_decoded(encoded.original, encoded.x, encoded.groups * encoded.width, tally.rest);
  for (int64_t i = 0; i < encoded.groups * encoded.width; ++i) {
    const int64_t group = i / encoded.width;
    const float zero = encoded.zeros == nullptr ? 0.0F : encoded.zeros[group];
    const float steps = encoded.original[i] / encoded.scales[group] + zero;
    tally.rest.clipped += steps < range.low - slack || steps > range.high + slack ? 1 : 0;
  }
}

const float* RowEncoder::importance_of(const ScaleSearch& search,
                                       int64_t first,
                                       int64_t groups,
                                       std::vector<float>& memory) const {
  if (search.importance == nullptr) {
    return nullptr;
  }
  const int64_t per_row = format_.groups(k_);
  CHECK_GT(per_row, 0);
  const int64_t width = k_ / per_row;
  memory.resize(static_cast<size_t>(groups * width));
  for (int64_t g = 0; g < groups; ++g) {
    std::copy_n(search.importance + (first + g) % per_row * width, width,
                memory.begin() + g * width);
  }
  return memory.data();
}

void RowEncoder::note(const Encoded& encoded, Tally& tally) {
  RowsError& rest = tally.rest;
  if (encoded.scales != nullptr) {
    float low = rest.count == 0 ? std::fabs(encoded.scales[0]) : rest.scale_low;
    float high = rest.scale_high;
    for (int64_t g = 0; g < encoded.groups; ++g) {
      const float size = std::fabs(encoded.scales[g]);
      low = std::min(low, size);
      high = std::max(high, size);
    }
    rest.scale_low = low;
    rest.scale_high = high;
  }
  rest.count += encoded.groups * encoded.width;
}

RowsError RowEncoder::total(const Tally& tally) {
  RowsError error = tally.rest;
  for (int i = 0; i < rows::kLanes; ++i) {
    error.signal += tally.sums.signal[i];
    error.noise += tally.sums.noise[i];
    error.product += tally.sums.product[i];
    error.energy += tally.sums.energy[i];
    error.max_error = std::max(error.max_error, tally.sums.max_error[i]);
  }
  error.clipped += tally.sums.clipped;
  error.zeros += tally.sums.lost;
  return error;
}

void RowEncoder::write_shape(int64_t row, std::byte* out) const {
  if (row == 0) {
    const int64_t shape[2] = {n_, k_};
    std::memcpy(out, shape, sizeof(shape));
  }
}

void add_decoded(const float* x, const float* decoded, int64_t count, RowsError& error) {
  for (int64_t i = 0; i < count; ++i) {
    const double from = x[i];
    const double to = decoded[i];
    error.signal += from * from;
    error.noise += (from - to) * (from - to);
    error.product += from * to;
    error.energy += to * to;
    error.max_error = std::max(error.max_error, std::fabs(x[i] - decoded[i]));
    error.zeros += x[i] != 0 && decoded[i] == 0 ? 1 : 0;
  }
}

void store_scales(DType dtype, const float* scales, int64_t count, std::byte* out) {
  if (dtype != DType::kBF16) {
    std::memcpy(out, scales, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = f32_to_bf16(scales[i]);
    std::memcpy(out + i * 2, &bits, 2);
  }
}

}  // namespace nibble
