#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "quant/nibbles.h"

namespace nibble {

/// What one stored code is.
enum class CodeForm : uint8_t {
  kNibbles,     // eight in a word of 32 bits
  kInt8,        // two's complement
  kInt8Offset,  // code + 128
  kE4M3,
  kE2M1,  // two in a byte, the even element in the low half
};

/// Numbers of codes that lie one after another: integers -8..7 and -128..127, or what the small
/// float means. Exact; E4M3 NaN gives NaN.
///   in   bytes that hold `count` codes, whole words for nibbles; aligned to nothing
///   out  [count] f32
void decode_levels(
    CodeForm form, NibbleForm nibbles, const std::byte* in, int64_t count, float* out);

/// decode_levels() and apply_scales() without zeros in one pass, with the same bits. group_size
/// must be a multiple of 32.
struct ScaledCodes {
  CodeForm form = CodeForm::kInt8;
  NibbleForm nibbles;
  const std::byte* in = nullptr;
  int64_t count = 0;
  const float* scales = nullptr;
  int64_t group_size = 0;
};
void decode_scaled(const ScaledCodes& codes, float* out);

/// Numbers of nibbles that lie along the other axis of a matrix.
///   in    `count` words, `stride` bytes apart; each holds eight elements of different rows
///   out   element e of word i goes to out[(e - first) * row_stride + i], for e in
///         [first, last)
struct AcrossBlock {
  const std::byte* in = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
  int first = 0;
  int last = 8;
  int64_t row_stride = 0;
};
void decode_across(NibbleForm nibbles, const AcrossBlock& block, float* out);

/// x[i] = (x[i] - zeros[g]) * scales[g] with g = i / group_size, each rounded to f32.
///   x [count] f32   zeros may be nullptr: nothing is subtracted
void apply_scales(
    const float* scales, const float* zeros, int64_t group_size, int64_t count, float* x);

/// The same with g = index[i].
void apply_scales_by_index(
    const float* scales, const float* zeros, const int32_t* index, int64_t count, float* x);

/// Whether one of the bytes is an E4M3 NaN.
[[nodiscard]] bool has_e4m3_nan(const std::byte* in, int64_t count);

/// `count` numbers of F32, F16 or BF16, aligned to nothing, as f32. Infinities and NaN pass.
void decode_plain(DType dtype, const std::byte* in, int64_t count, float* out);

}  // namespace nibble
