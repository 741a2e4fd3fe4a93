#pragma once

// The order in which a thread goes through a product in tiles: blocks of up to 16 weight tiles (256
// output channels), in each the columns in blocks of 8 to 32 tile products (slabs of activations of
// 8), in each pairs of weight tiles, in each all rows. What the next step needs is fetched during
// this one.

#include "backend/cpu/amx/amx_panels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kBlockTiles = kTileSumColumns / kTileRows;  // weight tiles of a block
constexpr int64_t kStepTiles = 2;                             // of a step
// Tile products of a block of columns whose sums stay in tiles. The activations of 512 rows then
// take 1 MiB of the second level, or twice 0.5 MiB, since the next block's are fetched.
constexpr int64_t kMostProducts = 32;
constexpr int64_t kFewerProducts = 16;

/// Weight tiles to multiply, and the size of their blocks in products.
struct WalkRange {
  int64_t begin;
  int64_t end;
  int64_t columns_at_once;
};

inline WalkRange sums_range(const TileGemmTask& task, int64_t begin, int64_t end) {
  return {begin, end, task.x_pieces <= kMostProducts ? kMostProducts : kFewerProducts};
}

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

/// From a pair of weight tiles' sums to the next pair's.
inline int64_t pair_stride(const TileGemmTask& task) { return (task.m + 31) / 32 * 4 * kTileBytes; }

/// Where the sums of a tile of rows and a weight tile of the block are kept: [pair of weight tiles]
/// [pair of row tiles][2][2] tiles.
inline uint8_t* kept_sums(const TileGemmTask& task, int64_t row, int64_t tile_in_block) {
  return task.scratch + kTilePanelBytes + tile_in_block / 2 * pair_stride(task) +
         (row / 16 * 2 + tile_in_block % 2) * kTileBytes;
}

/// Fetches memory into the second level, a little with every step.
struct Prefetcher {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;
  int64_t runs = 0;  // of memory, side by side
  int64_t stride = 0;
  int64_t per_product = 0;  // bytes of each run
  [[gnu::always_inline]] void step() {
    for (int64_t i = 0; i < per_product && next < end; i += 64) {
      for (int64_t run = 0; run < runs; ++run) {
        _mm_prefetch(reinterpret_cast<const char*>(next + run * stride), _MM_HINT_T1);
      }
      next += 64;
    }
  }
};

/// Some weight tiles over a block of columns: one step of the walk.
struct Place {
  int64_t tile;
  int64_t k;  // first product
};

/// The walk over blocks of weight tiles, in them blocks of columns, in them a few tiles at once.
struct Walk {
  int64_t end;              // weight tile
  int64_t products;         // along k
  int64_t columns_at_once;  // products
  int64_t block_begin;
  [[nodiscard]] int64_t block_end() const {
    return block_begin + kBlockTiles < end ? block_begin + kBlockTiles : end;
  }
  /// Weight tiles of a step; none past the end.
  [[nodiscard]] int64_t tiles(Place place) const {
    const int64_t left = end - place.tile;
    return left < 0 ? 0 : left < kStepTiles ? left : kStepTiles;
  }
  [[nodiscard]] Place after(Place place) const {
    if (place.tile + kStepTiles < block_end()) {
      return {place.tile + kStepTiles, place.k};
    }
    return place.k + columns_at_once < products ? Place{block_begin, place.k + columns_at_once}
                                                : Place{block_end(), 0};
  }
  void move_to(Place place) { block_begin = place.tile >= block_end() ? place.tile : block_begin; }
  [[nodiscard]] KBlock columns(Place place) const {
    const int64_t left = products - place.k;
    return {place.k, left < columns_at_once ? left : columns_at_once, place.k == 0,
            left <= columns_at_once};
  }
};

/// Spreads the fetch of the weights at `next` over the `count` tile products before them. They may
/// lie past the walk's end: a thread's next task begins there.
template <typename Panel>
Prefetcher weights_ahead(const TileGemmTask& task, const Walk& walk, Place next, int64_t count) {
  const uint8_t* begin =
      task.w.codes + next.tile * task.w.tile_bytes + next.k * Panel::kSourceBytes;
  const bool exists = next.tile * kTileRows < task.w.n;
  const int64_t bytes = exists ? walk.columns(next).count * Panel::kSourceBytes : 0;
  return {begin, begin + bytes, kStepTiles, task.w.tile_bytes, (bytes + count - 1) / count};
}

/// The same for the scales of groups, whose lines are too far apart for the processor to foresee.
/// A product is of kColumns.
template <int64_t kColumns>
Prefetcher scales_ahead(const TileGemmTask& task, const Walk& walk, Place next, int64_t count) {
  if (task.w.groups <= 1 || next.tile * kTileRows >= task.w.n) {
    return {};
  }
  const int64_t size = kTileRows * (task.w.scale_type == ScaleType::kF32 ? 4 : 2);
  const int64_t products = task.w.group_size / kColumns;  // of a group
  const int64_t bytes = walk.columns(next).count / products * size;
  const uint8_t* begin = static_cast<const uint8_t*>(task.w.scales) +
                         (next.tile * task.w.groups + next.k / products) * size;
  return {begin, begin + bytes, kStepTiles, task.w.groups * size, (bytes + count - 1) / count};
}

/// Fetches the share that the step of `tile` has of the activations of the next block of columns.
inline Prefetcher rows_ahead(
    const TileGemmTask& task, const Walk& walk, int64_t tile, const KBlock& block, int64_t count) {
  if (block.starts && block.ends) {
    return {};  // always the same
  }
  const int64_t steps = (walk.block_end() - walk.block_begin + kStepTiles - 1) / kStepTiles;
  const int64_t step = (tile - walk.block_begin) / kStepTiles;
  const KBlock next = walk.columns({tile, block.ends ? 0 : block.first + block.count});
  const int64_t bytes = (task.m + 15) / 16 * kSlabPieces * kTileBytes;
  const uint8_t* begin = task.x + next.first / kSlabPieces * task.slab_stride;
  const int64_t share = (bytes / steps + 63) / 64 * 64;
  return {begin + share * step, begin + share * (step + 1),
          (next.count + kSlabPieces - 1) / kSlabPieces, task.slab_stride,
          (share + count - 1) / count};
}

/// What the next steps need, fetched during this one.
struct Ahead {
  Prefetcher weights;
  Prefetcher scales;
  Prefetcher rows;
  [[gnu::always_inline]] void step() {
    weights.step();
    scales.step();
    rows.step();
  }
};

/// One step of the walk, and the weights of the one after.
struct PanelStep {
  KBlock block;
  int64_t tile;
  int64_t tile_in_block;
  int64_t tiles;  // 1 or 2
  bool closes_block;
  Place next;
  int64_t next_tiles;  // 0: none
  int64_t next_products;
  Ahead ahead;
};

/// multiply(step) for every step, which calls step.ahead.step() ahead_steps(block) times.
template <typename Panel, int64_t kColumns = 32, typename AheadSteps, typename Multiply>
[[gnu::always_inline]] inline void for_panels(const TileGemmTask& task,
                                              WalkRange range,
                                              const AheadSteps& ahead_steps,
                                              const Multiply& multiply) {
  configure_tiles(task.m < 16 ? task.m : 16);
  Walk walk{range.end, task.x_pieces, range.columns_at_once, range.begin};
  for (Place place{range.begin, 0}; place.tile < range.end;) {
    const KBlock block = walk.columns(place);
    const int64_t tiles = walk.tiles(place);
    const Place next = walk.after(place);
    Walk then = walk;
    then.move_to(next);
    // Weights to expand are read a step before their products.
    const Place read_next = Panel::kDirect ? next : then.after(next);
    const int64_t count = ahead_steps(block);
    PanelStep step{block,
                   place.tile,
                   place.tile - walk.block_begin,
                   tiles,
                   block.ends && place.tile + tiles == walk.block_end(),
                   next,
                   then.tiles(next),
                   then.columns(next).count,
                   {weights_ahead<Panel>(task, walk, read_next, count),
                    scales_ahead<kColumns>(task, walk, next, count),
                    rows_ahead(task, walk, place.tile, block, count)}};
    multiply(step);
    walk = then;
    place = next;
  }
  release_tiles();
}

/// A block of columns of a step's weight tiles, as AMX reads them.
struct PanelPair {
  const uint8_t* tiles[kStepTiles];
  int64_t products;
  const uint8_t* next[kStepTiles];  // what to expand in their place, product by product, or null
};

/// The panels of the steps: in memory, or expanded in scratch. Each panel takes the place of the
/// one before while that is multiplied for the last time, for tile products leave the vector unit
/// idle; the first one and those of another size come before their products.
template <typename Panel>
class Panels {
 public:
  explicit Panels(const TileGemmTask& task) : task_(task) {}

  PanelPair begin(const PanelStep& step) {
    const int64_t count = step.block.count;
    const uint8_t* source = source_of({step.tile, step.block.first});
    const uint8_t* second = source + task_.w.tile_bytes;
    if constexpr (Panel::kDirect) {
      return {{source, second}, count, {nullptr, nullptr}};
    } else {
      uint8_t* out = task_.scratch;
      uint8_t* second_out = out + count * kTileBytes;
      for (int64_t p = 0; p < count && !expanded_; ++p) {
        expand_tile<Panel>(task_.w, source + p * Panel::kSourceBytes, out + p * kTileBytes);
        if (step.tiles == kStepTiles) {
          expand_tile<Panel>(task_.w, second + p * Panel::kSourceBytes,
                             second_out + p * kTileBytes);
        }
      }
      expanded_ = step.next_tiles == step.tiles && step.next_products == count;
      const uint8_t* next = expanded_ ? source_of(step.next) : nullptr;
      return {{out, second_out}, count, {next, expanded_ ? next + task_.w.tile_bytes : nullptr}};
    }
  }

 private:
  [[nodiscard]] const uint8_t* source_of(Place place) const {
    return task_.w.codes + place.tile * task_.w.tile_bytes + place.k * Panel::kSourceBytes;
  }

  const TileGemmTask& task_;
  bool expanded_ = false;  // the next step's panel
};

}  // namespace
}  // namespace nibble::cpu
