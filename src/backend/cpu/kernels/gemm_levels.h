#pragma once

// Products of INT8 activations with INT4 in groups of two levels (quant/levels.h). A weight,
// (code - zero) * step, becomes a byte of its own in two operations for four of them: step * code
// is at most 225, so that no product of a 16-bit half carries over to its upper byte, and neither
// does the sum with 128 - step * zero, which makes it 1 to 255 (QServe, section 5.2).

#include "backend/cpu/kernels/gemm_kernels.h"

namespace nibble::cpu {
namespace {

/// What the weights of 16 rows in one group are decoded with.
struct LevelsGroup {
  I32x16 steps;    // in both halves
  I32x16 offsets;  // 128 - step * zero in all four bytes, as numbers that borrow from each other

  explicit LevelsGroup(const uint8_t* levels) {
    const I32x16 step = Simd::load_u8(levels);
    const I32x16 zero = Simd::load_u8(levels + kTileRows);
    const I32x16 offset = Simd::sub_int(Simd::set_int(128), Simd::mul_u16(step, zero));
    const I32x16 pair = Simd::add_int(offset, Simd::shift_left<8>(offset));
    steps = Simd::or_int(step, Simd::shift_left<16>(step));
    offsets = Simd::add_int(pair, Simd::shift_left<16>(pair));
  }

  /// Of the group that these codes of a tile belong to.
  static LevelsGroup at(const PackedWeights& w, const uint8_t* codes) {
    const int bits = __builtin_ctzll(static_cast<uint64_t>(8 * w.level_columns));  // of its codes
    return LevelsGroup(w.levels + ((codes - w.codes) >> bits) * kLevelBytes);
  }

  /// Four neighbouring columns of each row, plus 128; kHalf picks them of the step.
  template <int kHalf>
  [[gnu::always_inline]] I32x16 weights(const uint8_t* codes) const {
    const I32x16 nibbles = IntCodecInt4::nibbles<kHalf>(codes);
    return Simd::add_int(Simd::mul_u16(nibbles, steps), offsets);
  }
};

struct IntCodecLevels {  // weights are unsigned, activations signed, where products allow that
  static constexpr bool kSigned = Simd::kInt8Offset == 0;
  [[gnu::always_inline]] static I32x16 dot(I32x16 acc, I32x16 weights, I32x16 x) {
    if constexpr (kSigned) {
      const I32x16 offset = Simd::set_int(static_cast<int>(0x80808080U));
      return Simd::dot_int8(acc, x, Simd::xor_int(weights, offset));
    }
    return Simd::dot_int8(acc, weights, x);
  }
  static I32x16 correction(const ProductTask& task, int64_t /*tile*/, int64_t row) {
    return kSigned ? Simd::set_int(0) : Simd::shift_left<7>(Simd::set_int(task.x_sums[row]));
  }
};

/// Adds a step of eight columns times kRows rows.
template <int kRows>
[[gnu::always_inline]] inline void add_levels_step(const LevelsGroup& group,
                                                   const uint8_t* codes,
                                                   const uint8_t* x,
                                                   int64_t x_stride,
                                                   I32x16 (&acc)[kRows]) {
  const I32x16 low = group.weights<0>(codes);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r] = IntCodecLevels::dot(acc[r], low, four_bytes(x + r * x_stride));
  }
  const I32x16 high = group.weights<1>(codes);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r] = IntCodecLevels::dot(acc[r], high, four_bytes(x + r * x_stride + 4));
  }
}

template <int kRows>
void levels_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  const int64_t far = far_ahead(w);
  I32x16 sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Simd::set_int(0);
  }
  for (int64_t begin = 0; begin < w.k; begin += w.level_columns) {
    const LevelsGroup group = LevelsGroup::at(w, codes);
    for (int64_t k = begin; k < begin + w.level_columns; k += kStepColumns) {
      fetch_ahead(codes, IntCodecInt4::kStepBytes, far);
      add_levels_step<kRows>(group, codes, x + k, task.xq_stride, sums);
      codes += IntCodecInt4::kStepBytes;
    }
  }
  const F32x16 scales = load_scales(w, tile);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    write_tile_row(task, row + r, tile,
                   int_result<IntCodecLevels>(task, row + r, tile, scales, sums[r]));
  }
}

inline void gemm_levels(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  constexpr int kMost = Simd::kFewRegisters ? 4 : Simd::kRows;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    in_row_blocks<kMost>(task.m,
                         [&]<int kRows>(int64_t row) { levels_rows<kRows>(task, tile, row); });
  }
}

}  // namespace
}  // namespace nibble::cpu
