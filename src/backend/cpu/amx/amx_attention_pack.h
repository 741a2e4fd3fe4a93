#pragma once

// Keys and values of the cache as BF16 tiles.

#include "backend/cpu/amx/tiles.h"
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

/// exp2_weight with the comparison as a mask.
inline F32x16 tile_weight(F32x16 x) {
  const __m512 shift = _mm512_set1_ps(12582912.0F);
  const __m512 n = _mm512_add_ps(x.v, shift);
  const __m512 f = _mm512_sub_ps(x.v, _mm512_sub_ps(n, shift));
  __m512 p = _mm512_set1_ps(0.00958285576F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0559064402F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240240987F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693124192F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  const __mmask16 counts = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(kLeastLog2), _CMP_NLT_UQ);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(counts, _mm512_castps_si512(p), exponent))};
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

/// Bytes of 32 codes of a row, 0 past its end (`dims` of them are there).
template <int kCode>
__m512i load_bytes(const uint8_t* row, int64_t d, int64_t dims) {
  const int64_t bits = kCode == 1 ? 16 : (kCode == 2 ? 8 : 4);
  const int64_t bytes = dims * bits / 8;
  const auto mask = static_cast<__mmask64>(~uint64_t{0}) >> (64 - bytes);
  return _mm512_maskz_loadu_epi8(mask, row + d * bits / 8);
}

inline __m512 floats_of_bytes(__m128i bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/// 32 dims of a key in BF16.
template <int kCode>
__m512i key_dims(const uint8_t* row, int64_t d, int64_t dims) {
  const __m512i bytes = load_bytes<kCode>(row, d, dims);
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
inline void contain_tile_values(const KvRow& value,
                                int64_t dim,
                                int64_t j,
                                const TileBlock& block) {
  __mmask32 spoiled = 0;
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512i words = load_bytes<1>(value.codes, d, smaller(32, dim - d));
    const __m512i infinity = _mm512_set1_epi16(0x7f80);
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

alignas(64) constexpr uint8_t kZeroRow[kMaxHeadDim * 2] = {};

/// Where the rows of a block's keys lie; those that are not there are zeros.
inline void find_block(const AttentionTask& task,
                       int64_t at,
                       const int64_t (&range)[2],
                       KvRows& rows) {
  static constexpr float kNoParams[2] = {0.0F, 0.0F};
  find_rows(task, at + range[0], at + range[1], range[0], rows);
  const KvRow none{kZeroRow, kNoParams};
  for (int64_t j = range[0] / 32 * 32; j < range[0]; ++j) {
    rows.keys[j] = rows.values[j] = none;
  }
  for (int64_t j = range[1]; j < round_up(range[1], 32); ++j) {
    rows.keys[j] = rows.values[j] = none;
  }
}

/// Fills the tiles of the keys `range` of the block at `at`, in whole groups of 32.
template <int kCode>
void pack_block(const AttentionTask& task,
                int64_t at,
                const int64_t (&range)[2],
                bool narrow,
                TileBlock block) {
  const int64_t dim = task.kv.head_dim;
  KvRows rows;
  find_block(task, at, range, rows);
  const float scale = task.scale * kLog2E;
  KeyBlock params{nullptr,           nullptr,           block.score_scale, block.score_offset,
                  block.value_scale, block.value_offset};
  for (int64_t j = range[0] / 32 * 32; j < round_up(range[1], 32); j += 2) {
    load_params<kCode>(rows.keys[j], rows.values[j], scale, j, params);
    load_params<kCode>(rows.keys[j + 1], rows.values[j + 1], scale, j + 1, params);
    for (int64_t k = 0; k < block.width; ++k) {
      const int64_t dims = smaller(32, dim - 32 * k);
      for (int64_t i = j; i < j + 2; ++i) {
        uint8_t* row = key_tile(block, j / 16, k) + i % 16 * 64;
        _mm512_storeu_si512(row, key_dims<kCode>(rows.keys[i].codes, 32 * k, dims));
      }
      const __m512i bytes[2] = {load_bytes<kCode>(rows.values[j].codes, 32 * k, dims),
                                load_bytes<kCode>(rows.values[j + 1].codes, 32 * k, dims)};
      const int64_t row = j % 32 / 2 * 64;
      value_dims<kCode>(bytes, value_tile(block, j / 32, 2 * k) + row,
                        value_tile(block, j / 32, 2 * k + 1) + row);
    }
  }
  for (int64_t j = range[0]; kCode == 1 && task.tokens > 1 && j < range[1]; ++j) {
    contain_tile_values(rows.values[j], dim, j, block);
  }
  for (int64_t g = range[0] / 32 * 2; !narrow && g < round_up(range[1], 32) / 16; ++g) {
    for (int64_t k = 0; k < block.width; ++k) {
      transpose_tile(key_tile(block, g, k), key_tile(block, g, k));
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
