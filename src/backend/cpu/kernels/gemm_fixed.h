#pragma once

// Products of bf16 activations in fixed point (FixedRow) and int4: exact sums of each group.

#include "backend/cpu/kernels/gemm_kernels.h"

namespace nibble::cpu {
namespace {

template <int kPair, int kRows>
[[gnu::always_inline]] inline void add_fixed_pair(I32x16 word,
                                                  const uint8_t* x,
                                                  int64_t x_stride,
                                                  I32x16 (&sums)[kRows]) {
  const I32x16 codes = Simd::and_int(Simd::shift_right<4 * kPair>(word), Simd::set_int(0x000f000f));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Simd::dot_s16(sums[r], codes, four_bytes(x + r * x_stride));
  }
}

inline FixedGroup fixed_group(const uint8_t* p) {
  FixedGroup group;
  __builtin_memcpy(&group, p, sizeof group);
  return group;
}

/// What groups have beside their scales.
enum class Zeros { kNone, kEach, kMinimums };

/// Where a group's sum starts: codes count from their lowest where minimums do, else from 0.
template <Zeros kZeros>
[[gnu::always_inline]] inline I32x16 first_sum(const uint8_t* group) {
  return Simd::set_int(kZeros == Zeros::kMinimums ? 0 : fixed_group(group).bias);
}

/// The sums of a group of a tile and kRows rows.
template <Zeros kZeros, int kRows>
class FixedSums {
 public:
  [[gnu::always_inline]] FixedSums(const uint8_t* groups, int64_t stride) : stride_(stride) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums_[r] = first_sum<kZeros>(groups + r * stride);
    }
  }

  /// A step, of whose pairs of activations two follow each other and two lie `apart` behind them.
  [[gnu::always_inline]] void add(I32x16 word, const uint8_t* x, int64_t apart = 8) {
    add_fixed_pair<0>(word, x, stride_, sums_);
    add_fixed_pair<1>(word, x + 4, stride_, sums_);
    add_fixed_pair<2>(word, x + apart, stride_, sums_);
    add_fixed_pair<3>(word, x + apart + 4, stride_, sums_);
  }

  [[nodiscard]] I32x16 of(int row) const { return sums_[row]; }

 private:
  int64_t stride_;
  I32x16 sums_[kRows];
};

/// Of one row: codes are multiplied where they lie in a word, so that sums count 1, 16, 256 and 1.
/// Up to 32 codes of 15 times 256 and 2^14 are less than 2^31.
template <Zeros kZeros>
class FixedSums<kZeros, 1> {
 public:
  [[gnu::always_inline]] FixedSums(const uint8_t* groups, int64_t /*stride*/)
      : sums_{first_sum<kZeros>(groups), Simd::set_int(0), Simd::set_int(0), Simd::set_int(0)} {}

  [[gnu::always_inline]] void add(I32x16 word, const uint8_t* x, int64_t apart = 8) {
    word = Simd::in_register(word);
    const auto codes = [&](int32_t mask) { return Simd::and_int(word, Simd::set_int(mask)); };
    sums_[0] = Simd::dot_s16(sums_[0], codes(0x000f000f), four_bytes(x));
    sums_[1] = Simd::dot_s16(sums_[1], codes(0x00f000f0), four_bytes(x + 4));
    sums_[2] = Simd::dot_s16(sums_[2], codes(0x0f000f00), four_bytes(x + apart));
    sums_[kUpper] =
        Simd::dot_s16(sums_[kUpper], Simd::upper_nibbles(word), four_bytes(x + apart + 4));
  }

  [[nodiscard]] I32x16 of(int /*row*/) const {
    const I32x16 whole = kUpper == 0 ? sums_[0] : Simd::add_int(sums_[0], sums_[kUpper]);
    return Simd::add_int(Simd::add_int(whole, Simd::shift_right_signed<4>(sums_[1])),
                         Simd::shift_right_signed<8>(sums_[2]));
  }

 private:
  static constexpr int kUpper = Simd::kFewRegisters ? 0 : 3;
  I32x16 sums_[4];
};

/// The sum of a group's activations, in its unit: at most 2^21, exact in f32.
inline float sum_of_codes(const FixedGroup& group) {
  const int32_t sum = -group.bias / 8;  // exact: the bias is -8 times the sum
  return static_cast<float>(sum);
}

/// The sums of a group's codes minus zero points. Sums of codes, of at most 2^24, are exact in f32,
/// so that only the result is rounded, once.
[[gnu::always_inline]] inline F32x16 minus_zeros(F32x16 sums,
                                                 F32x16 zeros,
                                                 const FixedGroup& group) {
  return Simd::fma(Simd::sub(Simd::set(0.0F), zeros), Simd::set(sum_of_codes(group)), sums);
}

/// One tile times kRows rows.
template <Zeros kZeros, int kRows>
void fixed_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  const uint8_t* groups = x + 2 * w.k;
  const int64_t far = far_ahead(w);
  F32x16 total[kRows];
  set_zero(total);
  for (int64_t scale = tile * w.groups; scale < (tile + 1) * w.groups; ++scale) {
    if constexpr (Simd::kFewRegisters && kRows > 1) {
      asm volatile("" : "+m"(total));  // the loop over a group needs the registers
    }
    FixedSums<kZeros, kRows> sums(groups, task.xq_stride);
    for (int64_t k = 0; k < w.group_size; k += kStepColumns) {
      fetch_ahead(codes, CodecInt4::kStepBytes, far);
      sums.add(Simd::load_int(codes), x);
      codes += CodecInt4::kStepBytes;
      x += 2 * kStepColumns;
    }
    asm("" : "+r"(groups));  // units are loaded here, not kept through the loop
    const F32x16 scales = load_scales(w, scale);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FixedGroup group = fixed_group(groups + r * task.xq_stride);
      F32x16 sum = Simd::to_float(sums.of(r));
      if constexpr (kZeros == Zeros::kEach) {
        sum = minus_zeros(sum, load_zeros(w, scale), group);
      }
      total[r] = Simd::fma(Simd::mul(sum, Simd::set(group.unit)), scales, total[r]);
      if constexpr (kZeros == Zeros::kMinimums) {
        const float x_sum = sum_of_codes(group) * group.unit;
        total[r] = Simd::fma(Simd::set(x_sum), load_minimums(w, scale), total[r]);
      }
    }
    groups += sizeof(FixedGroup);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    write_tile_row(task, row + r, tile, total[r]);
  }
}

template <Zeros kZeros>
void gemm_fixed(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    in_row_blocks<Simd::kFixedRows>(
        task.m, [&]<int kRows>(int64_t row) { fixed_rows<kZeros, kRows>(task, tile, row); });
  }
}

}  // namespace
}  // namespace nibble::cpu
