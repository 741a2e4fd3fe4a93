#pragma once

// A block of keys and values as they are multiplied; see attention_kernels.h.

#include "backend/cpu/kernels/attention_state.h"

namespace nibble::cpu {
namespace {

constexpr float kMiddleCode = 7.5F;
constexpr int32_t kInt8Bias = 128;  // of INT8 keys in pairs

/// A block of keys and values in scratch, and the parameters of each key.
struct KeyBlock {
  float* keys;         // BF16 caches: [head_dim padded to 32][kKeyBlock]
  int32_t* key_pairs;  // the others: [head_dim / 2][kKeyBlock]: INT8 codes + 128, INT4 codes * 2
  float* values;       // [kKeyBlock][head_dim padded to 16]
  float* score_scale;  // all [kKeyBlock]
  float* score_offset;
  float* value_scale;
  float* value_offset;
};

template <int kCode>
F32x16 load_codes(const uint8_t* row, int64_t i) {
  if constexpr (kCode == 1) {
    return load_bf16(row + 2 * i);
  } else if constexpr (kCode == 2) {
    return Simd::to_float(Simd::load_s8(row + i));
  } else {
    return Simd::sub(Simd::to_float(Simd::load_u4(row + i / 2)), Simd::set(kMiddleCode));
  }
}

inline bool is_finite(float x) { return x - x == 0.0F; }

/// A value that is not finite must not reach rows that do not see it, as 0 * NaN would: its row
/// becomes 0 and its score NaN, which spoils just those that see it.
template <int kCode>
void load_params(const AttentionTask& task,
                 const PackRange& pack,
                 const KvRows& rows,
                 const KeyBlock& block) {
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
    const F32x16 key_scale = Simd::load(block.score_scale + j);
    const F32x16 value_scale = Simd::load(block.value_scale + j);
    F32x16 value_offset = Simd::set(0.0F);
    if constexpr (kCode == 3) {
      const F32x16 middle = Simd::set(kMiddleCode);
      const F32x16 key_offset = Simd::load(block.score_offset + j);
      const F32x16 score_offset = Simd::mul(Simd::fma(middle, key_scale, key_offset), scale);
      Simd::store(block.score_offset + j, score_offset);
      value_offset = Simd::fma(middle, value_scale, Simd::load(block.value_offset + j));
    }
    const F32x16 zero = Simd::add(Simd::sub(value_scale, value_scale),
                                  Simd::sub(value_offset, value_offset));  // or NaN
    const auto if_finite = [&](F32x16 yes, float no) {
      return Simd::select_less(Simd::set(-1.0F), zero, yes, Simd::set(no));
    };
    Simd::store(block.score_scale + j, if_finite(Simd::mul(key_scale, scale), __builtin_nanf("")));
    Simd::store(block.value_scale + j, if_finite(value_scale, 0.0F));
    Simd::store(block.value_offset + j, if_finite(value_offset, 0.0F));
  }
}

/// Words w of the rows of keys j .. j + 15.
template <int kCode>
[[gnu::always_inline]] inline void store_keys(I32x16 words,
                                              int64_t w,
                                              int64_t j,
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
    const I32x16 codes = Simd::set_int(0x1e001e);
    Simd::store_int(pairs, Simd::and_int(Simd::shift_left<1>(words), codes));
    Simd::store_int(pairs + kKeyBlock, Simd::and_int(Simd::shift_right<3>(words), codes));
    Simd::store_int(pairs + 2 * kKeyBlock, Simd::and_int(Simd::shift_right<7>(words), codes));
    Simd::store_int(pairs + 3 * kKeyBlock, Simd::and_int(Simd::shift_right<11>(words), codes));
  }
}

template <int kCode>
void load_keys(const AttentionTask& task,
               const PackRange& pack,
               const KvRows& rows,
               const KeyBlock& block,
               RowPrefetch& ahead) {
  const int64_t count = task.kv.row_bytes / 4;
  for (int64_t j = pack.begin; j < pack.end; j += 16) {
    ahead.next(4);
    for (int64_t begin = 0; begin < count; begin += 16) {
      F32x16 words[16];
      if (begin + 16 <= count) {
        for (int64_t i = 0; i < 16; ++i) {
          words[i] = Simd::from_bits(Simd::load_int(rows.keys[j + i].codes + 4 * begin));
        }
      } else {
        for (int64_t i = 0; i < 16; ++i) {
          words[i] =
              Simd::from_bits(Simd::load_words(rows.keys[j + i].codes + 4 * begin, count - begin));
        }
      }
      Simd::transpose(words);
      for (int64_t w = begin; w < smaller(count, begin + 16); ++w) {
        store_keys<kCode>(Simd::bits(words[w - begin]), w, j, block);
      }
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
  const int64_t whole = dim / 16 * 16;
  float* values = block.values + pack.begin * round_up(dim, 16);
  for (int64_t j = pack.begin; j < pack.end; ++j) {
    if (j % 4 == 0) {
      ahead.next(1);
    }
    const uint8_t* row = rows.values[j].codes;
    for (int64_t d = 0; d < whole; d += 16, values += 16) {
      Simd::store(values, load_codes<kCode>(row, d));
    }
    if (whole < dim) {  // head_dim is a multiple of 8: half a vector is left
      const int64_t half = task.kv.row_bytes / (dim / 8);
      uint8_t bytes[64] = {};
      __builtin_memcpy(bytes, row + task.kv.row_bytes - half, static_cast<size_t>(half));
      Simd::store(values, load_codes<kCode>(bytes, 0));
      values += 16;
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
