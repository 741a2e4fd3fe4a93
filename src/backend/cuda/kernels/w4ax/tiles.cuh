#pragma once

#include "backend/cuda/kernels/w4ax/few.cuh"
#include "backend/cuda/kernels/w4ax/pack.cuh"
#include "backend/cuda/kernels/w4ax/w4ax_sm90.h"
#include "backend/cuda/kernels/w4ax/wide.cuh"

// The instances of a form of weights.
namespace nibble::cuda {

/// Clocks of a step: W4AxTile::alone, shared.
struct W4AxClocks {
  double alone = 0.0, shared = 0.0;
};

template <typename Form, typename Tile>
constexpr W4AxTile few_tile(W4AxClocks clocks) {
  return {.tokens = Tile::kTokens,
          .rows = Tile::kRows,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .few = true,
          .alone = clocks.alone,
          .shared = clocks.shared,
          .threads = Tile::kThreads,
          .shared_bytes = FewShared<Form, Tile>::kBytes,
          .kernel = w4ax_few_sm90<Form, Tile>};
}
template <typename Form, typename Tile>
constexpr W4AxTile wide_tile(W4AxClocks clocks) {
  return {.tokens = Tile::kTokens,
          .rows = Tile::kRows,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .alone = clocks.alone,
          .shared = clocks.shared,
          .threads = Tile::kThreads,
          .shared_bytes = WideShared<Form, Tile>::kBytes,
          .kernel = w4ax_wide_sm90<Form, Tile>};
}

}  // namespace nibble::cuda
