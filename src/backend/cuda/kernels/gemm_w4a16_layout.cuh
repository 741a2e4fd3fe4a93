#pragma once

#include <span>

#include "backend/cuda/kernels/gemm_sm90.h"

namespace nibble::cuda {

/// Packed INT4 weights with a BF16 scale for each kGroup of K. A unit is 64 rows x 64 of K: 2048
/// bytes of codes, and 128 bytes of scales for each group in it. Two units along K make a pair;
/// where both are of one group its scales lie between them.
///   codes   [thread 128][k-step 4] words: nibble i is the even element of fragment register i of
///           the thread, nibble 4 + i the odd one (ptx/wgmma.cuh); fragment row r of 16 holds
///           channel 2 (r % 8) + r / 8, so that a thread's sums are of neighbouring channels
///   scales  [warp 4][lane / 4][2] bf16 of the thread's two rows, for each group
/// A matrix is [row blocks of 64][pairs], filled up with codes of -8 and scales of 0.
template <int kGroup>
struct Int4GroupLayout {
  static constexpr int kCodeBytes = 2048;
  static constexpr bool kShared = kGroup > 64;  // two units have one group
  static constexpr int kScaleBytes = kShared ? 128 : 64 / kGroup * 128;
  static constexpr int kPairBytes = 2 * kCodeBytes + (kShared ? 1 : 2) * kScaleBytes;
  static_assert(kGroup == 128 || kGroup == 32);

  /// Where codes and scales of the pair's unit 0 or 1 begin.
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
