#include <immintrin.h>

#include "backend/cpu/ceiling_loops.h"

namespace nibble::cpu {

namespace {

constexpr int kTileBytes = 1024;
constexpr int kRowBytes = 64;

/// What the processor reads when tiles are configured: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

/// Sums in tiles 0 to 3, factors in tiles 4 to 7. GCC 12 does not know that the intrinsics read
/// memory: without the barriers it drops the stores before them.
void set_tiles(const uint8_t* factors) {
  const TileConfig config;
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  __asm__ volatile("" ::"r"(factors) : "memory");
  _tile_loadd(4, factors, kRowBytes);
  _tile_loadd(5, factors + kTileBytes, kRowBytes);
  _tile_loadd(6, factors + 2 * kTileBytes, kRowBytes);
  _tile_loadd(7, factors + 3 * kTileBytes, kRowBytes);
}

/// Scrambled bytes: what the multipliers draw depends on their data. With `high`, the upper byte
/// of each 16 bits becomes a sign with this exponent of BF16.
void fill(uint8_t* factors, int high) {
  uint32_t state = 12345;
  for (int i = 0; i < 4 * kTileBytes; ++i) {
    state = state * 1664525U + 1013904223U;
    const auto byte = static_cast<uint8_t>(state >> 24);
    factors[i] = high >= 0 && i % 2 == 1 ? static_cast<uint8_t>((byte & 0x80) | high) : byte;
  }
}

}  // namespace

void amx_int8_loop(int64_t turns) {
  alignas(64) uint8_t factors[4 * kTileBytes];
  fill(factors, -1);
  set_tiles(factors);
  for (int64_t turn = 0; turn < turns; ++turn) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
}

void amx_bf16_loop(int64_t turns) {
  alignas(64) uint8_t factors[4 * kTileBytes];
  fill(factors, 0x3e);
  set_tiles(factors);
  for (int64_t turn = 0; turn < turns; ++turn) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

}  // namespace nibble::cpu
