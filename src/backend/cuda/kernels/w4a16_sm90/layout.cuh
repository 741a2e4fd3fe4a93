#pragma once

#include <span>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/few.h"

namespace nibble::cuda {

/// Packed INT4 weights with a BF16 scale for each kGroup of K. A pair is 64 rows x 128 of K, made
/// of four slices of 16 rows; a slice has two units of 64 of K: 512 bytes of codes, and 32 bytes of
/// scales for each group in it. Where both are of one group its scales lie between them.
///   codes   [lane 32][k-step 4] words: nibble i is the even element of fragment register i of
///           the lane, nibble 4 + i the odd one (ptx/wgmma.cuh, ptx/mma.cuh; warp w of a warpgroup
///           has slice w); fragment row r of 16 holds channel 2 (r % 8) + r / 8, so that a
///           thread's sums are of neighbouring channels
///   scales  [lane / 4][2] bf16 of the lane's two rows, for each group
/// A matrix is [pairs along K][row blocks of 64], filled up with codes of -8 and scales of 0: what
/// the multiprocessors read at the same time lies together.
template <int kGroup>
struct Int4GroupLayout {
  static constexpr int kCodeBytes = 512;
  static constexpr int kGroupBytes = 32;        // scales of a group
  static constexpr bool kShared = kGroup > 64;  // two units have one group
  static constexpr int kScaleBytes = kShared ? kGroupBytes : 64 / kGroup * kGroupBytes;
  static constexpr int kSliceBytes = 2 * kCodeBytes + (kShared ? 1 : 2) * kScaleBytes;
  static constexpr int kPairBytes = 4 * kSliceBytes;
  static_assert(kGroup == 128 || kGroup == 32);
  static_assert(kSliceBytes == w4a16_slice_bytes(kGroup));

  /// Where codes and scales of the slice's unit 0 or 1 begin.
  static __host__ __device__ constexpr int codes(int unit) {
    return unit == 0 ? 0 : kCodeBytes + kScaleBytes;
  }
  static __host__ __device__ constexpr int scales(int unit) {
    return kShared || unit == 0 ? kCodeBytes : 2 * kCodeBytes + kScaleBytes;
  }
};

/// Kernels for one group size, fewest tokens first.
template <int kGroup>
[[nodiscard]] std::span<const GemmSm90Tile> w4a16_tiles();

}  // namespace nibble::cuda
