#pragma once

// A block of keys and values as they are multiplied; see attention_kernels.h.

#include "backend/cpu/kernels/attention_keys.h"
#include "backend/cpu/kernels/attention_state.h"
#include "backend/cpu/kernels/attention_widen.h"

namespace nibble::cpu {
namespace {

constexpr int32_t kInt8Bias = 128;  // of INT8 keys in pairs

/// What a block's scores and weights are multiplied with: all [kKeyBlock].
struct BlockParams {
  float* score_scale;
  int32_t* value_log;    // INT8 and INT4, of the scale: see code_scale
  float* value_inverse;  // INT8 and INT4: what one of the scale is of the weight, in BF16
  float* value_offset;   // INT4: in units of the scale
};

/// A block of keys and values in scratch.
struct KeyBlock : BlockParams {
  float* keys;  // BF16 caches: [head_dim padded to 32][kKeyBlock]
  int32_t*
      key_pairs;  // the others: [head_dim / 2][kKeyBlock]: INT8 codes, of INT8 caches + kInt8Bias
  float* values;  // [kKeyBlock][head_dim padded to 16]
  uint8_t* wide;  // of FP8 caches, see widen_block
};

/// Parameters of 16 keys as the cache holds them; offsets of INT4 only.
struct CacheParams {
  F32x16 key_scale;
  F32x16 key_offset;
  F32x16 value_scale;
  F32x16 value_offset;
};

/// Elements i .. i + 31 of a value; `values`: those of INT4 codes, see code_values.
template <int kCode>
void load_codes(const uint8_t* row,
                int64_t i,
                [[maybe_unused]] const Simd::CodeTable& values,
                float* to) {
  if constexpr (kCode == 3) {
    return Simd::look_up_u4(row + i / 2, values, to);
  }
  for (int64_t half = 0; half < 32; half += 16) {
    if constexpr (kCode == 1) {
      Simd::store(to + half, load_bf16(row + 2 * (i + half)));
    } else {
      Simd::store(to + half, Simd::to_float(Simd::load_s8(row + i + half)));
    }
  }
}

/// What the 16 codes of an INT4 value stand for in units of its scale, rounded to BF16.
inline F32x16 code_values(float offset) {
  constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return number_as_bf16(Simd::add(Simd::load(kCodes), Simd::set(offset)));
}

inline bool is_finite(float x) { return x - x == 0.0F; }

/// Of keys j .. j + 15, INT8 or INT4; scores are scaled by `scale` besides. A value that is not
/// finite must not reach rows that do not see it, as 0 * NaN would: its row becomes 0 and its score
/// NaN, which spoils just those that see it.
template <int kCode>
[[gnu::always_inline]] inline void store_params(const CacheParams& params,
                                                F32x16 scale,
                                                int64_t j,
                                                const BlockParams& block) {
  using Form = CodeWeightForm;
  const auto if_finite = [](F32x16 zero_or_nan, F32x16 yes, float no) {
    return Simd::select_less(Simd::set(-1.0F), zero_or_nan, yes, Simd::set(no));
  };
  F32x16 key_unit = params.key_scale;
  F32x16 zero = Simd::select_less(params.value_scale, Simd::set(Form::kScaleLimit), Simd::set(0.0F),
                                  Simd::set(__builtin_nanf("")));
  const F32x16 value_scale =
      Simd::max(if_finite(zero, params.value_scale, 0.0F), Simd::set(Form::kLeastScale));
  const F32x16 inverse = Simd::div(Simd::set(1.0F), value_scale);
  Simd::store_int(block.value_log + j, code_scale(value_scale));
  Simd::store(block.value_inverse + j, number_as_bf16(inverse));
  if constexpr (kCode == 3) {
    key_unit = KeyCodes(params.key_scale, params.key_offset).unit;
    const F32x16 offset = Simd::mul(params.value_offset, inverse);
    zero = Simd::add(zero, Simd::sub(offset, offset));
    // Without parts below 2^-16, whose products could be subnormal.
    const F32x16 shift = Simd::set(rounding_shift(16));
    const F32x16 rounded = Simd::sub(Simd::add(if_finite(zero, offset, 0.0F), shift), shift);
    Simd::store(block.value_offset + j, rounded);
  }
  const F32x16 score_scale = Simd::mul(key_unit, scale);
  Simd::store(block.score_scale + j, if_finite(zero, score_scale, __builtin_nanf("")));
}

template <int kCode>
void load_params(const AttentionTask& task,
                 const PackRange& pack,
                 const KvRows& rows,
                 const KeyBlock& block) {
  const F32x16 scale = Simd::set(task.scale * kLog2E);
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    if constexpr (kCode == 1) {
      Simd::store(block.score_scale + j, scale);
      continue;
    }
    float found[4][16] = {};
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t which = 0; which < (kCode == 3 ? 2 : 1); ++which) {
        found[which][i] = rows.keys[j + i].params[which];
        found[2 + which][i] = rows.values[j + i].params[which];
      }
    }
    store_params<kCode>(
        {Simd::load(found[0]), Simd::load(found[1]), Simd::load(found[2]), Simd::load(found[3])},
        scale, j, block);
  }
}

/// Words w of the rows of keys j .. j + 15; `int4`: what their codes stand for.
template <int kCode>
[[gnu::always_inline]] inline void store_keys(I32x16 words,
                                              int64_t w,
                                              int64_t j,
                                              [[maybe_unused]] const KeyCodes& int4,
                                              const KeyBlock& block) {
  if constexpr (kCode == 1) {
    float* keys = block.keys + 2 * w * kKeyBlock + j;
    Simd::store(keys, Simd::from_bits(Simd::shift_left<16>(words)));
    Simd::store(keys + kKeyBlock, upper_halves(words));
  } else if constexpr (kCode == 2) {
    int32_t* pairs = block.key_pairs + 2 * w * kKeyBlock + j;
    const I32x16 bytes = Simd::set_int(0xff00ff);
    const I32x16 codes = Simd::xor_int(words, Simd::set_int(static_cast<int32_t>(0x80808080U)));
    Simd::store_int(pairs, Simd::and_int(codes, bytes));
    Simd::store_int(pairs + kKeyBlock, Simd::and_int(Simd::shift_right<8>(codes), bytes));
  } else {
    int32_t* pairs = block.key_pairs + 4 * w * kKeyBlock + j;
    const auto store = [&](int64_t pair, I32x16 shifted) {
      const I32x16 codes = Simd::and_int(shifted, Simd::set_int(0x000f000f));
      Simd::store_int(pairs + pair * kKeyBlock, Simd::steps_s16(codes, int4.step, int4.start));
    };
    store(0, words);
    store(1, Simd::shift_right<4>(words));
    store(2, Simd::shift_right<8>(words));
    store(3, Simd::upper_nibbles(words));
  }
}

/// What the codes of 16 INT4 keys stand for.
template <int kCode>
KeyCodes key_codes(const KvRow* rows) {
  float params[2][16] = {};
  for (int64_t i = 0; kCode == 3 && i < 16; ++i) {
    params[0][i] = rows[i].params[0];
    params[1][i] = rows[i].params[1];
  }
  return {Simd::load(params[0]), Simd::load(params[1])};
}

/// Words begin .. begin + 15 of keys j .. j + 15, a lane each; 0 past the `count` of a row.
inline void load_key_words(const KvRow* rows, int64_t begin, int64_t count, F32x16 (&words)[16]) {
  if (begin + 16 <= count) {
    for (int64_t i = 0; i < 16; ++i) {
      words[i] = Simd::from_bits(Simd::load_int(rows[i].codes + 4 * begin));
    }
  } else {
    for (int64_t i = 0; i < 16; ++i) {
      words[i] = Simd::from_bits(Simd::load_words(rows[i].codes + 4 * begin, count - begin));
    }
  }
  Simd::transpose(words);
}

template <int kCode>
void load_keys(const AttentionTask& task,
               const PackRange& pack,
               const KvRows& rows,
               const KeyBlock& block,
               RowPrefetch& ahead) {
  const int64_t count = multiplied_bytes<kCode>(task.kv) / 4;
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    ahead.next(4);
    const KeyCodes int4 = key_codes<kCode>(rows.keys + j);
    for (int64_t begin = 0; begin < count; begin += 16) {
      F32x16 words[16];
      load_key_words(rows.keys + j, begin, count, words);
      for (int64_t w = begin; w < smaller(count, begin + 16); ++w) {
        store_keys<kCode>(Simd::bits(words[w - begin]), w, j, int4, block);
      }
    }
  }
}

/// Dims d .. d + 31 of BF16 keys alone, at the beginning of block.keys.
inline void load_key_dims(const AttentionTask& task,
                          const PackRange& pack,
                          const KvRows& rows,
                          int64_t d,
                          const KeyBlock& block) {
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    F32x16 words[16];
    load_key_words(rows.keys + j, d / 2, task.kv.head_dim / 2, words);
#pragma GCC unroll 16
    for (int64_t w = 0; w < 16; ++w) {
      float* keys = block.keys + 2 * w * kKeyBlock + j;
      Simd::store(keys, Simd::from_bits(Simd::shift_left<16>(Simd::bits(words[w]))));
      Simd::store(keys + kKeyBlock, upper_halves(Simd::bits(words[w])));
    }
  }
}

template <int kCode>
void load_values(const AttentionTask& task,
                 const PackRange& pack,
                 const KvRows& rows,
                 const KeyBlock& block,
                 RowPrefetch& ahead) {
  const int64_t dim = task.kv.head_dim;
  const int64_t row_bytes = multiplied_bytes<kCode>(task.kv);
  const int64_t whole = dim / 32 * 32;
  float* values = block.values + pack.begin * round_up(dim, 16);
  for (int64_t j = pack.begin; j < pack.end; ++j) {
    if (j % 4 == 0) {
      ahead.next(1);
    }
    const uint8_t* row = rows.values[j].codes;
    Simd::CodeTable of_codes{};
    if constexpr (kCode == 3) {
      of_codes = Simd::code_table(code_values(block.value_offset[j]));
    }
    for (int64_t d = 0; d < whole; d += 32, values += 32) {
      load_codes<kCode>(row, d, of_codes, values);
    }
    if (whole < dim) {
      const int64_t begin = row_bytes * whole / dim;
      uint8_t bytes[64] = {};
      __builtin_memcpy(bytes, row + begin, static_cast<size_t>(row_bytes - begin));
      float rest[32];
      load_codes<kCode>(bytes, 0, of_codes, rest);
      const int64_t count = round_up(dim - whole, 16);
      __builtin_memcpy(values, rest, static_cast<size_t>(count) * 4);
      values += count;
    }
  }
}

constexpr int64_t kValueColumns = 64;  // of values that are multiplied at a time

/// Columns d .. d + kValueColumns - 1 of BF16 values alone, in rows of as many at the beginning of
/// block.values; 0 past their end.
inline void load_value_columns(const AttentionTask& task,
                               const PackRange& pack,
                               const KvRows& rows,
                               int64_t d,
                               const KeyBlock& block) {
  const int64_t columns = smaller(kValueColumns, task.kv.head_dim - d);
  float* values = block.values + pack.begin * kValueColumns;
  for (int64_t j = pack.begin; j < pack.end; ++j, values += kValueColumns) {
    const uint8_t* row = rows.values[j].codes + 2 * d;
    if (columns == kValueColumns) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kValueColumns; i += 16) {
        Simd::store(values + i, load_bf16(row + 2 * i));
      }
      continue;
    }
    uint8_t bytes[2 * kValueColumns] = {};
    __builtin_memcpy(bytes, row, static_cast<size_t>(columns) * 2);
    for (int64_t i = 0; i < kValueColumns; i += 16) {
      Simd::store(values + i, load_bf16(bytes + 2 * i));
    }
  }
}

/// Values that are not finite, see load_params, where some rows do not see all keys.
inline void contain_values(int64_t dim, const int64_t (&range)[2], const KeyBlock& block) {
  const int64_t padded_dim = round_up(dim, 16);
  for (int64_t j = range[0]; j < range[1]; ++j) {
    float* values = block.values + j * padded_dim;
    F32x16 sum = Simd::set(0.0F);
    for (int64_t d = 0; d < padded_dim; d += 16) {
      sum = Simd::fma(Simd::load(values + d), Simd::set(0.0F), sum);
    }
    if (!is_finite(Simd::reduce_add(sum))) {
      __builtin_memset(values, 0, static_cast<size_t>(padded_dim) * 4);
      block.score_scale[j] = __builtin_nanf("");
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
