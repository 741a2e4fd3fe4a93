#pragma once

#include <cstdint>

#include <immintrin.h>

#include "backend/cpu/kernel_table.h"

// AMX tiles: eight registers of 16 rows of 64 bytes. Included by the one source file with these
// flags. GCC 12's own intrinsics take no template arguments and do not say that they read and
// write memory, so that stores before them get lost; hence these.
namespace nibble::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Tiles 0 to 5 (sums and activations) get `rows` rows, 6 and 7 (weights) all 16.
inline void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

inline void release_tiles() { __asm__ volatile("tilerelease"); }

template <int kTile>
[[gnu::always_inline]] inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

/// Rows of 64 bytes one after the other, kAt bytes from p.
template <int kTile, int kAt = 0>
[[gnu::always_inline]] inline void load_tile(const uint8_t* p) {
  __asm__ volatile("tileloadd %c3(%0,%1,1), %%tmm%c2"
                   :
                   : "r"(p), "r"(int64_t{64}), "i"(kTile), "i"(kAt)
                   : "memory");
}

/// The same past the first level, whose lines stay as they are: for what is read once in a while.
template <int kTile, int kAt = 0>
[[gnu::always_inline]] inline void stream_tile(const uint8_t* p) {
  __asm__ volatile("tileloaddt1 %c3(%0,%1,1), %%tmm%c2"
                   :
                   : "r"(p), "r"(int64_t{64}), "i"(kTile), "i"(kAt)
                   : "memory");
}

template <int kTile, int kAt = 0>
[[gnu::always_inline]] inline void store_tile(uint8_t* p) {
  __asm__ volatile("tilestored %%tmm%c2, %c3(%0,%1,1)"
                   :
                   : "r"(p), "r"(int64_t{64}), "i"(kTile), "i"(kAt)
                   : "memory");
}

alignas(64) constexpr uint8_t kZeroLine[64] = {};

/// The same line of zeros sixteen times. After tilezero, products take some 36 cycles longer on
/// some machines at some times (one context switch to the next), after a load never.
template <int kTile>
[[gnu::always_inline]] inline void load_zeros() {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(kZeroLine), "r"(int64_t{0}), "i"(kTile)
                   : "memory");
}

/// Tile kC += tile kA · tile kB: pairs of bf16; unsigned by signed bytes; signed by unsigned ones;
/// signed ones.
template <int kC, int kA, int kB>
[[gnu::always_inline]] inline void dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
[[gnu::always_inline]] inline void dot_u8s8() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
[[gnu::always_inline]] inline void dot_s8u8() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
[[gnu::always_inline]] inline void dot_s8s8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace nibble::cpu
