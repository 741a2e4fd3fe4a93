#include "backend/cpu/row_rounder.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "backend/cpu/numbers.h"
#include "base/math.h"

namespace nibble::cpu {
namespace {

constexpr float kInt8Max = 127.0F;
constexpr float kFp8Max = 448.0F;
constexpr int64_t kFp8GroupColumns = 128;  // of ActFormat::kFp8Group

}  // namespace

RowRounder::RowRounder(const PackedMatrix& matrix,
                       const ActSpec& spec,
                       Fixed fixed,
                       const KernelTable& kernels,
                       Workspace& workspace)
    : kernels_(kernels),
      workspace_(workspace),
      spec_(spec),
      k_(matrix.k()),
      group_size_(matrix.format().group_size),
      block_scales_(block_scales_of(matrix.format(), spec.format)),
      fixed_(fixed == Fixed::kYes) {
  const bool both =
      spec.format == ActFormat::kInt8Token && matrix.format().code == WeightCode::kInt8;
  int8_offset_ = both ? kernels.int8_offset : 0;
}

bool RowRounder::rounds_like(const RowRounder& other) const {
  return spec_ == other.spec_ && k_ == other.k_ && int8_offset_ == other.int8_offset_ &&
         (blocks() == nullptr || block_scales_ == other.block_scales_) && fixed_ == other.fixed_ &&
         (!fixed_ || group_size_ == other.group_size_);
}

bool RowRounder::reads_as_given(DType type, const GemmInput& input) const {
  return spec_.format == ActFormat::kFloat && spec_.columns == nullptr &&
         input.kind == GemmInput::Kind::kPlain && type == DType::kF32;
}

int64_t RowRounder::row_bytes() const {
  if (fixed_) {
    return 2 * k_ + k_ / group_size_ * static_cast<int64_t>(sizeof(FixedGroup));
  }
  if (blocks() != nullptr && !in_classes()) {
    return code_bytes() +
           scale_count(*blocks(), block_scales_) * static_cast<int64_t>(sizeof(FixedGroup));
  }
  return is_integer(spec_.format) ? pieces() * 64 : k_ * 4;
}

bool RowRounder::has_token_scale() const {
  return spec_.format == ActFormat::kInt8Token || spec_.format == ActFormat::kFp8Token ||
         in_classes();
}

int64_t RowRounder::code_bytes() const {
  const int64_t wide =
      block_scales_ == BlockScales::kWide ? scale_count(*blocks(), block_scales_) - 1 : 0;
  return round_up(k_ + wide * blocks()->block, 64);
}

int64_t RowRounder::scaled_blocks() const {
  const bool each = blocks() != nullptr && block_scales_ == BlockScales::kEach;
  return each ? scale_count(*blocks(), block_scales_) : 0;
}

int64_t RowRounder::pieces() const {
  const bool narrow = scaled_blocks() > 0 && blocks()->block == 32;  // bf16 codes in tiles
  const int64_t columns = is_integer(spec_.format) && !narrow ? 64 : 32;
  return (k_ + columns - 1) / columns;
}

/// Asks for a row of activations, into the second level: memory is slower than rounding.
void RowRounder::fetch(const void* row, DType type, const GemmInput& input) const {
  constexpr int64_t kLine = 64;
  const int64_t bytes = input_width(input.kind, k_) * dtype_bits(type) / 8;
  for (int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const uint8_t*>(row) + at, 0, 2);
  }
}

ConstNumbers RowRounder::input_row(ConstActivations x,
                                   const GemmInput& input,
                                   float* buffer) const {
  if (input.kind == GemmInput::Kind::kPlain) {
    return numbers_of(x);
  }
  const bool to_int8 = is_integer(spec_.format);
  kernels_.make_input({.x = numbers_of(x),
                       .k = k_,
                       .input = input,
                       .silu = to_int8 ? silu_of_int8(input.kind) : SiluForm{}},
                      buffer);
  return {buffer, Element::kF32};
}

ConstNumbers RowRounder::specified_row(ConstNumbers row, float* buffer, int thread) const {
  if (spec_.columns == nullptr && spec_.static_scale == 0.0F) {
    return row;
  }
  const float* from = floats_of(row, buffer);
  float* out = spec_.columns == nullptr ? buffer : workspace_.spare_row(thread);
  const float limit = spec_.static_scale * largest_code();
  for (int64_t i = 0; i < k_; ++i) {
    const float x = from[spec_.columns == nullptr ? i : (*spec_.columns)[static_cast<size_t>(i)]];
    out[i] = limit == 0.0F || !std::isfinite(x) ? x : std::clamp(x, -limit, limit);
  }
  return {out, Element::kF32};
}

float RowRounder::largest_code() const {
  return spec_.format == ActFormat::kInt8Token ? kInt8Max : kFp8Max;
}

float RowRounder::given_largest(ConstNumbers row) const {
  if (spec_.static_scale == 0.0F) {
    return 0.0F;
  }
  const std::span<const float> x(static_cast<const float*>(row.data), static_cast<size_t>(k_));
  const bool finite = std::ranges::all_of(x, [](float value) { return std::isfinite(value); });
  return finite ? spec_.static_scale * largest_code() : 0.0F;  // else it becomes NaN by its own
}

void RowRounder::round_fp8_groups(const float* x, float* out) const {
  for (int64_t begin = 0; begin < k_; begin += kFp8GroupColumns) {
    const int64_t columns = std::min(kFp8GroupColumns, k_ - begin);
    const float scale = kernels_.quantize_fp8(x + begin, columns, 0.0F, out + begin);
    for (int64_t i = begin; i < begin + columns; ++i) {
      out[i] *= scale;
    }
  }
}

const float* RowRounder::floats_of(ConstNumbers row, float* buffer) const {
  if (row.type == Element::kF32) {
    return static_cast<const float*>(row.data);
  }
  kernels_.load(row, k_, buffer);
  return buffer;
}

void RowRounder::to_int8(ConstNumbers x, const void* next, const RoundedRow& to) const {
  const bool tiles = to.slab_stride != 0;
  const Int8RowResult result = kernels_.quantize_int8({.x = x,
                                                       .k = k_,
                                                       .offset = int8_offset_,
                                                       .largest = given_largest(x),
                                                       .out = to.out,
                                                       .piece_stride = tiles ? kTileBytes : 64,
                                                       .slab_stride = tiles ? to.slab_stride : 512,
                                                       .next = next});
  *to.scale = result.scale;
  *to.sum = result.sum;
}

void RowRounder::to_blocks(ConstNumbers x, const RoundedRow& to, int thread) const {
  const BlockPrecision& precision = *blocks();
  const bool tiles = to.slab_stride != 0;
  const bool narrow = tiles && precision.block == 32;
  BlocksRow row{.x = x,
                .k = k_,
                .block = precision.block,
                .bits = precision.bits.data(),
                .clip = precision.clip,
                .out = to.out};
  if (!tiles) {
    row.groups = reinterpret_cast<FixedGroup*>(to.out + code_bytes());
    return kernels_.quantize_blocks(row);
  }
  row.scales = to.scale;
  if (!narrow) {
    row.piece_stride = kTileBytes;
    row.slab_stride = to.slab_stride;
    return kernels_.quantize_blocks(row);
  }
  auto* codes = reinterpret_cast<int8_t*>(workspace_.spare_row(thread));
  row.out = reinterpret_cast<uint8_t*>(codes);
  kernels_.quantize_blocks(row);
  kernels_.bf16_pieces(codes, k_, to.out, to.slab_stride);
}

void RowRounder::to_classes(ConstNumbers x, const RoundedRow& to) const {
  const bool tiles = to.slab_stride != 0;
  const Int8RowResult result =
      kernels_.quantize_classes({.x = x,
                                 .k = k_,
                                 .block = blocks()->block,
                                 .bits = blocks()->bits.data(),
                                 .clip = blocks()->clip,
                                 .out = to.out,
                                 .piece_stride = tiles ? kTileBytes : 64,
                                 .slab_stride = tiles ? to.slab_stride : 512});
  *to.scale = result.scale;
  *to.sum = result.sum;
}

void RowRounder::to_wide_blocks(ConstNumbers x, const RoundedRow& to) const {
  kernels_.quantize_wide_blocks({.x = x,
                                 .k = k_,
                                 .block = blocks()->block,
                                 .bits = blocks()->bits.data(),
                                 .out = to.out,
                                 .groups = reinterpret_cast<FixedGroup*>(to.out + code_bytes())});
}

void RowRounder::to_floats(ConstNumbers x, float* buffer, const RoundedRow& to) const {
  const bool tiles = to.slab_stride != 0;
  const ActFormat act = spec_.format;
  const float* floats = floats_of(x, buffer);
  float* out = tiles ? buffer : reinterpret_cast<float*>(to.out);
  if (act == ActFormat::kFp8Token) {
    *to.scale = kernels_.quantize_fp8(floats, k_, given_largest(x), out);
    if (tiles) {
      kernels_.round_pieces({out, Element::kF32}, k_, to.out, to.slab_stride);
    }
  } else if (act == ActFormat::kFp8Group) {
    round_fp8_groups(floats, out);
  } else if (act == ActFormat::kBf16) {
    kernels_.round_bf16(floats, k_, out);
  } else {
    std::copy_n(floats, k_, out);
  }
}

void RowRounder::round(ConstActivations given,
                       const GemmInput& input,
                       const void* next,
                       const RoundedRow& to,
                       int thread) const {
  float* buffer = workspace_.row(thread);
  const bool int8 = spec_.format == ActFormat::kInt8Token;
  // Rows of BF16 that are quantized as they are given are fetched while that is done.
  const bool as_given = int8 && input.kind == GemmInput::Kind::kPlain &&
                        given.type == DType::kBF16 && spec_ == ActSpec(spec_.format);
  if (next != nullptr && !as_given) {
    fetch(next, given.type, input);
  }
  const ConstNumbers x = specified_row(input_row(given, input, buffer), buffer, thread);
  const bool tiles = to.slab_stride != 0;
  if (int8) {
    to_int8(x, as_given ? next : nullptr, to);
  } else if (spec_.format == ActFormat::kBf16Blocks) {
    to_wide_blocks(x, to);
  } else if (in_classes()) {
    to_classes(x, to);
  } else if (blocks() != nullptr) {
    to_blocks(x, to, thread);
  } else if (fixed_) {
    const FixedRow fixed{.x = x, .k = k_, .group_size = group_size_, .out = to.out};
    tiles ? kernels_.fixed_pieces(fixed, to.slab_stride) : kernels_.round_fixed(fixed);
  } else if (tiles && spec_.format != ActFormat::kFp8Token) {
    kernels_.round_pieces(x, k_, to.out, to.slab_stride);
  } else {
    to_floats(x, buffer, to);
  }
}

}  // namespace nibble::cpu
