#pragma once

// The order in which a thread goes through a product in tiles: blocks of 16 weight tiles (256
// output channels), in each the columns in blocks of 8 tile products (a slab of activations), in
// each pairs of weight tiles, in each all rows. What the next step needs is fetched during this
// one.

#include "backend/cpu/amx/amx_panels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kBlockTiles = kTileSumColumns / kTileRows;  // weight tiles of a block
constexpr int64_t kStepTiles = 2;                             // of a step

/// Where a block of products lies along k.
struct KBlock {
  int64_t first;  // product
  int64_t count;
  bool starts;  // sums begin at zero
  bool ends;    // sums are complete
};

/// The activations of a tile of rows in a block of columns, which is one slab.
inline const uint8_t* block_rows(const TileGemmTask& task, const KBlock& block, int64_t row) {
  return task.x + block.first / kSlabPieces * task.slab_stride +
         row / 16 * kSlabPieces * kTileBytes;
}

/// Where the sums of a tile of rows and a weight tile of the block are kept: [pair of weight tiles]
/// [pair of row tiles][2][2] tiles.
inline uint8_t* kept_sums(const TileGemmTask& task, int64_t row, int64_t tile_in_block) {
  const int64_t row_pairs = (task.m + 31) / 32;
  const int64_t group = tile_in_block / 2 * row_pairs + row / 32;
  return task.scratch + kTilePanelBytes +
         (4 * group + row / 16 % 2 * 2 + tile_in_block % 2) * kTileBytes;
}

/// Expands `tiles` weight tiles of a block into scratch, one after the other.
template <typename Panel>
void expand_panel(const TileGemmTask& task, int64_t tile, int64_t tiles, const KBlock& block) {
  uint8_t* out = task.scratch;
  for (int64_t i = 0; i < tiles; ++i) {
    const uint8_t* source =
        task.w.codes + (tile + i) * task.w.tile_bytes + block.first * Panel::kSourceBytes;
    for (int64_t p = 0; p < block.count; ++p) {
      Panel::expand(source + p * Panel::kSourceBytes, out);
      out += kTileBytes;
    }
  }
}

/// Fetches memory into the second level, a little with every step.
struct Prefetcher {
  const uint8_t* next;
  const uint8_t* end;
  int64_t tiles;
  int64_t tile_stride;
  int64_t per_product;  // bytes of each tile
  void step() {
    for (int64_t i = 0; i < per_product && next < end; i += 64) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        _mm_prefetch(reinterpret_cast<const char*>(next + tile * tile_stride), _MM_HINT_T1);
      }
      next += 64;
    }
  }
};

/// What is fetched while a panel is multiplied.
struct Ahead {
  Prefetcher weights;
  Prefetcher rows;
  void step() {
    weights.step();
    rows.step();
  }
};

/// Some weight tiles over a block of columns: one step of the walk.
struct Place {
  int64_t tile;
  int64_t k;  // first product
};

/// The walk over blocks of weight tiles, in them blocks of columns, in them a few tiles at once.
struct Walk {
  int64_t end;       // weight tile
  int64_t products;  // along k
  int64_t block_begin;
  [[nodiscard]] int64_t block_end() const {
    return block_begin + kBlockTiles < end ? block_begin + kBlockTiles : end;
  }
  [[nodiscard]] Place after(Place place) const {
    if (place.tile + kStepTiles < block_end()) {
      return {place.tile + kStepTiles, place.k};
    }
    return place.k + kSlabPieces < products ? Place{block_begin, place.k + kSlabPieces}
                                            : Place{block_end(), 0};
  }
  void move_to(Place place) { block_begin = place.tile >= block_end() ? place.tile : block_begin; }
  [[nodiscard]] KBlock columns(Place place) const {
    const int64_t left = products - place.k;
    return {place.k, left < kSlabPieces ? left : kSlabPieces, place.k == 0, left <= kSlabPieces};
  }
};

/// Spreads the fetch of the weights at `next` over the `count` tile products before them.
template <typename Panel>
Prefetcher prefetch_at(const TileGemmTask& task, const Walk& walk, Place next, int64_t count) {
  const uint8_t* begin =
      task.w.codes + next.tile * task.w.tile_bytes + next.k * Panel::kSourceBytes;
  const int64_t bytes = next.tile < walk.end ? walk.columns(next).count * Panel::kSourceBytes : 0;
  return {begin, begin + bytes, kStepTiles, task.w.tile_bytes, (bytes + count - 1) / count};
}

/// Fetches the share that the step of `tile` has of the activations of the next block of columns.
inline Prefetcher rows_ahead(
    const TileGemmTask& task, const Walk& walk, int64_t tile, const KBlock& block, int64_t count) {
  const int64_t steps = (walk.block_end() - walk.block_begin + kStepTiles - 1) / kStepTiles;
  const int64_t step = (tile - walk.block_begin) / kStepTiles;
  const int64_t slab = block.ends ? 0 : block.first / kSlabPieces + 1;
  const int64_t bytes = (task.m + 15) / 16 * kSlabPieces * kTileBytes;
  const uint8_t* begin = task.x + slab * task.slab_stride;
  const int64_t share = (bytes / steps + 63) / 64 * 64;
  return {begin + share * step, begin + share * (step + 1), 1, 0, (share + count - 1) / count};
}

}  // namespace
}  // namespace nibble::cpu
