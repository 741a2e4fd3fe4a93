#pragma once

// Rows of caches whose codes are multiplied as BF16 numbers, see KvLayout::widened().

#include "backend/cpu/kernels/attention_rows.h"

namespace nibble::cpu {
namespace {

/// E4M3 codes as floats. Codes of NaN, which load_fp8 takes for 480, stay NaN.
inline F32x16 load_e4m3(const uint8_t* codes) {
  const F32x16 x = Simd::mul(Simd::load_fp8(codes), Simd::set(256.0F));
  return Simd::select_less(Simd::set(448.0F), magnitude(x), Simd::set(__builtin_nanf("")), x);
}

/// `count` bytes, then zeros.
struct SomeBytes {
  uint8_t bytes[32] = {};

  SomeBytes(const uint8_t* from, int64_t count) {
    __builtin_memcpy(bytes, from, static_cast<size_t>(count));
  }
};

/// `lanes` codes of 4 bits as floats.
[[gnu::always_inline]] inline F32x16 load_int4(const uint8_t* codes, int64_t lanes) {
  return Simd::to_float(lanes == 16 ? Simd::load_u4(codes)
                                    : Simd::load_u4(SomeBytes(codes, lanes / 2).bytes));
}

[[gnu::always_inline]] inline F32x16 load_some_f16(const uint8_t* numbers, int64_t lanes) {
  return lanes == 16 ? Simd::load_f16(numbers)
                     : Simd::load_f16(SomeBytes(numbers, 2 * lanes).bytes);
}

/// The first `lanes` as BF16 numbers.
[[gnu::always_inline]] inline void write_bf16(F32x16 x, int64_t lanes, uint8_t* to) {
  if (lanes == 16) {
    return Simd::store_bf16(to, x);
  }
  uint8_t wide[32];
  Simd::store_bf16(wide, x);
  __builtin_memcpy(to, wide, static_cast<size_t>(lanes) * 2);
}

/// Writes f(i, lanes) for the elements i .. i + lanes - 1 of a row [dim] as BF16 numbers.
template <typename F>
[[gnu::always_inline]] inline void write_bf16_row(int64_t dim, uint8_t* to, const F& f) {
  in_vectors(dim, [&](int64_t i, int64_t lanes) { write_bf16(f(i, lanes), lanes, to + 2 * i); });
}

/// A row of codes without parameters as BF16 numbers [head_dim], which hold them exactly.
inline void widen_codes(const KvLayout& kv, const uint8_t* codes, uint8_t* to) {
  const auto fp8 = [&](int64_t i, int64_t lanes) {
    return load_e4m3(SomeBytes(codes + i, lanes).bytes);
  };
  const auto int4 = [&](int64_t i, int64_t lanes) {
    return Simd::sub(load_int4(codes + i / 2, lanes), Simd::set(8.0F));
  };
  return kv.code == kStaticCode ? write_bf16_row(kv.head_dim, to, int4)
                                : write_bf16_row(kv.head_dim, to, fp8);
}

/// Keys of kPageCode that share parameters, fp16 [head_dim] scales, then as many offsets, to rows
/// of `to`.
inline void widen_channels(const KvLayout& kv, const KvRow* keys, int64_t count, uint8_t* to) {
  const auto* scales = reinterpret_cast<const uint8_t*>(keys->params);
  const uint8_t* offsets = scales + 2 * kv.head_dim;
  in_vectors(kv.head_dim, [&](int64_t i, int64_t lanes) {
    const F32x16 scale = load_some_f16(scales + 2 * i, lanes);
    const F32x16 offset = load_some_f16(offsets + 2 * i, lanes);
    for (int64_t row = 0; row < count; ++row) {
      const F32x16 code = load_int4(keys[row].codes + i / 2, lanes);
      write_bf16(Simd::fma(code, scale, offset), lanes, to + 2 * (row * kv.head_dim + i));
    }
  });
}

/// The numbers begin .. end - 1 of a latent in INT4, which share the line of two fp16 numbers.
[[gnu::always_inline]] inline void widen_int4_group(
    const uint8_t* codes, const uint8_t* line, int64_t begin, int64_t end, uint8_t* to) {
  float numbers[16];
  Simd::store(numbers, load_some_f16(line, 2));
  const F32x16 scale = Simd::set(numbers[0]);
  const F32x16 offset = Simd::set(numbers[1]);
  in_vectors(end - begin, [&](int64_t i, int64_t lanes) {
    const F32x16 code = load_int4(codes + (begin + i) / 2, lanes);
    write_bf16(Simd::fma(code, scale, offset), lanes, to + 2 * (begin + i));
  });
}

/// A row of latent attention in codes as BF16 numbers [head_dim].
inline void widen_latent(const KvLayout& kv, const KvRow& row, uint8_t* to) {
  const int64_t rank = kv.latent_rank;
  const uint8_t* codes = row.codes;
  const auto* params = reinterpret_cast<const uint8_t*>(row.params);
  int64_t bytes = rank;  // of the codes
  if (kv.code == kInt4Code) {
    bytes = rank / 2;
    for (int64_t i = 0; i < rank; i += kv.latent_group, params += 4) {
      widen_int4_group(codes, params, i, smaller(rank, i + kv.latent_group), to);
    }
  } else {
    const F32x16 scale = Simd::set(*row.params);
    const bool int8 = kv.code == kInt8Code;
    in_vectors(rank, [&](int64_t i, int64_t lanes) {
      const SomeBytes some(codes + i, lanes);
      const F32x16 x = int8 ? Simd::to_float(Simd::load_s8(some.bytes)) : load_e4m3(some.bytes);
      write_bf16(Simd::mul(x, scale), lanes, to + 2 * i);
    });
  }
  __builtin_memcpy(to + 2 * rank, codes + bytes, static_cast<size_t>(kv.head_dim - rank) * 2);
}

/// Keys of a widened cache as BF16 numbers, to rows of `to`.
inline void widen_keys(const KvLayout& kv, const KvRow* keys, int64_t count, uint8_t* to) {
  const int64_t bytes = 2 * kv.head_dim;
  for (int64_t row = 0; kv.latent_rank > 0 && row < count; ++row) {
    widen_latent(kv, keys[row], to + row * bytes);
  }
  if (kv.latent_rank > 0) {
    return;
  }
  for (int64_t row = 0, same = 1; row < count; row += same, same = 1) {
    uint8_t* const out = to + row * bytes;
    if (kv.code != kPageCode) {
      widen_codes(kv, keys[row].codes, out);
    } else if (keys[row].params == nullptr) {
      __builtin_memcpy(out, keys[row].codes, static_cast<size_t>(bytes));
    } else {
      while (row + same < count && keys[row + same].params == keys[row].params) {
        ++same;
      }
      widen_channels(kv, keys + row, same, out);
    }
  }
}

/// Values as well, but those of latents, which are their keys; of kPageCode, parameters are an fp16
/// scale and an offset.
inline void widen_values(const KvLayout& kv, const KvRow* values, int64_t count, uint8_t* to) {
  for (int64_t row = 0; row < count; ++row, to += 2 * kv.head_dim) {
    const KvRow& value = values[row];
    if (kv.code != kPageCode) {
      widen_codes(kv, value.codes, to);
      continue;
    }
    float line[16];
    Simd::store(line, load_some_f16(reinterpret_cast<const uint8_t*>(value.params), 2));
    write_bf16_row(kv.head_dim, to, [&](int64_t i, int64_t lanes) {
      return Simd::fma(load_int4(value.codes + i / 2, lanes), Simd::set(line[0]),
                       Simd::set(line[1]));
    });
  }
}

/// Points the rows of a block of a widened cache at BF16 copies in `memory`,
/// [2][kKeyBlock][head_dim].
inline void widen_block(const KvLayout& kv, const PackRange& pack, uint8_t* memory, KvRows& rows) {
  const int64_t bytes = 2 * kv.head_dim;
  const int64_t count = pack.end - pack.begin;
  uint8_t* keys = memory + pack.begin * bytes;
  const bool apart = kv.latent_rank == 0;
  uint8_t* values = apart ? keys + kKeyBlock * bytes : keys;
  widen_keys(kv, rows.keys + pack.begin, count, keys);
  if (apart) {
    widen_values(kv, rows.values + pack.begin, count, values);
  }
  for (int64_t j = pack.begin; j < pack.end; ++j, keys += bytes, values += bytes) {
    rows.keys[j].codes = keys;
    rows.values[j].codes = values;
  }
}

}  // namespace
}  // namespace nibble::cpu
