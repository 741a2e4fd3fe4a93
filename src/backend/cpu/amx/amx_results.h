#pragma once

// From sums in tiles to results in memory.

#include "backend/cpu/amx/amx_walk.h"

namespace nibble::cpu {
namespace {

/// How results of weight tiles are stored. Whole ones to which no bias is added are stored two at
/// once, `direct` ones past the caches; others one after the other.
enum class StoreForm { kApart, kF32, kF32Added, kF32Direct, kBf16, kBf16Direct };

// From this size on results are not in the second level any more when they are read, so that
// fetching their lines before writing them is a loss.
constexpr int64_t kDirectBytes = 1 << 20;

inline bool write_directly(const TileGemmTask& task, int64_t tile, int64_t size) {
  const int64_t row_bytes = task.y_stride * size;
  const int64_t first = tile * kTileRows * size;
  return task.m * row_bytes >= kDirectBytes && row_bytes % 64 == 0 &&
         (reinterpret_cast<uintptr_t>(task.y.data) + static_cast<uintptr_t>(first)) % 64 == 0;
}

inline StoreForm store_form(const TileGemmTask& task, int64_t tile, int64_t tiles) {
  if (tiles % kStepTiles != 0 || (tile + tiles) * kTileRows > task.w.n || task.bias != nullptr) {
    return StoreForm::kApart;
  }
  if (task.y.type == Element::kBf16) {
    return write_directly(task, tile, 2) ? StoreForm::kBf16Direct : StoreForm::kBf16;
  }
  if (task.add) {
    return StoreForm::kF32Added;
  }
  return write_directly(task, tile, 4) ? StoreForm::kF32Direct : StoreForm::kF32;
}

/// Results of two weight tiles of a row, in any form but kApart.
[[gnu::always_inline]] inline void store_pair(StoreForm form, uint8_t* y, F32x16 low, F32x16 high) {
  auto* floats = reinterpret_cast<float*>(y);
  if (form == StoreForm::kBf16 || form == StoreForm::kBf16Direct) {
    const __m512i line =
        _mm512_inserti64x4(_mm512_castsi256_si512(Simd::to_bf16(low)), Simd::to_bf16(high), 1);
    if (form == StoreForm::kBf16) {
      _mm512_storeu_si512(y, line);
    } else {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(y), line);
    }
  } else if (form == StoreForm::kF32Direct) {
    _mm512_stream_ps(floats, low.v);
    _mm512_stream_ps(floats + kTileRows, high.v);
  } else {
    if (form == StoreForm::kF32Added) {
      low = Simd::add(Simd::load(floats), low);
      high = Simd::add(Simd::load(floats + kTileRows), high);
    }
    Simd::store(floats, low);
    Simd::store(floats + kTileRows, high);
  }
}

inline uint8_t* result_at(const TileGemmTask& task, int64_t row, int64_t tile) {
  const int64_t at = row * task.y_stride + tile * kTileRows;
  return static_cast<uint8_t*>(task.y.data) + at * (task.y.type == Element::kF32 ? 4 : 2);
}

/// Results of up to two tiles of rows times two weight tiles, whose sums have left the tiles: they
/// are written row by row during the next products.
template <typename Kind>
class Results {
 public:
  Results(const TileGemmTask& task, uint8_t* sums) : task_(task), sums_(sums) {}
  ~Results() {
    finish();
    _mm_sfence();  // before another thread is told
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  /// Room for the next sums, [row tiles][2] tiles: the last ones have been written.
  uint8_t* room() {
    finish();
    return sums_;
  }

  /// Sums are there: of 32 rows if there are as many, or of 16.
  void start(int64_t row, int64_t row_tiles, int64_t tile, int64_t tiles) {
    const int64_t end = row + 16 * row_tiles;
    row_ = row;
    end_ = end < task_.m ? end : task_.m;
    next_ = sums_;
    tile_ = tile;
    form_ = store_form(task_, tile, tiles);
    for (int64_t i = 0; i < tiles; ++i) {
      scales_[i] = task_.w.groups == 1 ? load_scales(task_.w, tile + i) : Simd::set(1.0F);
    }
    if (form_ == StoreForm::kApart) {
      write_apart(tiles);
    }
  }

  /// A little: all rows in as many steps as there are products.
  [[gnu::always_inline]] void step(int64_t products) {
    for (int64_t i = 0; i < 32 && row_ < end_; i += products) {
      write_row();
    }
  }

 private:
  void finish() {
    while (row_ < end_) {
      write_row();
    }
  }

  [[gnu::noinline]] void write_row() {
    store_pair(form_, result_at(task_, row_, tile_),
               Kind::value(task_, row_, tile_, scales_[0], next_),
               Kind::value(task_, row_, tile_ + 1, scales_[1], next_ + kTileBytes));
    after_row();
  }

  [[gnu::noinline]] void write_apart(int64_t tiles) {
    while (row_ < end_) {
      for (int64_t i = 0; i < tiles; ++i) {
        write_tile_row(task_, row_, tile_ + i,
                       Kind::value(task_, row_, tile_ + i, scales_[i], next_ + i * kTileBytes));
      }
      after_row();
    }
  }

  void after_row() {
    ++row_;
    next_ += row_ % 16 == 0 ? 64 + kTileBytes : 64;
  }

  const TileGemmTask task_;  // a copy, which no result can change
  uint8_t* sums_;
  const uint8_t* next_ = nullptr;
  int64_t row_ = 0;
  int64_t end_ = 0;
  int64_t tile_ = 0;
  StoreForm form_ = StoreForm::kApart;
  F32x16 scales_[kStepTiles];
};

}  // namespace
}  // namespace nibble::cpu
