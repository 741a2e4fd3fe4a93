#pragma once

// Products of int4 with rows in blocks of 4 and 8 bits (BlocksRow), whose codes are bytes alike.
// Each block of a row has a scale, and so have as many weights: y += sum * (scale of the row *
// scale of the weights), block after block, in the same order on every instruction set.

#include "backend/cpu/kernels/gemm_fixed.h"

namespace nibble::cpu {
namespace {

/// Adds `columns` of one tile times kRows rows, a multiple of 32.
template <int kRows>
[[gnu::always_inline]] inline void add_block_sums(const uint8_t* codes,
                                                  const uint8_t* x,
                                                  const GemmTask& task,
                                                  int64_t far,
                                                  I32x16 (&sums)[kRows]) {
  constexpr int kSums = Simd::kFewRegisters ? 1 : 2;
  I32x16 odd[kRows];  // of the other half of each step, where registers allow
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    odd[r] = Simd::set_int(0);
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < task.x_block; k += kStepColumns) {
    fetch_ahead(codes, IntCodecInt4::kStepBytes, far);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32x16 four = four_bytes(x + k + r * task.xq_stride);
      sums[r] = IntCodecInt4::dot<0>(sums[r], codes, four);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      I32x16& sum = kSums == 1 ? sums[r] : odd[r];
      sum = IntCodecInt4::dot<1>(sum, codes, four_bytes(x + k + 4 + r * task.xq_stride));
    }
    codes += IntCodecInt4::kStepBytes;
  }
  if constexpr (kSums == 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Simd::add_int(sums[r], odd[r]);
    }
  }
}

/// The same in sums of 16 bits for 32 columns at a time, where vectors have such: see short_sums().
template <typename V, int kRows>
[[gnu::always_inline]] inline void add_short_block(const uint8_t* codes,
                                                   const uint8_t* x,
                                                   const GemmTask& task,
                                                   int64_t far,
                                                   I32x16 (&sums)[kRows]) {
#pragma GCC unroll 1
  for (int64_t k = 0; k < task.x_block; k += 4 * kStepColumns) {
    if constexpr (kRows > 2) {
      asm volatile("" : "+m"(sums));  // the 16-bit sums need the registers
    }
    I32x16 part[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      part[r] = Simd::set_int(0);
    }
#pragma GCC unroll 1  // unrolled, gcc runs out of registers
    for (int64_t step = 0; step < 4; ++step) {
      fetch_ahead(codes, IntCodecInt4::kStepBytes, far);
      add_short_half<V, 0>(codes, x, task.xq_stride, part);
      add_short_half<V, 1>(codes, x, task.xq_stride, part);
      codes += IntCodecInt4::kStepBytes;
      x += kStepColumns;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Simd::add_int(sums[r], V::widen_short(part[r]));
    }
  }
}

template <int kRows>
[[gnu::always_inline]] inline void add_block(const uint8_t* codes,
                                             const uint8_t* x,
                                             const GemmTask& task,
                                             int64_t far,
                                             I32x16 (&sums)[kRows]) {
  if constexpr (IntCodecInt4::kShortSums) {
    add_short_block<Simd, kRows>(codes, x, task, far, sums);
  } else {
    add_block_sums<kRows>(codes, x, task, far, sums);
  }
}

/// total += sum * (scale of the row * scales of the weights).
[[gnu::always_inline]] inline F32x16 add_scaled(I32x16 sum,
                                                float unit,
                                                F32x16 scales,
                                                F32x16 total) {
  return Simd::fma(Simd::to_float(sum), Simd::mul(scales, Simd::set(unit)), total);
}

/// Of one tile and kRows rows.
template <int kRows>
void block_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  const uint8_t* groups = x + task.x_code_bytes;
  const int64_t far = far_ahead(w);
  F32x16 total[kRows];
  set_zero(total);
  for (int64_t scale = tile * w.groups; scale < (tile + 1) * w.groups; ++scale) {
    if constexpr (Simd::kFewRegisters) {
      asm volatile("" : "+m"(total));  // the loop over a block needs the registers
    }
    I32x16 sums[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Simd::set_int(fixed_group(groups + r * task.xq_stride).bias);
    }
    add_block<kRows>(codes, x, task, far, sums);
    codes += task.x_block / kStepColumns * IntCodecInt4::kStepBytes;
    x += task.x_block;
    asm("" : "+r"(groups));  // units are loaded here, not kept through the loop
    const F32x16 scales = load_scales(w, scale);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      total[r] =
          add_scaled(sums[r], fixed_group(groups + r * task.xq_stride).unit, scales, total[r]);
    }
    groups += sizeof(FixedGroup);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    write_tile_row(task, row + r, tile, total[r]);
  }
}

/// Sums of two weight tiles and kRows rows: each activation that is loaded is used twice.
template <int kRows>
using PairSums = I32x16[kRows][2];

/// Where the sums of each row start: with the bias of its group, which follow each other.
template <int kRows>
[[gnu::always_inline]] inline void start_pair(const uint8_t* groups,
                                              int64_t stride,
                                              PairSums<kRows>& sums) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = sums[r][1] = Simd::set_int(fixed_group(groups + r * stride).bias);
  }
}

/// Adds a block of `columns`.
template <int kRows>
[[gnu::always_inline]] inline void add_pair_block(const GemmTask& task,
                                                  const uint8_t* codes,
                                                  const uint8_t* x,
                                                  PairSums<kRows>& sums) {
  for (const uint8_t* end = x + task.x_block; x < end; x += kStepColumns) {
    add_pair_half<IntCodecInt4, 0>(codes, task.w.tile_bytes, x, task.xq_stride, sums);
    add_pair_half<IntCodecInt4, 1>(codes, task.w.tile_bytes, x, task.xq_stride, sums);
    codes += IntCodecInt4::kStepBytes;
  }
}

/// The sums of a block have the registers, the totals lie in memory.
template <int kRows>
void block_pair(const GemmTask& task, int64_t tile, int64_t row) {
  const PackedWeights& w = task.w;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  const uint8_t* groups = x + task.x_code_bytes;
  F32x16 total[kRows][2];
  clear(total);
  for (int64_t g = 0; g < w.groups; ++g) {
    asm volatile("" : "+m"(total));
    PairSums<kRows> sums;
    start_pair<kRows>(groups, task.xq_stride, sums);
    add_pair_block<kRows>(task, codes, x, sums);
    const F32x16 scales[2] = {load_scales(w, tile * w.groups + g),
                              load_scales(w, (tile + 1) * w.groups + g)};
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float unit = fixed_group(groups + r * task.xq_stride).unit;
      total[r][0] = add_scaled(sums[r][0], unit, scales[0], total[r][0]);
      total[r][1] = add_scaled(sums[r][1], unit, scales[1], total[r][1]);
    }
    codes += task.x_block / kStepColumns * IntCodecInt4::kStepBytes;
    x += task.x_block;
    groups += sizeof(FixedGroup);
  }
  for (int64_t t = 0; t < 2; ++t) {
    for (int r = 0; r < kRows; ++r) {
      write_tile_row(task, row + r, tile + t, total[r][t]);
    }
  }
}

/// Rows of one sum each that a weight tile takes at once.
constexpr int kMostBlockRows = IntCodecInt4::kShortSums ? Simd::kShortRows
                               : Simd::kFewRegisters    ? 4
                                                        : Simd::kRows;

struct Tiles {
  int64_t begin;
  int64_t end;
};

/// All rows and some tiles: pairs of these as far as there are rows enough for such.
template <typename Pair, typename Rows>
[[gnu::always_inline]] inline void in_pairs(const GemmTask& task,
                                            const Tiles& tiles,
                                            const Pair& pair,
                                            const Rows& rows) {
  int64_t paired = 0;  // rows that pairs of tiles take
  int64_t pairs_end = tiles.begin;
  if constexpr (Simd::kPairRows > 0) {
    paired = task.m / Simd::kPairRows * Simd::kPairRows;
    pairs_end = tiles.begin + (tiles.end - tiles.begin) / 2 * 2;
    for (int64_t tile = tiles.begin; tile < pairs_end; tile += 2) {
      for (int64_t row = 0; row < paired; row += Simd::kPairRows) {
        pair.template operator()<Simd::kPairRows>(tile, row);
      }
    }
  }
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const int64_t first = tile < pairs_end ? paired : 0;
    in_row_blocks<kMostBlockRows>(task.m - first, [&]<int kRows>(int64_t row) {
      rows.template operator()<kRows>(tile, first + row);
    });
  }
}

inline void gemm_blocks(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  in_pairs(
      task, {tile_begin, tile_end},
      [&]<int kRows>(int64_t tile, int64_t row) { block_pair<kRows>(task, tile, row); },
      [&]<int kRows>(int64_t tile, int64_t row) { block_rows<kRows>(task, tile, row); });
}

}  // namespace
}  // namespace nibble::cpu
