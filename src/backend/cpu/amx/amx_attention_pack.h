#pragma once

// Keys and values of the cache as BF16 tiles.

#include "backend/cpu/amx/choose_tiles.h"
#include "backend/cpu/kernels/attention_kernels.h"

namespace nibble::cpu {
namespace {

/// What the scores and weights of a block's keys are multiplied with: see BlockParams. INT8 and
/// INT4 caches: 16-bit numbers of keys i and 16 + i of 32 side by side.
struct alignas(64) PackedParams {
  float score_scale[kKeyBlock];
  uint16_t logs[kKeyBlock];      // value_log
  uint16_t inverses[kKeyBlock];  // value_inverse, in BF16
};

/// A block of keys and values; tiles of 1024 bytes. Pairs of keys are neighbours for BF16 caches,
/// keys i and 16 + i of 32 for the others.
struct TileBlock {
  int64_t width;      // head_dim in blocks of 32
  int64_t key_width;  // head_dim in blocks of 64 bytes of a key
  uint8_t* keys;      // [key group of 32][key_width][2]: 16 keys of 64 bytes, or 16 times four
                      // bytes of 16 keys
  uint8_t* values;    // [key group of 32][2 width]: 16 pairs of keys of 16 dims
  PackedParams* params;
  float* offsets;  // INT4, of the block that was packed last: value_offset
};

inline uint8_t* key_tile(const TileBlock& block, int64_t group, int64_t k) {
  return block.keys + ((group / 2 * block.key_width + k) * 2 + group % 2) * kTileBytes;
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

/// The same of the first eight elements of each row, in place: they become the first eight rows.
inline void transpose_half(uint8_t* tile) {
  __m512 rows[8];  // 4i + j: rows 8i + j and 8i + 4 + j
  for (int64_t i = 0; i < 8; ++i) {
    const auto* row = reinterpret_cast<const float*>(tile + (i / 4 * 8 + i % 4) * 64);
    rows[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row)),
                                 _mm256_loadu_ps(row + 4 * 16), 1);
  }
  __m512 columns[8];  // 4i + j: elements j and 4 + j of rows 8i .. 8i + 3, then of the next four
  for (int64_t i = 0; i < 8; i += 4) {
    const __m512 first[2] = {_mm512_unpacklo_ps(rows[i], rows[i + 1]),
                             _mm512_unpackhi_ps(rows[i], rows[i + 1])};
    const __m512 second[2] = {_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]),
                              _mm512_unpackhi_ps(rows[i + 2], rows[i + 3])};
    for (int64_t j = 0; j < 2; ++j) {
      columns[i + 2 * j] = _mm512_shuffle_ps(first[j], second[j], 0x44);
      columns[i + 2 * j + 1] = _mm512_shuffle_ps(first[j], second[j], 0xee);
    }
  }
  for (int64_t j = 0; j < 4; ++j) {
    _mm512_storeu_ps(tile + j * 64, _mm512_shuffle_f32x4(columns[j], columns[4 + j], 0x88));
    _mm512_storeu_ps(tile + (4 + j) * 64, _mm512_shuffle_f32x4(columns[j], columns[4 + j], 0xdd));
  }
}

/// 32 BF16 numbers of a row from dim `d` on, 0 past its end; kWhole: the row has them all.
template <bool kWhole>
__m512i load_words(const uint8_t* row, int64_t d, int64_t dim) {
  const uint8_t* from = row + d * 2;
  if constexpr (kWhole) {
    return _mm512_loadu_si512(from);
  }
  const int64_t words = smaller(32, dim - d);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(~uint32_t{0} >> (32 - words)), from);
}

/// 16 bytes, 0 past the row's last `bytes`; kWhole: the row has them all.
template <bool kWhole>
__m128i load_bytes(const uint8_t* from, int64_t bytes) {
  if constexpr (kWhole) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  const auto mask = static_cast<__mmask16>((1U << larger(0, smaller(16, bytes))) - 1);
  return _mm_maskz_loadu_epi8(mask, from);
}

/// 16 INT8 codes of a row from dim `d` on as F32 numbers.
template <bool kWhole>
__m512 load_floats(const uint8_t* row, int64_t d, int64_t dim) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes<kWhole>(row + d, dim - d)));
}

/// 32 INT4 codes of a row from dim `d` on: two in the low byte of each lane.
template <bool kWhole>
__m512i load_pairs(const uint8_t* row, int64_t d, int64_t dim) {
  return _mm512_cvtepu8_epi32(load_bytes<kWhole>(row + d / 2, (dim - d) / 2));
}

/// kMost bytes, 0 past the first `bytes`; kWhole: there are that many.
template <bool kWhole, int64_t kMost = 64>
__m512i load_row(const uint8_t* from, int64_t bytes) {
  alignas(64) uint8_t row[64] = {};
  __builtin_memcpy(row, from, kWhole ? kMost : static_cast<size_t>(bytes));
  return _mm512_load_si512(row);
}

/// Block k of 64 bytes of a key: 32 BF16 numbers or 64 INT8 codes. What is past its end meets
/// zeros. `table`: of the key's codes, INT4.
template <int kCode, bool kWhole>
__m512i key_dims(const uint8_t* row, int64_t k, int64_t dim, [[maybe_unused]] __m512i table) {
  if constexpr (kCode == 1) {
    return load_words<kWhole>(row, 32 * k, dim);
  } else if constexpr (kCode == 2) {
    return load_row<kWhole>(row + 64 * k, smaller(64, dim - 64 * k));
  } else {
    const __m512i codes = load_row<kWhole, 32>(row + 32 * k, smaller(32, dim / 2 - 32 * k));
    const __m512i x = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes));
    const __m512i nibbles = _mm512_or_si512(x, _mm512_slli_epi16(x, 4));
    return _mm512_shuffle_epi8(table, _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
  }
}

/// 16 keys' first and second parameters.
template <int kCode>
void split_params(const float* params, F32x16& scale, F32x16& offset) {
  scale = Simd::load(params);
  if constexpr (kCode == 3) {
    const F32x16 upper = Simd::load(params + 16);
    offset = Simd::odds(scale, upper);
    scale = Simd::evens(scale, upper);
  }
}

/// For each of 16 INT4 keys the INT8 codes of its 16 codes, four times.
template <int kCode>
class KeyTables {
 public:
  explicit KeyTables(const float* key_params) {
    if constexpr (kCode == 3) {
      F32x16 scale;
      F32x16 offset;
      split_params<kCode>(key_params, scale, offset);
      const KeyCodes codes(scale, offset);
      Simd::store_int(step_, codes.step);
      Simd::store_int(start_, codes.start);
    }
  }

  [[nodiscard]] __m512i of(int64_t key) const {
    if constexpr (kCode == 3) {
      const __m256i codes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m256i steps = _mm256_mullo_epi16(codes, _mm256_set1_epi32(step_[key]));
      const __m256i sums = _mm256_add_epi16(steps, _mm256_set1_epi32(start_[key]));
      const __m256i numbers = _mm256_srai_epi16(sums, 8);
      const __m128i table =
          _mm_packs_epi16(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
      return _mm512_broadcast_i32x4(table);
    }
    return _mm512_setzero_si512();
  }

 private:
  int32_t step_[16];
  int32_t start_[16];
};

/// Two keys' values of INT4 codes in BF16, by code: those of the first in the lower half.
inline __m512i code_table(float first_offset, float second_offset) {
  return reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(code_values(second_offset).v, code_values(first_offset).v));
}

/// `codes`: one of the first key in each low half, of the second in the high half.
inline __m512i look_up_codes(__m512i codes, __m512i table) {
  const __m512i upper = _mm512_set1_epi32(0x100000);
  const __m512i indices =
      _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0x000f000f), upper, 0xea);
  return _mm512_permutexvar_epi16(indices, table);
}

/// 32 dims of two keys' values, pairs of keys side by side, as rows of two tiles: dims
/// 0 to 15 and 16 to 31; for INT4 the even and the odd ones. `table`: see code_table.
template <int kCode, bool kWhole>
void value_dims(const uint8_t* even_row,
                const uint8_t* odd_row,
                int64_t d,
                int64_t dim,
                [[maybe_unused]] __m512i table,
                uint8_t* low) {
  uint8_t* high = low + kTileBytes;
  if constexpr (kCode == 1) {
    const __m512i even = load_words<kWhole>(even_row, d, dim);
    const __m512i odd = load_words<kWhole>(odd_row, d, dim);
    const auto pairs = [](__m256i first, __m256i second) {
      return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                             _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
    };
    _mm512_storeu_si512(low, pairs(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
    _mm512_storeu_si512(
        high, pairs(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1)));
  } else if constexpr (kCode == 2) {
    const auto pairs = [&](int64_t at) {
      const __m512i even = _mm512_castps_si512(load_floats<kWhole>(even_row, at, dim));
      const __m512i odd = _mm512_castps_si512(load_floats<kWhole>(odd_row, at, dim));
      return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
    };
    _mm512_storeu_si512(low, pairs(d));
    _mm512_storeu_si512(high, pairs(d + 16));
  } else {
    const __m512i even = load_pairs<kWhole>(even_row, d, dim);
    const __m512i odd = load_pairs<kWhole>(odd_row, d, dim);
    const __m512i pair = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    _mm512_storeu_si512(low, look_up_codes(pair, table));
    _mm512_storeu_si512(high, look_up_codes(_mm512_srli_epi32(pair, 4), table));
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
inline void contain_values(const uint8_t* value, int64_t dim, int64_t j, const TileBlock& block) {
  const __m512i infinity = _mm512_set1_epi16(0x7f80);
  __mmask32 spoiled = 0;
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512i words = load_words<false>(value, d, dim);
    spoiled |=
        _mm512_cmpge_epu16_mask(_mm512_and_si512(words, _mm512_set1_epi16(0x7fff)), infinity);
  }
  if (spoiled == 0) {
    return;
  }
  block.params->score_scale[j] = __builtin_nanf("");
  for (int64_t d = 0; d < 2 * block.width; ++d) {
    uint8_t* row = value_tile(block, j / 32, d) + j % 32 / 2 * 64 + j % 2 * 2;
    for (int64_t i = 0; i < 16; ++i) {
      row[i * 4] = row[i * 4 + 1] = 0;
    }
  }
}

constexpr int64_t kGroupKeys = 16;
constexpr int64_t kGroupCopyBytes = 2 * kGroupKeys * (kMaxHeadDim * 2 + 2 * 4);

/// 16 neighbouring keys and their values, rows one after the other, those of widened caches as
/// BF16 numbers; parameters as the cache has them.
struct KeyGroup {
  const uint8_t* keys;
  const uint8_t* values;
  const float* key_params;
  const float* value_params;
};

using BlockGroups = KeyGroup[kKeyBlock / kGroupKeys];

/// Those from `position` on, which lie in one page.
inline KeyGroup group_in_page(const AttentionTask& task, int64_t position) {
  const KvLayout& kv = task.kv;
  const auto at = static_cast<uint32_t>(position);
  const auto page_size = static_cast<uint32_t>(kv.page_size);
  const int64_t slot = at % page_size;
  const uint8_t* head =
      kv.pages + task.page_list[at / page_size] * kv.page_bytes + task.kv_head * kv.head_bytes;
  const auto rows = [&](const KvHalf& half) { return head + half.rows + slot * kv.row_bytes; };
  const auto params = [&](const KvHalf& half) {
    return reinterpret_cast<const float*>(head + half.sets + slot * half.set_bytes);
  };
  return {rows(kv.keys), rows(kv.values), params(kv.keys), params(kv.values)};
}

/// Keys j .. j + 15 of a block in `memory`, kGroupCopyBytes; those that are not there are zeros.
inline KeyGroup copy_group(const AttentionTask& task,
                           const PackRange& pack,
                           int64_t j,
                           uint8_t* memory) {
  const auto bytes =
      static_cast<size_t>(task.kv.widened() ? 2 * task.kv.head_dim : task.kv.row_bytes);
  const auto param_bytes = static_cast<size_t>(task.kv.row_params * 4);
  uint8_t* keys = memory;
  uint8_t* values = keys + kGroupKeys * kMaxHeadDim * 2;
  uint8_t* key_params = values + kGroupKeys * kMaxHeadDim * 2;
  uint8_t* value_params = key_params + kGroupKeys * 2 * 4;
  const int64_t first = larger(j, pack.range[0]);
  const int64_t last = smaller(j + kGroupKeys, pack.range[1]);
  if (last - first < kGroupKeys) {
    __builtin_memset(keys, 0, kGroupKeys * bytes);
    __builtin_memset(values, 0, kGroupKeys * bytes);
  }
  __builtin_memset(key_params, 0, 2 * kGroupKeys * 2 * 4);
  KvRows rows;
  if (first < last) {
    find_rows(task, pack.at + first, pack.at + last, first - j, rows);
  }
  if (task.kv.widened() && first < last) {
    const int64_t at = first - j;
    widen_keys(task.kv, rows.keys + at, last - first, keys + static_cast<size_t>(at) * bytes);
    if (task.kv.latent_rank > 0) {
      values = keys;
    } else {
      widen_values(task.kv, rows.values + at, last - first,
                   values + static_cast<size_t>(at) * bytes);
    }
  }
  for (int64_t i = first - j; i < last - j && !task.kv.widened(); ++i) {
    const auto at = static_cast<size_t>(i);
    __builtin_memcpy(keys + at * bytes, rows.keys[i].codes, bytes);
    __builtin_memcpy(values + at * bytes, rows.values[i].codes, bytes);
    __builtin_memcpy(key_params + at * param_bytes, rows.keys[i].params, param_bytes);
    __builtin_memcpy(value_params + at * param_bytes, rows.values[i].params, param_bytes);
  }
  return {keys, values, reinterpret_cast<const float*>(key_params),
          reinterpret_cast<const float*>(value_params)};
}

/// Where a block's groups of keys lie: in the cache, if it has all of a group in a page as it is
/// multiplied, else as copies in `memory`.
inline void find_block(const AttentionTask& task,
                       const PackRange& pack,
                       uint8_t* memory,
                       BlockGroups& groups) {
  const bool whole_pages = task.kv.page_size % kGroupKeys == 0 && !task.kv.widened();
  for (int64_t j = pack.begin; j < pack.end; j += kGroupKeys) {
    const int64_t group = j / kGroupKeys;
    if (whole_pages && j >= pack.range[0] && j + kGroupKeys <= pack.range[1]) {
      groups[group] = group_in_page(task, pack.at + j);
    } else {
      groups[group] = copy_group(task, pack, j, memory + group * kGroupCopyBytes);
    }
  }
}

/// load_params of kernels/attention_block.h, 16 keys at a time.
template <int kCode>
void pack_params(const AttentionTask& task,
                 const PackRange& pack,
                 const BlockGroups& groups,
                 const TileBlock& block) {
  const F32x16 scale = Simd::set(task.scale * kLog2E);
  int32_t logs[kKeyBlock];
  float inverses[kKeyBlock];
  const auto store_pairs = [](const void* numbers, auto narrowed, uint16_t* to) {
    const auto* from = static_cast<const int32_t*>(numbers);
    const I32x16 pairs = narrowed(Simd::load_int(from), Simd::load_int(from + kGroupKeys));
    Simd::store_int(reinterpret_cast<int32_t*>(to), pairs);
  };
  const auto low_halves = [](I32x16 first, I32x16 second) {
    return Simd::or_int(Simd::and_int(first, Simd::set_int(0xffff)), Simd::shift_left<16>(second));
  };
  const auto high_halves = [](I32x16 first, I32x16 second) {
    return Simd::or_int(Simd::shift_right<16>(first), second);
  };
  for (int64_t j = pack.begin; j < pack.end; j += kGroupKeys) {
    if constexpr (kCode == 1) {
      Simd::store(block.params->score_scale + j, scale);
      continue;
    }
    const KeyGroup& group = groups[j / kGroupKeys];
    CacheParams params;
    split_params<kCode>(group.key_params, params.key_scale, params.key_offset);
    split_params<kCode>(group.value_params, params.value_scale, params.value_offset);
    store_params<kCode>(params, scale, j,
                        {block.params->score_scale, logs, inverses, block.offsets});
  }
  for (int64_t j = pack.begin; kCode != 1 && j < pack.end; j += kDotBlock) {
    store_pairs(logs + j, low_halves, block.params->logs + j);
    store_pairs(inverses + j, high_halves, block.params->inverses + j);
  }
}

template <int kCode, bool kWhole>
void pack_keys(const AttentionTask& task,
               const PackRange& pack,
               const BlockGroups& groups,
               bool narrow,
               const TileBlock& block) {
  const int64_t bytes = multiplied_bytes<kCode>(task.kv);
  for (int64_t j = pack.begin; j < pack.end; j += kGroupKeys) {
    const KeyGroup& group = groups[j / kGroupKeys];
    const KeyTables<kCode> tables(group.key_params);
    for (int64_t k = 0; k < block.key_width; ++k) {
      F32x16 keys[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        const uint8_t* row = group.keys + i * bytes;
        keys[i].v =
            _mm512_castsi512_ps(key_dims<kCode, kWhole>(row, k, task.kv.head_dim, tables.of(i)));
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
                 const BlockGroups& groups,
                 const TileBlock& block) {
  const int64_t dim = task.kv.head_dim;
  const int64_t bytes = multiplied_bytes<kCode>(task.kv);
  for (int64_t j = pack.begin; j < pack.end; j += 2) {
    const int64_t i = j % 32 / 2;  // of the pairs
    const KeyGroup* group = groups + j / 32 * 2;
    const auto value_of = [&](int64_t key) {
      return group[key / kGroupKeys].values + key % kGroupKeys * bytes;
    };
    const uint8_t* first = value_of(kCode == 1 ? 2 * i : i);
    const uint8_t* second = value_of(kCode == 1 ? 2 * i + 1 : kGroupKeys + i);
    __m512i table = _mm512_setzero_si512();
    if constexpr (kCode == 3) {
      const float* offsets = block.offsets + j / 32 * 32 + i;
      table = code_table(offsets[0], offsets[16]);
    }
    for (int64_t k = 0; k < block.width; ++k) {
      uint8_t* low = value_tile(block, j / 32, 2 * k) + i * 64;
      value_dims<kCode, kWhole>(first, second, 32 * k, dim, table, low);
    }
  }
  for (int64_t j = pack.range[0]; kCode == 1 && task.tokens > 1 && j < pack.range[1]; ++j) {
    const uint8_t* row = groups[j / kGroupKeys].values + j % kGroupKeys * bytes;
    contain_values(row, dim, j, block);
  }
}

}  // namespace
}  // namespace nibble::cpu
