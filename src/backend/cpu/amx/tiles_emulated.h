#pragma once

// What tiles.h does with tile instructions, in AVX2: for tests of the AMX kernels on machines
// without AMX. The same bits; slow.

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "backend/cpu/kernel_table.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kTileRow = 64;  // bytes
constexpr int kHalves = 2;        // of a row, eight elements of 32 bits each

struct EmulatedTile {
  __m256i rows[16][kHalves];
  int64_t count;  // rows that the configuration gives it
};

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): registers are
inline thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles(int64_t rows) {
  for (int i = 0; i < 8; ++i) {
    emulated_tiles[i] = {};
    emulated_tiles[i].count = i < 6 ? rows : 16;
  }
}

/// Tiles have no rows until they are configured again.
inline void release_tiles() { configure_tiles(0); }

template <int kTile>
void zero_tile() {
  std::memset(emulated_tiles[kTile].rows, 0, sizeof emulated_tiles[kTile].rows);
}

template <int kTile, int kAt = 0>
void load_tile(const uint8_t* p) {
  zero_tile<kTile>();
  EmulatedTile& tile = emulated_tiles[kTile];
  std::memcpy(tile.rows, p + kAt, static_cast<size_t>(tile.count * kTileRow));
}

template <int kTile, int kAt = 0>
void stream_tile(const uint8_t* p) {
  load_tile<kTile, kAt>(p);
}

template <int kTile, int kAt = 0>
void store_tile(uint8_t* p) {
  const EmulatedTile& tile = emulated_tiles[kTile];
  std::memcpy(p + kAt, tile.rows, static_cast<size_t>(tile.count * kTileRow));
}

template <int kTile>
void load_zeros() {
  zero_tile<kTile>();
}

/// The low and the high parts of the elements of tile kB, by element of a row of the other.
struct SplitRows {
  __m256i low[16][kHalves];
  __m256i high[16][kHalves];

  template <typename Low, typename High>
  SplitRows(const EmulatedTile& tile, const Low& low_of, const High& high_of) {
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < kHalves; ++i) {
        low[k][i] = low_of(tile.rows[k][i]);
        high[k][i] = high_of(tile.rows[k][i]);
      }
    }
  }
};

/// Two sums from zero, of the even and of the odd elements, are added to each other and then to
/// the total; numbers below the smallest normal one count as zeros.
template <int kC, int kA, int kB>
void dot_bf16() {
  constexpr unsigned kNoSubnormals = 0x8040;  // neither read nor made
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | kNoSubnormals);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  const auto even_of = [](__m256i x) { return _mm256_slli_epi32(x, 16); };
  const auto odd_of = [&](__m256i x) { return _mm256_and_si256(x, upper); };
  const SplitRows b(emulated_tiles[kB], even_of, odd_of);
  EmulatedTile& sums = emulated_tiles[kC];
  for (int64_t m = 0; m < sums.count; ++m) {
    int32_t elements[16];
    std::memcpy(elements, emulated_tiles[kA].rows[m], sizeof elements);
    __m256 even[kHalves] = {};
    __m256 odd[kHalves] = {};
    for (int k = 0; k < 16; ++k) {
      const __m256i a = _mm256_set1_epi32(elements[k]);
      const __m256 a_even = _mm256_castsi256_ps(even_of(a));
      const __m256 a_odd = _mm256_castsi256_ps(odd_of(a));
      for (int i = 0; i < kHalves; ++i) {
        even[i] = _mm256_fmadd_ps(a_even, _mm256_castsi256_ps(b.low[k][i]), even[i]);
        odd[i] = _mm256_fmadd_ps(a_odd, _mm256_castsi256_ps(b.high[k][i]), odd[i]);
      }
    }
    for (int i = 0; i < kHalves; ++i) {
      const __m256 total = _mm256_castsi256_ps(sums.rows[m][i]);
      const __m256 sum = _mm256_add_ps(total, _mm256_add_ps(even[i], odd[i]));
      sums.rows[m][i] = _mm256_castps_si256(sum);
    }
  }
  _mm_setcsr(mode);
}

/// Bytes of kA times bytes of kB, each signed or not, four to a sum.
template <int kC, int kA, int kB, bool kSignedA, bool kSignedB>
void dot_bytes() {
  const auto low_of = [](__m256i x, bool is_signed) {
    const __m256i up = _mm256_slli_epi16(x, 8);
    return is_signed ? _mm256_srai_epi16(up, 8) : _mm256_srli_epi16(up, 8);
  };
  const auto high_of = [](__m256i x, bool is_signed) {
    return is_signed ? _mm256_srai_epi16(x, 8) : _mm256_srli_epi16(x, 8);
  };
  const SplitRows b(
      emulated_tiles[kB], [&](__m256i x) { return low_of(x, kSignedB); },
      [&](__m256i x) { return high_of(x, kSignedB); });
  EmulatedTile& sums = emulated_tiles[kC];
  for (int64_t m = 0; m < sums.count; ++m) {
    int32_t elements[16];
    std::memcpy(elements, emulated_tiles[kA].rows[m], sizeof elements);
    for (int k = 0; k < 16; ++k) {
      const __m256i a = _mm256_set1_epi32(elements[k]);
      for (int i = 0; i < kHalves; ++i) {
        const __m256i low = _mm256_madd_epi16(low_of(a, kSignedA), b.low[k][i]);
        const __m256i high = _mm256_madd_epi16(high_of(a, kSignedA), b.high[k][i]);
        sums.rows[m][i] = _mm256_add_epi32(sums.rows[m][i], _mm256_add_epi32(low, high));
      }
    }
  }
}

template <int kC, int kA, int kB>
void dot_u8s8() {
  dot_bytes<kC, kA, kB, false, true>();
}

template <int kC, int kA, int kB>
void dot_s8u8() {
  dot_bytes<kC, kA, kB, true, false>();
}

template <int kC, int kA, int kB>
void dot_s8s8() {
  dot_bytes<kC, kA, kB, true, true>();
}

}  // namespace
}  // namespace nibble::cpu
