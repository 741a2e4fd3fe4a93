#pragma once

#include "bench/cuda/schedules/mixed_gemm.cuh"

// The tiles of one form of the kernel.
namespace nibble::cuda {

template <typename Int8, typename Bf16, typename Tile>
constexpr MixedTile mixed_tile(MixedForm form) {
  return {.tokens = Tile::kTokens,
          .row_blocks = Tile::kRowBlocks,
          .launched = Tile::kResident,
          .form = form,
          .store = Tile::kNibbles ? ActStore::kNibbles : ActStore::kBytes,
          .threads = Tile::kThreads,
          .shared_bytes = MixedShared<Int8, Tile>::kBytes,
          .kernel = mixed_gemm_sm90<Int8, Bf16, Tile>};
}

/// Stages are those that fit beside the sums, or one.
template <typename Int8, typename Bf16, bool kOneStage, ActStore kStore = ActStore::kBytes>
constexpr std::array<MixedTile, 5> mixed_tiles_of(MixedForm form) {
  constexpr auto kStages = [](int stages) { return kOneStage ? 1 : stages; };
  return {mixed_tile<Int8, Bf16, MixedShape<16, 1, kStages(9), 2, kStore>>(form),
          mixed_tile<Int8, Bf16, MixedShape<64, 1, kStages(11), 1, kStore>>(form),
          mixed_tile<Int8, Bf16, MixedShape<64, 2, kStages(6), 1, kStore>>(form),
          mixed_tile<Int8, Bf16, MixedShape<128, 1, kStages(6), 1, kStore>>(form),
          mixed_tile<Int8, Bf16, MixedShape<128, 2, kStages(3), 1, kStore>>(form)};
}

inline constexpr auto kInterleaved = WeightOrder::kInterleaved;
inline constexpr auto kZeros = Widening::kZeros;

}  // namespace nibble::cuda
