#pragma once

// Products of int4 with rows in blocks of 8 and 16 bits (WideBlocksRow): y = scale of the weights *
// (sum8 * scale8 + sums of blocks of 16 bits * their units). All sums are exact; blocks of 16 bits
// are added up in F32, one after the other, then the sum of 8 bits, so that results have the same
// bits on every instruction set.

#include "backend/cpu/kernels/gemm_blocks.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kOddBytes = 32;                // from even columns to the odd ones behind them
constexpr int64_t kPairColumns = 32;             // that WideBlocksRow puts together
constexpr int64_t kPairBytes = 2 * kOddBytes;    // of their codes
constexpr int64_t kPairStep = kStepColumns / 2;  // even columns of a step

inline bool is_wide(const GemmTask& task, int64_t block) { return task.x_bits[block] == 16; }

inline int64_t block_bytes(const GemmTask& task, int64_t block) {
  return task.x_block * (is_wide(task, block) ? 2 : 1);
}

/// total += sum * unit of a block of 16 bits, of one tile times kRows rows.
template <int kRows>
[[gnu::always_inline]] inline void add_wide_block(const GemmTask& task,
                                                  const uint8_t* codes,
                                                  const uint8_t* x,
                                                  const uint8_t* groups,
                                                  F32x16 (&total)[kRows]) {
  const int64_t far = far_ahead(task.w);
  FixedSums<Zeros::kNone, kRows> sums(groups, task.xq_stride);
#pragma GCC unroll 1
  for (int64_t k = 0; k < task.x_block; k += kPairColumns) {
#pragma GCC unroll 4
    for (int64_t step = 0; step < kPairColumns / kStepColumns; ++step) {
      fetch_ahead(codes, IntCodecInt4::kStepBytes, far);
      sums.add(Simd::load_int(codes), x + 2 * kPairStep * step, kOddBytes);
      codes += IntCodecInt4::kStepBytes;
    }
    x += kPairBytes;
  }
  asm("" : "+r"(groups));  // units are loaded here, not kept through the loop
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float unit = fixed_group(groups + r * task.xq_stride).unit;
    total[r] = Simd::fma(Simd::to_float(sums.of(r)), Simd::set(unit), total[r]);
  }
}

/// One tile times kRows rows.
template <int kRows>
void wide_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  const uint8_t* narrow = x + task.x_code_bytes;
  const uint8_t* groups = narrow + sizeof(FixedGroup);
  const int64_t far = far_ahead(w);
  F32x16 total[kRows];
  set_zero(total);
  I32x16 sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Simd::set_int(fixed_group(narrow + r * task.xq_stride).bias);
  }
  for (int64_t b = 0; b < w.k / task.x_block; ++b) {
    if constexpr (Simd::kFewRegisters) {
      asm volatile("" : "+m"(total));  // the loop over a block needs the registers
    }
    if (is_wide(task, b)) {
      add_wide_block<kRows>(task, codes, x, groups, total);
      groups += sizeof(FixedGroup);
    } else {
      add_block<kRows>(codes, x, task, far, sums);
    }
    codes += task.x_block / kStepColumns * IntCodecInt4::kStepBytes;
    x += block_bytes(task, b);
  }
  const F32x16 scales = load_scales(w, tile);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float unit = fixed_group(narrow + r * task.xq_stride).unit;
    const F32x16 both = Simd::fma(Simd::to_float(sums[r]), Simd::set(unit), total[r]);
    write_tile_row(task, row + r, tile, Simd::mul(scales, both));
  }
}

/// Adds one of the four pairs of columns of a step to the sums of two tiles.
template <int kPair, int kRows>
[[gnu::always_inline]] inline void add_wide_columns(const uint8_t* codes,
                                                    const GemmTask& task,
                                                    const uint8_t* x,
                                                    PairSums<kRows>& sums) {
  const I32x16 mask = Simd::set_int(0x000f000f);
  const I32x16 one = Simd::and_int(Simd::shift_right<4 * kPair>(Simd::load_int(codes)), mask);
  const I32x16 other =
      Simd::and_int(Simd::shift_right<4 * kPair>(Simd::load_int(codes + task.w.tile_bytes)), mask);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const I32x16 two = four_bytes(x + r * task.xq_stride);
    sums[r][0] = Simd::dot_s16(sums[r][0], one, two);
    sums[r][1] = Simd::dot_s16(sums[r][1], other, two);
  }
}

/// Adds a block of 16 bits.
template <int kRows>
[[gnu::always_inline]] inline void add_wide_pair(const GemmTask& task,
                                                 const uint8_t* codes,
                                                 const uint8_t* x,
                                                 PairSums<kRows>& sums) {
  for (int64_t k = 0; k < task.x_block; k += kStepColumns) {
    const uint8_t* at = x + k / kPairColumns * kPairBytes + k % kPairColumns;
    add_wide_columns<0, kRows>(codes, task, at, sums);
    add_wide_columns<1, kRows>(codes, task, at + 4, sums);
    add_wide_columns<2, kRows>(codes, task, at + kOddBytes, sums);
    add_wide_columns<3, kRows>(codes, task, at + kOddBytes + 4, sums);
    codes += IntCodecInt4::kStepBytes;
  }
}

/// Two tiles: all blocks of 16 bits, then those of 8, so that one set of sums is enough.
template <int kRows>
void wide_pair(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* narrow = task.xq + row * task.xq_stride + task.x_code_bytes;
  const uint8_t* groups = narrow + sizeof(FixedGroup);
  F32x16 total[kRows][2];
  clear(total);
  PairSums<kRows> sums;
  const auto add_up = [&](const uint8_t* of) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F32x16 unit = Simd::set(fixed_group(of + r * task.xq_stride).unit);
      total[r][0] = Simd::fma(Simd::to_float(sums[r][0]), unit, total[r][0]);
      total[r][1] = Simd::fma(Simd::to_float(sums[r][1]), unit, total[r][1]);
    }
  };
  const auto in_blocks_of = [&](bool wide, const auto& add) __attribute__((always_inline)) {
    const uint8_t* codes = w.codes + tile * w.tile_bytes;
    const uint8_t* x = task.xq + row * task.xq_stride;
    for (int64_t b = 0; b < w.k / task.x_block; ++b) {
      if (is_wide(task, b) == wide) {
        add(codes, x);
      }
      codes += task.x_block / kStepColumns * IntCodecInt4::kStepBytes;
      x += block_bytes(task, b);
    }
  };
  in_blocks_of(
      true, [&](const uint8_t* codes, const uint8_t* x) __attribute__((always_inline)) {
        asm volatile("" : "+m"(total));  // the loop over a block needs the registers
        start_pair<kRows>(groups, task.xq_stride, sums);
        add_wide_pair<kRows>(task, codes, x, sums);
        add_up(groups);
        groups += sizeof(FixedGroup);
      });
  asm volatile("" : "+m"(total));
  start_pair<kRows>(narrow, task.xq_stride, sums);
  in_blocks_of(
      false, [&](const uint8_t* codes, const uint8_t* x)
                 __attribute__((always_inline)) { add_pair_block<kRows>(task, codes, x, sums); });
  add_up(narrow);
  for (int64_t t = 0; t < 2; ++t) {
    const F32x16 scales = load_scales(w, tile + t);
    for (int r = 0; r < kRows; ++r) {
      write_tile_row(task, row + r, tile + t, Simd::mul(scales, total[r][t]));
    }
  }
}

inline void gemm_wide(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  in_pairs(
      task, {tile_begin, tile_end},
      [&]<int kRows>(int64_t tile, int64_t row) { wide_pair<kRows>(task, tile, row); },
      [&]<int kRows>(int64_t tile, int64_t row) { wide_rows<kRows>(task, tile, row); });
}

}  // namespace
}  // namespace nibble::cpu
