#pragma once

// Products of many rows with codes that take long to decode: a run of a tile's columns is decoded
// once for all of them, into the first level cache.

#include "backend/cpu/kernels/gemm_kernels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kExpandedColumns = 256;  // whole blocks; in bf16 a quarter of the first level
constexpr int64_t kExpandedRows = 2 * Simd::kRows + 1;  // from which on it pays

/// Codes of the layout of CodecBf16 that lie in the first level cache.
struct CodecExpanded : CodecBf16 {
  static constexpr bool kNear = true;
};

/// Two neighbouring columns of a step, which bf16 holds exactly, as CodecBf16 reads them.
template <typename Codec, int kColumn>
[[gnu::always_inline]] inline void expand_pair(const typename Codec::Step& step, uint8_t* out) {
  const I32x16 even = Simd::bits(Codec::template column<kColumn, 1>(step));
  const I32x16 odd = Simd::bits(Codec::template column<kColumn + 1, 1>(step));
  const I32x16 pair = Simd::or_int(Simd::shift_right<16>(even), Simd::bits(upper_halves(odd)));
  Simd::store(reinterpret_cast<float*>(out + kColumn / 2 * 64), Simd::from_bits(pair));
}

template <typename Codec>
[[gnu::noinline]] void expand_steps(const uint8_t* codes,
                                    int64_t far,
                                    int64_t steps,
                                    uint8_t* out) {
  for (int64_t i = 0; i < steps; ++i) {
    fetch_ahead(codes, Codec::kStepBytes, far);
    const typename Codec::Step step = Codec::step(codes);
    expand_pair<Codec, 0>(step, out);
    expand_pair<Codec, 2>(step, out);
    expand_pair<Codec, 4>(step, out);
    expand_pair<Codec, 6>(step, out);
    codes += Codec::kStepBytes;
    out += CodecBf16::kStepBytes;
  }
}

/// The same sums as those of float_rows<Codec, Groups::kNone, ...>, in the same order.
template <typename Codec>
void expanded_tile(const GemmTask& task, int64_t tile) {
  alignas(64) uint8_t weights[kExpandedColumns * kTileRows * 2];
  alignas(64) float totals[kRowPanel][kTileRows];
  __builtin_memset(totals, 0, static_cast<size_t>(task.m) * sizeof totals[0]);
  const uint8_t* codes = task.w.codes + tile * task.w.tile_bytes;
  PackedWeights run = task.w;
  run.codes = weights;
  for (int64_t k = 0; k < task.w.k; k += kExpandedColumns) {
    const int64_t left = task.w.k - k;
    run.k = left < kExpandedColumns ? left : kExpandedColumns;
    const int64_t steps = (run.k + kStepColumns - 1) / kStepColumns;
    expand_steps<Codec>(codes, far_ahead(task.w), steps, weights);
    codes += steps * Codec::kStepBytes;
    in_row_blocks<Simd::kRows>(task.m, [&]<int kRows>(int64_t row) {
      F32x16 sums[kRows];
      for (int r = 0; r < kRows; ++r) {
        sums[r] = Simd::load(totals[row + r]);
      }
      tile_product<CodecExpanded, Groups::kNone, kRows>(run, 0, rows_of<kRows>(task, row, k), sums);
      for (int r = 0; r < kRows; ++r) {
        Simd::store(totals[row + r], sums[r]);
      }
    });
  }
  for (int64_t row = 0; row < task.m; ++row) {
    write_rows<1>(task, tile, row, task.w.groups == 1, {Simd::load(totals[row])});
  }
}

template <typename Codec>
void gemm_expanded(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  const bool one_scale = task.w.groups == 0 || task.w.group_size == task.w.k;
  if (!one_scale || task.m < kExpandedRows) {
    return gemm_float<Codec>(task, tile_begin, tile_end);
  }
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    expanded_tile<Codec>(task, tile);
  }
}

}  // namespace
}  // namespace nibble::cpu
