#pragma once

// Matrix products in AMX tiles with the bits of gemm_kernels.h. A tile product adds 64 bytes of k,
// 64 int8 or 32 bf16 columns, as the vector kernels' blocks do. Two tiles of rows times two weight
// tiles are summed at once; the first 32 KiB of a panel of weights stay in the first-level cache
// while the rows, and other weights, pass by from the second level. Needs simd_avx512.h before.

#include "backend/cpu/amx/amx_walk.h"

namespace nibble::cpu {
namespace {

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
    return int_result<Codec>(task, row, tile, scales, Simd::load_int(sums));
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

/// Columns of results that a block of weight tiles gives, and their scales.
struct ResultBlock {
  int64_t tile_begin;
  int64_t tile_end;
  F32x16 scales[kBlockTiles];
};

/// Results of two weight tiles of a row; `direct` when they pass by the caches, in whole lines.
template <Element kType, bool kDirect>
[[gnu::always_inline]] inline void store_pair(uint8_t* y, F32x16 low, F32x16 high) {
  if constexpr (kType == Element::kF32 && kDirect) {
    _mm512_stream_ps(reinterpret_cast<float*>(y), low.v);
    _mm512_stream_ps(reinterpret_cast<float*>(y) + kTileRows, high.v);
  } else if constexpr (kType == Element::kF32) {
    Simd::store(reinterpret_cast<float*>(y), low);
    Simd::store(reinterpret_cast<float*>(y) + kTileRows, high);
  } else if constexpr (kDirect) {
    const __m512i line = _mm512_castsi256_si512(Simd::to_bf16(low));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(y),
                        _mm512_inserti64x4(line, Simd::to_bf16(high), 1));
  } else {
    Simd::store_bf16(y, low);
    Simd::store_bf16(y + 32, high);
  }
}

/// Results of pairs of whole tiles to which nothing is added.
template <typename Kind, Element kType, bool kDirect>
void write_plain(const TileGemmTask& given, const ResultBlock& block) {
  const TileGemmTask task = given;  // which no result can change
  constexpr int64_t kSize = kType == Element::kF32 ? 4 : 2;
  const int64_t column = block.tile_begin * kTileRows;
  for (int64_t row = 0; row < task.m; ++row) {
    uint8_t* y = static_cast<uint8_t*>(task.y.data) + (row * task.y_stride + column) * kSize;
    const uint8_t* sums = kept_sums(task, row, 0) + row % 16 * 64;
    for (int64_t tile = block.tile_begin; tile < block.tile_end; tile += 2) {
      const F32x16* scales = block.scales + (tile - block.tile_begin);
      store_pair<kType, kDirect>(y, Kind::value(task, row, tile, scales[0], sums),
                                 Kind::value(task, row, tile + 1, scales[1], sums + kTileBytes));
      sums += pair_stride(task);
      y += 2 * kTileRows * kSize;
    }
  }
  if constexpr (kDirect) {
    _mm_sfence();  // before another thread is told
  }
}

// From this size on results are not in the second level any more when they are read, so that
// fetching their lines before writing them is a loss.
constexpr int64_t kDirectBytes = 1 << 20;

inline bool write_directly(const TileGemmTask& task, int64_t tile_begin, int64_t size) {
  const int64_t row_bytes = task.y_stride * size;
  const int64_t first = tile_begin * kTileRows * size;
  return task.m * row_bytes >= kDirectBytes && row_bytes % 64 == 0 &&
         (reinterpret_cast<uintptr_t>(task.y.data) + static_cast<uintptr_t>(first)) % 64 == 0;
}

template <typename Kind, Element kType>
void write_pairs(const TileGemmTask& task, const ResultBlock& block) {
  if (write_directly(task, block.tile_begin, kType == Element::kF32 ? 4 : 2)) {
    write_plain<Kind, kType, true>(task, block);
  } else {
    write_plain<Kind, kType, false>(task, block);
  }
}

/// Turns a block's sums into results, row by row: memory takes long runs of a row faster than
/// pieces of many rows.
template <typename Kind>
void write_block(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  ResultBlock block{tile_begin, tile_end, {}};
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    block.scales[tile - tile_begin] =
        task.w.groups == 1 ? load_scales(task.w, tile) : Simd::set(1.0F);
  }
  const bool pairs = (tile_end - tile_begin) % 2 == 0 && tile_end * kTileRows <= task.w.n;
  if (pairs && task.bias == nullptr && !task.add) {
    return task.y.type == Element::kF32 ? write_pairs<Kind, Element::kF32>(task, block)
                                        : write_pairs<Kind, Element::kBf16>(task, block);
  }
  for (int64_t row = 0; row < task.m; ++row) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const uint8_t* sums = kept_sums(task, row, tile - tile_begin) + row % 16 * 64;
      write_tile_row(task, row, tile,
                     Kind::value(task, row, tile, block.scales[tile - tile_begin], sums));
    }
  }
}

/// A block of columns of a pair of weight tiles, as AMX reads them.
struct PanelPair {
  const uint8_t* tiles[2];
  int64_t products;
};

// Of a panel's products, those whose weights stay in the first level. All else passes by it.
constexpr int64_t kNearProducts = 16;

template <int kTile, bool kNear>
[[gnu::always_inline]] inline void load_weights(const uint8_t* p) {
  if constexpr (kNear) {
    load_tile<kTile>(p);
  } else {
    stream_tile<kTile>(p);
  }
}

/// kM x kN tiles of sums (1 or 2 each) over products [first, end) of a slab of activations.
template <typename Kind, int kM, int kN, bool kNear>
[[gnu::always_inline]] inline void multiply_slab(
    const PanelPair& panel, int64_t first, int64_t end, const uint8_t* x, Ahead& ahead) {
  const uint8_t* second = x + kSlabPieces * kTileBytes;
  for (int64_t p = first; p < end; ++p) {
    const int64_t at = p * kTileBytes;
    const int64_t x_at = at - first * kTileBytes;
    ahead.step();
    load_weights<6, kNear>(panel.tiles[0] + at);
    stream_tile<4>(x + x_at);
    Kind::template product<0, 4, 6>();
    if constexpr (kN == 2) {
      load_weights<7, kNear>(panel.tiles[1] + at);
      Kind::template product<1, 4, 7>();
    }
    if constexpr (kM == 2) {
      stream_tile<5>(second + x_at);
      Kind::template product<2, 5, 6>();
      if constexpr (kN == 2) {
        Kind::template product<3, 5, 7>();
      }
    }
  }
}

/// kM x kN tiles of sums (1 or 2 each) over the panel's columns; x points at the panel's first
/// activations of the first tile of rows.
template <typename Kind, int kM, int kN>
[[gnu::always_inline]] inline void multiply(const PanelPair& panel,
                                            const uint8_t* x,
                                            int64_t slab_stride,
                                            Ahead& ahead) {
  for (int64_t first = 0; first < panel.products; first += kSlabPieces) {
    const int64_t left = panel.products - first;
    const int64_t end = first + (left < kSlabPieces ? left : kSlabPieces);
    if (first < kNearProducts) {
      multiply_slab<Kind, kM, kN, true>(panel, first, end, x, ahead);
    } else {
      multiply_slab<Kind, kM, kN, false>(panel, first, end, x, ahead);
    }
    x += slab_stride;
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

/// Sums as kept_sums() places them: two weight tiles side by side for each tile of rows.
template <int kM, int kN>
inline void load_sums(const uint8_t* sums) {
  load_tile<0>(sums);
  if constexpr (kN == 2) {
    load_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    load_tile<2>(sums + 2 * kTileBytes);
    if constexpr (kN == 2) {
      load_tile<3>(sums + 3 * kTileBytes);
    }
  }
}

template <int kM, int kN>
inline void store_sums(uint8_t* sums) {
  store_tile<0>(sums);
  if constexpr (kN == 2) {
    store_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    store_tile<2>(sums + 2 * kTileBytes);
    if constexpr (kN == 2) {
      store_tile<3>(sums + 3 * kTileBytes);
    }
  }
}

/// One step of the walk.
struct PanelStep {
  KBlock block;
  int64_t tile;
  int64_t tile_in_block;
  int64_t tiles;  // 1 or 2
  Ahead ahead;
};

template <typename Kind, int kM, int kN>
void multiply_rows(const TileGemmTask& task, const PanelPair& panel, int64_t row, PanelStep& step) {
  const KBlock& block = step.block;
  uint8_t* sums = kept_sums(task, row, step.tile_in_block);
  if (block.starts) {
    zero_sums<kM, kN>();
  } else {
    load_sums<kM, kN>(sums);
  }
  multiply<Kind, kM, kN>(panel, block_rows(task, block, row), task.slab_stride, step.ahead);
  store_sums<kM, kN>(sums);
}

/// All rows times one or two weight tiles, over one block of columns.
template <typename Kind, int kN>
void multiply_panel(const TileGemmTask& task, const PanelPair& panel, PanelStep& step) {
  int64_t row = 0;
  for (; row + 16 < task.m; row += 32) {
    multiply_rows<Kind, 2, kN>(task, panel, row, step);
  }
  if (row < task.m) {
    multiply_rows<Kind, 1, kN>(task, panel, row, step);
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

/// multiply(step) for every step, in blocks of columns of `columns` products. multiply() calls
/// step.ahead.step() ahead_steps(block) times.
template <typename Panel, typename Kind, typename AheadSteps, typename Multiply>
[[gnu::always_inline]] inline void for_panels(const TileGemmTask& task,
                                              WalkRange range,
                                              const AheadSteps& ahead_steps,
                                              const Multiply& multiply) {
  configure_tiles(task.m < 16 ? task.m : 16);
  Walk walk{.end = range.end,
            .products = task.x_pieces,
            .tiles_at_once = range.tiles_at_once,
            .columns_at_once = range.columns_at_once,
            .block_begin = range.begin};
  for (Place place{range.begin, 0}; place.tile < range.end;) {
    const KBlock block = walk.columns(place);
    const int64_t tile = place.tile;
    const int64_t tiles = walk.block_end() - tile < kStepTiles ? 1 : kStepTiles;
    place = walk.after(place);
    const int64_t count = ahead_steps(block);
    PanelStep step{
        block, tile, tile - walk.block_begin, tiles,
        Ahead{weights_ahead<Panel>(task, walk, place, count),
              scales_ahead(task, walk, place, count), rows_ahead(task, walk, tile, block, count)}};
    multiply(step);
    if (block.ends && tile + tiles == walk.block_end()) {
      write_block<Kind>(task, walk.block_begin, walk.block_end());
    }
    walk.move_to(place);
  }
  release_tiles();
}

/// Sums that run over all of k: no scales, or one per row of weights.
template <typename Panel, typename Kind>
void tile_gemm(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  const int64_t row_pairs = (task.m + 31) / 32;
  for_panels<Panel, Kind>(
      task, sums_range(task, tile_begin, tile_end),
      [&](const KBlock& block) { return row_pairs * block.count; },
      [&](PanelStep& step) {
        const PanelPair panel = make_panel<Panel>(task, step.tile, step.tiles, step.block);
        if (step.tiles == 2) {
          multiply_panel<Kind, 2>(task, panel, step);
        } else {
          multiply_panel<Kind, 1>(task, panel, step);
        }
      });
}

}  // namespace
}  // namespace nibble::cpu
