#pragma once

// Keys and values of the cache as BF16 tiles.

#include "backend/cpu/amx/choose_tiles.h"
#include "backend/cpu/kernels/attention_kernels.h"

namespace nibble::cpu {
namespace {

/// A block of keys and values; tiles of 1024 bytes.
struct TileBlock {
  int64_t width;    // head_dim in blocks of 32
  uint8_t* keys;    // [key group of 16][width]: 16 keys of 32 dims, or 16 pairs of dims of 16 keys
  uint8_t* values;  // [key group of 32][2 width]: 16 pairs of keys of 16 dims
  float* score_scale;  // as in KeyBlock
  float* score_offset;
  float* value_scale;
  float* value_offset;
};

inline uint8_t* key_tile(const TileBlock& block, int64_t group, int64_t k) {
  return block.keys + (group * block.width + k) * kTileBytes;
}

inline uint8_t* value_tile(const TileBlock& block, int64_t group, int64_t d) {
  return block.values + (group * 2 * block.width + d) * kTileBytes;
}

/// Element j of row i becomes element i of row j, in units of four bytes.
inline void transpose_tile(const uint8_t* from, uint8_t* to) {
  F32x16 rows[16];
  for (int64_t i = 0; i < 16; ++i) {
    rows[i] = Simd::load(reinterpret_cast<const float*>(from + i * 64));
  }
  Simd::transpose(rows);
  for (int64_t i = 0; i < 16; ++i) {
    Simd::store(reinterpret_cast<float*>(to + i * 64), rows[i]);
  }
}

/// INT4 codes minus 7.5 in BF16, twice: only the low four of five bits of an index are the code.
alignas(64) constexpr uint16_t kCodeTable[32] = {
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020,
    0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0, 0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020,
    0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};

inline __m512i look_up_codes(__m512i indices) {
  return _mm512_permutexvar_epi16(indices, _mm512_load_si512(kCodeTable));
}

/// Bytes of 32 codes of a row, 0 past its end; kWhole: the row has them all.
template <int kCode, bool kWhole>
__m512i load_bytes(const uint8_t* row, int64_t d, int64_t dim) {
  constexpr int64_t kBits = kCode == 1 ? 16 : (kCode == 2 ? 8 : 4);
  const uint8_t* from = row + d * kBits / 8;
  if constexpr (!kWhole) {
    const int64_t bytes = smaller(32, dim - d) * kBits / 8;
    const auto mask = static_cast<__mmask64>(~uint64_t{0}) >> (64 - bytes);
    return _mm512_maskz_loadu_epi8(mask, from);
  } else if constexpr (kCode == 1) {
    return _mm512_loadu_si512(from);
  } else if constexpr (kCode == 2) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  } else {
    return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
}

inline __m512 floats_of_bytes(__m128i bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/// 32 dims of a key in BF16.
template <int kCode, bool kWhole>
__m512i key_dims(const uint8_t* row, int64_t d, int64_t dim) {
  const __m512i bytes = load_bytes<kCode, kWhole>(row, d, dim);
  if constexpr (kCode == 1) {
    return bytes;
  } else if constexpr (kCode == 2) {
    const __m512 low = floats_of_bytes(_mm512_castsi512_si128(bytes));
    const __m512 high = floats_of_bytes(_mm512_extracti32x4_epi32(bytes, 1));
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  } else {
    const __m512i x = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes));
    return look_up_codes(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)));
  }
}

/// 32 dims of two neighbouring keys' values, pairs of keys side by side, as rows of two tiles: dims
/// 0 to 15 and 16 to 31; for INT4 the even and the odd ones.
template <int kCode>
void value_dims(const __m512i (&bytes)[2], uint8_t* low, uint8_t* high) {
  if constexpr (kCode == 1) {
    __m512i words[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i even =
          i == 0 ? _mm512_castsi512_si256(bytes[0]) : _mm512_extracti64x4_epi64(bytes[0], 1);
      const __m256i odd =
          i == 0 ? _mm512_castsi512_si256(bytes[1]) : _mm512_extracti64x4_epi64(bytes[1], 1);
      const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
      words[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), upper);
    }
    _mm512_storeu_si512(low, words[0]);
    _mm512_storeu_si512(high, words[1]);
  } else if constexpr (kCode == 2) {
    __m512i words[2];
    for (int i = 0; i < 2; ++i) {
      const __m128i even =
          i == 0 ? _mm512_castsi512_si128(bytes[0]) : _mm512_extracti32x4_epi32(bytes[0], 1);
      const __m128i odd =
          i == 0 ? _mm512_castsi512_si128(bytes[1]) : _mm512_extracti32x4_epi32(bytes[1], 1);
      const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(floats_of_bytes(even)), 16);
      words[i] = _mm512_or_si512(lower, _mm512_castps_si512(floats_of_bytes(odd)));
    }
    _mm512_storeu_si512(low, words[0]);
    _mm512_storeu_si512(high, words[1]);
  } else {
    const __m512i even = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes[0]));
    const __m512i odd = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes[1]));
    const __m512i pair = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    _mm512_storeu_si512(low, look_up_codes(pair));
    _mm512_storeu_si512(high, look_up_codes(_mm512_srli_epi32(pair, 4)));
  }
}

/// Dims 16 half .. 16 half + 15 of a block of 32, whose two tile rows begin at `row`.
template <int kCode>
F32x16 acc_dims(const uint8_t* row, int64_t half) {
  const __m512 low = _mm512_loadu_ps(reinterpret_cast<const float*>(row));
  const __m512 high = _mm512_loadu_ps(reinterpret_cast<const float*>(row + kTileBytes));
  if constexpr (kCode != 3) {
    return {half == 0 ? low : high};
  }
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i index = _mm512_add_epi32(first, _mm512_set1_epi32(half == 0 ? 0 : 8));
  return {_mm512_permutex2var_ps(low, index, high)};
}

/// BF16 values that are not finite, see load_params: their row becomes 0, their score NaN.
inline void contain_values(const KvRow& value, int64_t dim, int64_t j, const TileBlock& block) {
  const __m512i infinity = _mm512_set1_epi16(0x7f80);
  __mmask32 spoiled = 0;
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512i words = load_bytes<1, false>(value.codes, d, dim);
    spoiled |=
        _mm512_cmpge_epu16_mask(_mm512_and_si512(words, _mm512_set1_epi16(0x7fff)), infinity);
  }
  if (spoiled == 0) {
    return;
  }
  block.score_scale[j] = __builtin_nanf("");
  for (int64_t d = 0; d < 2 * block.width; ++d) {
    uint8_t* row = value_tile(block, j / 32, d) + j % 32 / 2 * 64 + j % 2 * 2;
    for (int64_t i = 0; i < 16; ++i) {
      row[i * 4] = row[i * 4 + 1] = 0;
    }
  }
}

/// load_params of whole vectors.
template <int kCode>
void pack_params(const AttentionTask& task,
                 const PackRange& pack,
                 const KvRows& rows,
                 const TileBlock& block) {
  const F32x16 scale = Simd::set(task.scale * kLog2E);
  for (int64_t j = pack.begin; kCode != 1 && j < pack.end; ++j) {
    block.score_scale[j] = rows.keys[j].params[0];
    block.value_scale[j] = rows.values[j].params[0];
    if constexpr (kCode == 3) {
      block.score_offset[j] = rows.keys[j].params[1];
      block.value_offset[j] = rows.values[j].params[1];
    }
  }
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    if constexpr (kCode == 1) {
      Simd::store(block.score_scale + j, scale);
      continue;
    }
    const F32x16 middle = Simd::set(kMiddleCode);
    const F32x16 key_scale = Simd::load(block.score_scale + j);
    const F32x16 value_scale = Simd::load(block.value_scale + j);
    F32x16 zero = Simd::sub(value_scale, value_scale);  // or NaN
    if constexpr (kCode == 3) {
      const F32x16 key_offset = Simd::load(block.score_offset + j);
      const F32x16 key_middle = Simd::fma(middle, key_scale, key_offset);
      Simd::store(block.score_offset + j, Simd::mul(key_middle, scale));
      const F32x16 value_offset = Simd::load(block.value_offset + j);
      const F32x16 value_middle = Simd::fma(middle, value_scale, value_offset);
      zero = Simd::add(zero, Simd::sub(value_middle, value_middle));
      Simd::store(block.value_offset + j, value_middle);
    }
    const __mmask16 spoiled = _mm512_cmp_ps_mask(zero.v, zero.v, _CMP_UNORD_Q);
    const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
    Simd::store(block.score_scale + j,
                {_mm512_mask_mov_ps(Simd::mul(key_scale, scale).v, spoiled, nan)});
    if (spoiled != 0) {
      _mm512_mask_storeu_ps(block.value_scale + j, spoiled, _mm512_setzero_ps());
      _mm512_mask_storeu_ps(block.value_offset + j, spoiled, _mm512_setzero_ps());
    }
  }
}

template <int kCode, bool kWhole>
void pack_keys(const AttentionTask& task,
               const PackRange& pack,
               const KvRows& rows,
               bool narrow,
               const TileBlock& block) {
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    for (int64_t k = 0; k < block.width; ++k) {
      F32x16 keys[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        keys[i].v = _mm512_castsi512_ps(
            key_dims<kCode, kWhole>(rows.keys[j + i].codes, 32 * k, task.kv.head_dim));
      }
      if (!narrow) {
        Simd::transpose(keys);
      }
      auto* tile = reinterpret_cast<float*>(key_tile(block, j / 16, k));
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        Simd::store(tile + 16 * i, keys[i]);
      }
    }
  }
}

template <int kCode, bool kWhole>
void pack_values(const AttentionTask& task,
                 const PackRange& pack,
                 const KvRows& rows,
                 const TileBlock& block) {
  const int64_t dim = task.kv.head_dim;
  for (int64_t j = pack.begin; j < pack.end; j += 2) {
    const int64_t row = j % 32 / 2 * 64;
    for (int64_t k = 0; k < block.width; ++k) {
      const __m512i bytes[2] = {load_bytes<kCode, kWhole>(rows.values[j].codes, 32 * k, dim),
                                load_bytes<kCode, kWhole>(rows.values[j + 1].codes, 32 * k, dim)};
      value_dims<kCode>(bytes, value_tile(block, j / 32, 2 * k) + row,
                        value_tile(block, j / 32, 2 * k + 1) + row);
    }
  }
  for (int64_t j = pack.range[0]; kCode == 1 && task.tokens > 1 && j < pack.range[1]; ++j) {
    contain_values(rows.values[j], dim, j, block);
  }
}

}  // namespace
}  // namespace nibble::cpu
