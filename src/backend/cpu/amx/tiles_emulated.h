#pragma once

// What tiles.h does with tile instructions, in AVX-512 with VNNI: for tests of the AMX kernels on
// machines without AMX. The same bits; slow.

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "backend/cpu/kernel_table.h"

namespace nibble::cpu {
namespace {

struct EmulatedTile {
  __m512i rows[16];
  int64_t count;  // rows that the configuration gives it
};

inline thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles(int64_t rows) {
  for (int i = 0; i < 8; ++i) {
    emulated_tiles[i] = {};
    emulated_tiles[i].count = i < 6 ? rows : 16;
  }
}

/// Tiles have no rows until they are configured again.
inline void release_tiles() { configure_tiles(0); }

inline void load_rows(EmulatedTile& tile, const uint8_t* p, int64_t stride) {
  for (int64_t i = 0; i < 16; ++i) {
    tile.rows[i] = i < tile.count ? _mm512_loadu_si512(p + i * stride) : _mm512_setzero_si512();
  }
}

template <int kTile>
void zero_tile() {
  for (__m512i& row : emulated_tiles[kTile].rows) {
    row = _mm512_setzero_si512();
  }
}

template <int kTile, int kAt = 0>
void load_tile(const uint8_t* p) {
  load_rows(emulated_tiles[kTile], p + kAt, 64);
}

template <int kTile, int kAt = 0>
void stream_tile(const uint8_t* p) {
  load_tile<kTile, kAt>(p);
}

template <int kTile, int kAt = 0>
void store_tile(uint8_t* p) {
  const EmulatedTile& tile = emulated_tiles[kTile];
  for (int64_t i = 0; i < tile.count; ++i) {
    _mm512_storeu_si512(p + kAt + i * 64, tile.rows[i]);
  }
}

template <int kTile>
void load_zeros() {
  zero_tile<kTile>();
}

/// add(sums of row m, element k of that row of kA in all lanes, row k of kB), for all m and k.
template <int kC, int kA, int kB, typename Add>
void for_products(const Add& add) {
  EmulatedTile& sums = emulated_tiles[kC];
  for (int64_t m = 0; m < sums.count; ++m) {
    int32_t elements[16];
    std::memcpy(elements, &emulated_tiles[kA].rows[m], sizeof elements);
    for (int64_t k = 0; k < 16; ++k) {
      add(m, _mm512_set1_epi32(elements[k]), emulated_tiles[kB].rows[k]);
    }
  }
}

/// Two sums from zero, of the even and of the odd elements, are added to each other and then to
/// the total; numbers below the smallest normal one count as zeros.
template <int kC, int kA, int kB>
void dot_bf16() {
  constexpr unsigned kNoSubnormals = 0x8040;  // neither read nor made
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | kNoSubnormals);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  const auto even_of = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  const auto odd_of = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, upper)); };
  __m512 even[16] = {};
  __m512 odd[16] = {};
  for_products<kC, kA, kB>([&](int64_t m, __m512i a, __m512i b) {
    even[m] = _mm512_fmadd_ps(even_of(a), even_of(b), even[m]);
    odd[m] = _mm512_fmadd_ps(odd_of(a), odd_of(b), odd[m]);
  });
  EmulatedTile& sums = emulated_tiles[kC];
  for (int64_t m = 0; m < sums.count; ++m) {
    const __m512 total = _mm512_castsi512_ps(sums.rows[m]);
    sums.rows[m] = _mm512_castps_si512(_mm512_add_ps(total, _mm512_add_ps(even[m], odd[m])));
  }
  _mm_setcsr(mode);
}

template <int kC, int kA, int kB>
void dot_u8s8() {
  for_products<kC, kA, kB>([](int64_t m, __m512i a, __m512i b) {
    __m512i& sum = emulated_tiles[kC].rows[m];
    sum = _mm512_dpbusd_epi32(sum, a, b);
  });
}

template <int kC, int kA, int kB>
void dot_s8u8() {
  for_products<kC, kA, kB>([](int64_t m, __m512i a, __m512i b) {
    __m512i& sum = emulated_tiles[kC].rows[m];
    sum = _mm512_dpbusd_epi32(sum, b, a);
  });
}

}  // namespace
}  // namespace nibble::cpu
