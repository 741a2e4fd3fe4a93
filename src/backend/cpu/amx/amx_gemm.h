#pragma once

// Matrix products with AMX tiles; same sums as gemm_kernels.h, bit for bit. One tile product adds
// 64 bytes of k: 64 int8 or 32 bf16 columns. Needs simd_avx512.h and gemm_kernels.h before.
//
// A thread walks blocks of 16 weight tiles (256 output channels), in each the columns in blocks of
// 16 tile products, in each pairs of weight tiles. Such a pair's panel (32 KiB, expanded to bytes
// or bf16 where the weights are packed tighter) stays in the first-level cache while all rows of
// activations pass by from the second level, 32 rows and 32 channels in four tiles of sums at once.

#include <utility>

#include "backend/cpu/amx/tiles.h"
#include "backend/cpu/kernels/gemm_kernels.h"
#include "backend/cpu/kernels/row_kernels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kBlockTiles = kTileSumColumns / kTileRows;  // weight tiles of a block

// --- how a weight tile of one product becomes 16 rows of 64 bytes ---

/// Weights that lie in memory as tiles.
struct DirectPanel {
  static constexpr int64_t kSourceBytes = kTileBytes;
  static constexpr bool kDirect = true;
};

/// int4 as unsigned bytes for int8 activations.
struct Int4Bytes {
  static constexpr int64_t kSourceBytes = 512;
  static constexpr bool kDirect = false;
  static void expand(const uint8_t* source, uint8_t* tile) {
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int64_t step = 0; step < 8; ++step) {
      const __m512i words = _mm512_loadu_si512(source + step * 64);
      _mm512_store_si512(tile + step * 128, _mm512_and_si512(words, mask));
      _mm512_store_si512(tile + step * 128 + 64,
                         _mm512_and_si512(_mm512_srli_epi16(words, 4), mask));
    }
  }
};

/// int4 as bf16 pairs. A permutation of 16-bit lanes looks at five bits of each index, and its
/// table repeats after 16, so bits above a nibble need no masking.
struct Int4Pairs {
  static constexpr int64_t kSourceBytes = 256;
  static constexpr bool kDirect = false;
  template <int kLow, int kHigh>
  static __m512i pair(__m512i words, __m512i table) {  // shifts right; negative: left
    const __m512i low = _mm512_srli_epi32(words, kLow);
    const __m512i high =
        kHigh < 0 ? _mm512_slli_epi32(words, -kHigh) : _mm512_srli_epi32(words, kHigh);
    return _mm512_permutexvar_epi16(_mm512_mask_blend_epi16(0xaaaaaaaaU, low, high), table);
  }
  static void expand(const uint8_t* source, uint8_t* tile) {
    const __m256i values = _mm256_setr_epi16(
        static_cast<int16_t>(0xc100), static_cast<int16_t>(0xc0e0), static_cast<int16_t>(0xc0c0),
        static_cast<int16_t>(0xc0a0), static_cast<int16_t>(0xc080), static_cast<int16_t>(0xc040),
        static_cast<int16_t>(0xc000), static_cast<int16_t>(0xbf80), 0, 0x3f80, 0x4000, 0x4040,
        0x4080, 0x40a0, 0x40c0, 0x40e0);  // -8 to 7
    const __m512i table = _mm512_broadcast_i64x4(values);
#pragma GCC unroll 4
    for (int64_t step = 0; step < 4; ++step) {
      const __m512i words = _mm512_loadu_si512(source + step * 64);
      uint8_t* out = tile + step * 256;
      // Columns (0, 1), (2, 3), (4, 5), (6, 7); column c is nibble 2c, for c >= 4 nibble 2(c-4)+1.
      _mm512_store_si512(out, pair<0, -8>(words, table));
      _mm512_store_si512(out + 64, pair<16, 8>(words, table));
      _mm512_store_si512(out + 128, pair<4, -4>(words, table));
      _mm512_store_si512(out + 192, pair<20, 12>(words, table));
    }
  }
};

/// Any codec whose values bf16 holds exactly.
template <typename Codec>
struct CodecPairs {
  static constexpr int64_t kSourceBytes = 4 * Codec::kStepBytes;
  static constexpr bool kDirect = false;
  template <int kColumn>
  static void pair(const typename Codec::Step& step, uint8_t* out) {
    const I32x16 low = Simd::bits(Codec::template column<kColumn>(step));
    const I32x16 high = Simd::bits(Codec::template column<kColumn + 1>(step));
    const I32x16 mask = Simd::set_int(static_cast<int>(0xffff0000U));
    Simd::store_int(out, Simd::or_int(Simd::shift_right<16>(low), Simd::and_int(high, mask)));
  }
  static void expand(const uint8_t* source, uint8_t* tile) {
    for (int64_t i = 0; i < 4; ++i) {
      const typename Codec::Step step = Codec::step(source + i * Codec::kStepBytes);
      uint8_t* out = tile + i * 256;
      pair<0>(step, out);
      pair<2>(step, out + 64);
      pair<4>(step, out + 128);
      pair<6>(step, out + 192);
    }
  }
};

// --- what is done with sums ---

/// Where the sums of a tile of rows and a weight tile of the block are kept: [pair of weight tiles]
/// [pair of row tiles][2][2] tiles.
inline uint8_t* kept_sums(const TileGemmTask& task, int64_t row, int64_t tile_in_block) {
  const int64_t row_pairs = (task.m + 31) / 32;
  const int64_t group = tile_in_block / 2 * row_pairs + row / 32;
  return task.scratch + kTilePanelBytes +
         (4 * group + row / 16 % 2 * 2 + tile_in_block % 2) * kTileBytes;
}

/// Turns a block's sums into results, row by row: memory takes long runs of a row faster than
/// pieces of many rows.
template <typename Kind>
void write_block(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  for (int64_t row = 0; row < task.m; ++row) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const F32x16 scales = task.w.groups == 1 ? load_scales(task.w, tile) : Simd::set(1.0F);
      const uint8_t* sums = kept_sums(task, row, tile - tile_begin) + row % 16 * 64;
      write_tile_row(task, row, tile, Kind::value(task, row, tile, scales, sums));
    }
  }
}

/// bf16 products: the scale of the row of weights, if any, times that of the activations, if any.
struct FloatSums {
  static F32x16 value(
      const TileGemmTask& task, int64_t row, int64_t /*tile*/, F32x16 scales, const uint8_t* sums) {
    const F32x16 sum = Simd::load(reinterpret_cast<const float*>(sums));
    if (task.w.groups != 1) {
      return sum;
    }
    const bool per_row = task.x_scales != nullptr;
    return Simd::mul(sum, per_row ? Simd::mul(scales, Simd::set(task.x_scales[row])) : scales);
  }
  template <int kC, int kA, int kB>
  static void product() {
    dot_bf16<kC, kA, kB>();
  }
};

template <typename Codec>
struct IntSums {
  static F32x16 value(
      const TileGemmTask& task, int64_t row, int64_t tile, F32x16 scales, const uint8_t* sums) {
    const I32x16 sum = Simd::sub_int(Simd::load_int(sums), Codec::correction(task, tile, row));
    return Simd::mul(Simd::to_float(sum), Simd::mul(scales, Simd::set(task.x_scales[row])));
  }
};

struct Int8Sums : IntSums<IntCodecInt8> {
  template <int kC, int kA, int kB>
  static void product() {
    dot_u8s8<kC, kA, kB>();
  }
};

struct Int4Sums : IntSums<IntCodecInt4> {
  template <int kC, int kA, int kB>
  static void product() {
    dot_s8u8<kC, kA, kB>();
  }
};

// --- the walk ---

/// Fetches the weight tiles of the next panel, a little with every tile product.
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

/// Columns [first, first + products) of a pair of weight tiles, as AMX reads them.
struct PanelPair {
  const uint8_t* tiles[2];
  int64_t products;
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

/// kM x kN tiles of sums (1 or 2 each) over the panel's columns; x points at the panel's first
/// activations of the first tile of rows.
template <typename Kind, int kM, int kN>
[[gnu::always_inline]] inline void multiply(const PanelPair& panel,
                                            const uint8_t* x,
                                            Ahead& ahead) {
  const uint8_t* second = x + kSlabPieces * kTileBytes;
  for (int64_t p = 0; p < panel.products; ++p) {
    const int64_t at = p * kTileBytes;
    ahead.step();
    load_tile<6>(panel.tiles[0] + at);
    load_tile<4>(x + at);
    Kind::template product<0, 4, 6>();
    if constexpr (kN == 2) {
      load_tile<7>(panel.tiles[1] + at);
      Kind::template product<1, 4, 7>();
    }
    if constexpr (kM == 2) {
      load_tile<5>(second + at);
      Kind::template product<2, 5, 6>();
      if constexpr (kN == 2) {
        Kind::template product<3, 5, 7>();
      }
    }
  }
}

template <int kM, int kN>
inline void zero_sums() {
  zero_tile<0>();
  if constexpr (kN == 2) {
    zero_tile<1>();
  }
  if constexpr (kM == 2) {
    zero_tile<2>();
    if constexpr (kN == 2) {
      zero_tile<3>();
    }
  }
}

/// Sums of the second tile of rows lie `stride` bytes after those of the first.
template <int kM, int kN>
inline void load_sums(const uint8_t* sums, int64_t stride) {
  load_tile<0>(sums);
  if constexpr (kN == 2) {
    load_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    load_tile<2>(sums + stride);
    if constexpr (kN == 2) {
      load_tile<3>(sums + stride + kTileBytes);
    }
  }
}

template <int kM, int kN>
inline void store_sums(uint8_t* sums, int64_t stride) {
  store_tile<0>(sums);
  if constexpr (kN == 2) {
    store_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    store_tile<2>(sums + stride);
    if constexpr (kN == 2) {
      store_tile<3>(sums + stride + kTileBytes);
    }
  }
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

template <typename Kind, int kM, int kN>
void multiply_rows(const TileGemmTask& task,
                   const PanelPair& panel,
                   const KBlock& block,
                   int64_t row,
                   uint8_t* sums,
                   Ahead& ahead) {
  const uint8_t* x = block_rows(task, block, row);
  constexpr int64_t kStride = 2 * kTileBytes;
  if (block.starts) {
    zero_sums<kM, kN>();
  } else {
    load_sums<kM, kN>(sums, kStride);
  }
  multiply<Kind, kM, kN>(panel, x, ahead);
  store_sums<kM, kN>(sums, kStride);
}

/// All rows times one or two weight tiles, over one block of columns.
template <typename Kind, int kN>
void multiply_panel(const TileGemmTask& task,
                    const PanelPair& panel,
                    const KBlock& block,
                    int64_t tile_in_block,
                    Ahead& ahead) {
  int64_t row = 0;
  for (; row + 16 < task.m; row += 32) {
    multiply_rows<Kind, 2, kN>(task, panel, block, row, kept_sums(task, row, tile_in_block), ahead);
  }
  if (row < task.m) {
    multiply_rows<Kind, 1, kN>(task, panel, block, row, kept_sums(task, row, tile_in_block), ahead);
  }
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

template <typename Panel>
PanelPair make_panel(const TileGemmTask& task, int64_t tile, int64_t tiles, const KBlock& block) {
  if constexpr (Panel::kDirect) {
    const uint8_t* source = task.w.codes + tile * task.w.tile_bytes + block.first * kTileBytes;
    return {{source, source + task.w.tile_bytes}, block.count};
  } else {
    expand_panel<Panel>(task, tile, tiles, block);
    return {{task.scratch, task.scratch + block.count * kTileBytes}, block.count};
  }
}

/// Some weight tiles over a block of columns: one step of the walk.
struct Place {
  int64_t tile;
  int64_t k;  // first product
};

/// The walk over blocks of weight tiles, in them blocks of columns, in them a few tiles at once.
struct Walk {
  int64_t end;       // weight tile
  int64_t products;  // along k
  int64_t k_block;   // products of a block
  int64_t tiles;     // weight tiles of a step
  int64_t block_begin;
  [[nodiscard]] int64_t block_end() const {
    return block_begin + kBlockTiles < end ? block_begin + kBlockTiles : end;
  }
  [[nodiscard]] Place after(Place place) const {
    if (place.tile + tiles < block_end()) {
      return {place.tile + tiles, place.k};
    }
    return place.k + k_block < products ? Place{block_begin, place.k + k_block}
                                        : Place{block_end(), 0};
  }
  void move_to(Place place) { block_begin = place.tile >= block_end() ? place.tile : block_begin; }
  [[nodiscard]] KBlock columns(Place place) const {
    const int64_t left = products - place.k;
    return {place.k, left < k_block ? left : k_block, place.k == 0, left <= k_block};
  }
};

/// Spreads the fetch of the weights at `next` over the `count` tile products before them.
template <typename Panel>
Prefetcher prefetch_at(const TileGemmTask& task, const Walk& walk, Place next, int64_t count) {
  const uint8_t* begin =
      task.w.codes + next.tile * task.w.tile_bytes + next.k * Panel::kSourceBytes;
  const int64_t bytes = next.tile < walk.end ? walk.columns(next).count * Panel::kSourceBytes : 0;
  return {begin, begin + bytes, walk.tiles, task.w.tile_bytes, (bytes + count - 1) / count};
}

/// Fetches the share that the step of `tile` has of the activations of the next block of columns.
inline Prefetcher rows_ahead(
    const TileGemmTask& task, const Walk& walk, int64_t tile, const KBlock& block, int64_t count) {
  const int64_t steps = (walk.block_end() - walk.block_begin + walk.tiles - 1) / walk.tiles;
  const int64_t step = (tile - walk.block_begin) / walk.tiles;
  const int64_t slab = block.ends ? 0 : block.first / kSlabPieces + 1;
  const int64_t bytes = (task.m + 15) / 16 * kSlabPieces * kTileBytes;
  const uint8_t* begin = task.x + slab * task.slab_stride;
  const int64_t share = (bytes / steps + 63) / 64 * 64;
  return {begin + share * step, begin + share * (step + 1), 1, 0, (share + count - 1) / count};
}

/// Sums that run over all of k: no scales, or one per row of weights.
template <typename Panel, typename Kind>
void tile_gemm(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  configure_tiles(task.m < 16 ? task.m : 16);
  const int64_t row_pairs = (task.m + 31) / 32;
  Walk walk{.end = tile_end,
            .products = task.x_pieces,
            .k_block = kSlabPieces,
            .tiles = 2,
            .block_begin = tile_begin};
  for (Place place{tile_begin, 0}; place.tile < tile_end;) {
    const KBlock block = walk.columns(place);
    const int64_t tile = place.tile;
    const int64_t in_block = tile - walk.block_begin;
    const int64_t tiles = walk.block_end() - tile < 2 ? 1 : 2;
    place = walk.after(place);
    const int64_t products = row_pairs * block.count;
    Ahead ahead{prefetch_at<Panel>(task, walk, place, products),
                rows_ahead(task, walk, tile, block, products)};
    const PanelPair panel = make_panel<Panel>(task, tile, tiles, block);
    if (tiles == 2) {
      multiply_panel<Kind, 2>(task, panel, block, in_block, ahead);
    } else {
      multiply_panel<Kind, 1>(task, panel, block, in_block, ahead);
    }
    if (block.ends && tile + tiles == walk.block_end()) {
      write_block<Kind>(task, walk.block_begin, walk.block_end());
    }
    walk.move_to(place);
  }
  release_tiles();
}

// --- one scale per group: sums leave the tiles after every group ---

/// total += scale * (sum of a group), 16 rows.
inline void add_group(const uint8_t* sums, F32x16 scale, F32x16 (&total)[16]) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < 16; ++r) {
    total[r] =
        Simd::fma(Simd::load(reinterpret_cast<const float*>(sums) + r * 16), scale, total[r]);
  }
}

/// Where the groups of one tile of sums lie within a block of columns.
struct GroupedTile {
  const uint8_t* x;
  const uint8_t* w;
  int64_t scale_index;
  uint8_t* ring;  // kSlabPieces tiles
};

template <int kC, int kProducts>
[[gnu::always_inline]] inline void multiply_group(const uint8_t* x, const uint8_t* w) {
  zero_tile<kC>();
#pragma GCC unroll 4
  for (int64_t p = 0; p < kProducts * kTileBytes; p += kTileBytes) {
    load_tile<4 + kC % 2>(x + p);
    load_tile<6 + kC % 2>(w + p);
    dot_bf16<kC, 4 + kC % 2, 6 + kC % 2>();
  }
}

/// A slab's groups as a pipeline. A tile product takes 52 cycles and its sums pass through memory
/// to the vector unit, so while group i is multiplied, the sums of an earlier one are stored and
/// those of a still earlier one scaled and added.
template <int kProducts>
struct GroupPipeline {
  static constexpr int kGroups = kSlabPieces / kProducts;
  static constexpr int kStoreLag = kProducts == 1 ? 2 : 1;
  static constexpr int kAddLag = kProducts == 1 ? 4 : 2;

  template <int kI>
  [[gnu::always_inline]] static void stage(const GroupedTile& tile,
                                           const PackedWeights& w,
                                           F32x16 (&total)[16]) {
    if constexpr (kI < kGroups) {
      constexpr int64_t kAt = kI * kProducts * kTileBytes;
      multiply_group<kI % 4, kProducts>(tile.x + kAt, tile.w + kAt);
    }
    if constexpr (kI >= kAddLag) {
      add_group(tile.ring + (kI - kAddLag) * kTileBytes,
                load_scales(w, tile.scale_index + kI - kAddLag), total);
    }
    if constexpr (kI >= kStoreLag && kI - kStoreLag < kGroups) {
      store_tile<(kI - kStoreLag) % 4>(tile.ring + (kI - kStoreLag) * kTileBytes);
    }
  }

  template <int... kStages>
  [[gnu::always_inline]] static void stages(std::integer_sequence<int, kStages...> /*stages*/,
                                            const GroupedTile& tile,
                                            const PackedWeights& w,
                                            F32x16 (&total)[16]) {
    (stage<kStages>(tile, w, total), ...);
  }

  /// total += the sums of a block of columns of `count` tile products.
  [[gnu::always_inline]] static void run(const GroupedTile& tile,
                                         int64_t count,
                                         const PackedWeights& w,
                                         F32x16 (&total)[16]) {
    if (count == kSlabPieces) {
      return stages(std::make_integer_sequence<int, kGroups + kAddLag>(), tile, w, total);
    }
    for (int64_t p = 0; p < count; p += kProducts) {
      multiply_group<0, kProducts>(tile.x + p * kTileBytes, tile.w + p * kTileBytes);
      store_tile<0>(tile.ring);
      add_group(tile.ring, load_scales(w, tile.scale_index + p / kProducts), total);
    }
  }
};

/// All rows times the step's one or two weight tiles over a block of columns.
template <int kProducts>
void multiply_grouped(const TileGemmTask& task,
                      const KBlock& block,
                      int64_t tile,
                      int64_t tiles,
                      int64_t tile_in_block,
                      Ahead& ahead) {
  const PackedWeights w = task.w;
  const int64_t scale_index = tile * w.groups + block.first / kProducts;
  for (int64_t row = 0; row < task.m; row += 16) {
    ahead.step();
    const uint8_t* x = block_rows(task, block, row);
    for (int64_t i = 0; i < tiles; ++i) {
      auto* kept = reinterpret_cast<float*>(kept_sums(task, row, tile_in_block + i));
      F32x16 total[16];
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        total[r] = block.starts ? Simd::set(0.0F) : Simd::load(kept + r * 16);
      }
      const GroupedTile grouped{x, task.scratch + i * block.count * kTileBytes,
                                scale_index + i * w.groups,
                                task.scratch + kTilePanelBytes - kSlabPieces * kTileBytes};
      GroupPipeline<kProducts>::run(grouped, block.count, w, total);
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        Simd::store(kept + r * 16, total[r]);
      }
    }
  }
}

/// Weights in groups of 32, 64 or 128 columns.
template <typename Panel, int kProducts>
void tile_gemm_grouped(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  configure_tiles(task.m < 16 ? task.m : 16);
  Walk walk{.end = tile_end,
            .products = task.x_pieces,
            .k_block = kSlabPieces,
            .tiles = 2,
            .block_begin = tile_begin};
  for (Place place{tile_begin, 0}; place.tile < tile_end;) {
    const KBlock block = walk.columns(place);
    const int64_t tile = place.tile;
    const int64_t tiles = walk.block_end() - tile < 2 ? 1 : 2;
    place = walk.after(place);
    const int64_t row_tiles = (task.m + 15) / 16;
    Ahead ahead{prefetch_at<Panel>(task, walk, place, row_tiles),
                rows_ahead(task, walk, tile, block, row_tiles)};
    expand_panel<Panel>(task, tile, tiles, block);
    multiply_grouped<kProducts>(task, block, tile, tiles, tile - walk.block_begin, ahead);
    if (block.ends && tile + tiles == walk.block_end()) {
      write_block<FloatSums>(task, walk.block_begin, walk.block_end());
    }
    walk.move_to(place);
  }
  release_tiles();
}

template <typename Panel>
void tile_gemm_float(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if constexpr (!Panel::kDirect) {
    const int64_t products = task.w.groups > 1 ? task.w.group_size / 32 : 0;
    if (products == 1) {
      return tile_gemm_grouped<Panel, 1>(task, tile_begin, tile_end);
    }
    if (products == 2) {
      return tile_gemm_grouped<Panel, 2>(task, tile_begin, tile_end);
    }
    if (products == 4) {
      return tile_gemm_grouped<Panel, 4>(task, tile_begin, tile_end);
    }
  }
  tile_gemm<Panel, FloatSums>(task, tile_begin, tile_end);
}

/// A row rounded to bf16, as the pieces of TileGemmTask, padded with zeros.
void round_pieces(const float* row, int64_t k, uint8_t* out, int64_t slab_stride) {
  for (int64_t i = 0; i < k; i += 32) {
    const int64_t left = k - i;
    const F32x16 low = load_lanes(row + i, left < 16 ? left : 16);
    const F32x16 high =
        left > 16 ? load_lanes(row + i + 16, left < 32 ? left - 16 : 16) : Simd::set(0.0F);
    Simd::store_u16(out, to_bf16_bits(low));
    Simd::store_u16(out + 32, to_bf16_bits(high));
    const bool slab_ends = i / 32 % kSlabPieces == kSlabPieces - 1;
    out += slab_ends ? slab_stride - (kSlabPieces - 1) * kTileBytes : kTileBytes;
  }
}

constexpr KernelTable with_tiles(KernelTable table) {
  table.tiles_bf16 = tile_gemm_float<DirectPanel>;
  table.tiles_int8 = tile_gemm_float<CodecPairs<CodecInt8>>;
  table.tiles_fp8 = tile_gemm_float<CodecPairs<CodecFp8>>;
  table.tiles_int4 = tile_gemm_float<Int4Pairs>;
  table.tiles_int8_int8 = tile_gemm<DirectPanel, Int8Sums>;
  table.tiles_int4_int8 = tile_gemm<Int4Bytes, Int4Sums>;
  table.round_pieces = round_pieces;
  return table;
}

}  // namespace
}  // namespace nibble::cpu
