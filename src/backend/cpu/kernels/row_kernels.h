#pragma once

// Kernels over single rows: norms, activation functions, quantized activations, KV entries.

#include "backend/cpu/kernels/fixed_rows.h"
#include "backend/cpu/kernels/turned_rows.h"
#include "ops/attention_form.h"

namespace nibble::cpu {
namespace {

constexpr float kFp8Max = 448.0F;
constexpr float kKvRanges[] = {1.0F, 0.92F, 0.84F};  // of a row's whole range
constexpr int kKvFits = 3;                           // of a line to its codes, from each range on

constexpr int64_t kShortRow = 128;
constexpr int64_t kPiece = 8;           // neighbours that are summed first
constexpr int64_t kWarp = 32;           // pieces that are summed next
constexpr int64_t kMostThreads = 1024;  // each with pieces as far apart as there are threads

/// Of a GPU's block that has the row (row_shape() in backend/cuda/kernels/rows/common.cuh).
inline int64_t threads_of_row(int64_t n) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  const int64_t each = pieces <= 512 ? 1 : pieces <= 1024 ? 2 : 4;
  const int64_t threads = ((pieces + each - 1) / each + kWarp - 1) / kWarp * kWarp;
  return threads < kMostThreads ? threads : kMostThreads;
}

struct SumOfSquares {
  static F32x16 add(F32x16 sum, F32x16 v) { return Simd::fma(v, v, sum); }
};

struct SumOfValues {
  static F32x16 add(F32x16 sum, F32x16 v) { return Simd::add(sum, v); }
};

/// Adds kWarp pieces, one after the other: even ones to sums[0], odd ones to sums[1].
template <typename Sum>
inline void add_pieces(const float* x, int64_t n, F32x16 (&sums)[2]) {
  F32x16 v[16];
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t left = n - 16 * i;
    v[i] = left >= 16 ? Simd::load(x + 16 * i)
           : left > 0 ? load_some(x + 16 * i, left)
                      : Simd::set(0.0F);
  }
  Simd::transpose(v);  // lane i: piece 2 i in the first eight, piece 2 i + 1 in the others
  for (int64_t odd = 0; odd < 2; ++odd) {
    for (int64_t i = kPiece * odd; i < kPiece * (odd + 1); ++i) {
      sums[odd] = Sum::add(sums[odd], v[i]);
    }
  }
}

/// Of a row's values or squares, in the order of a GPU's block, so that both have the same bits; of
/// heads, which are short and many, in the order of vectors.
template <typename Sum>
inline float sum_of_row(const float* x, int64_t n) {
  constexpr int64_t kColumns = kWarp * kPiece;
  if (n <= kShortRow) {
    F32x16 sum = Simd::set(0.0F);
    in_vectors(n, [&](int64_t i, int64_t lanes) { sum = Sum::add(sum, load_lanes(x + i, lanes)); });
    return Simd::reduce_add(sum);
  }
  const int64_t warps = threads_of_row(n) / kWarp;
  F32x16 sums[kMostThreads / kWarp][2];
  for (int64_t w = 0; w < warps; ++w) {
    sums[w][0] = sums[w][1] = Simd::set(0.0F);
  }
  for (int64_t i = 0, w = 0; i < n; i += kColumns, w = w + 1 < warps ? w + 1 : 0) {
    add_pieces<Sum>(x + i, n - i, sums[w]);
  }
  float of_warps[kWarp] = {};
  for (int64_t w = 0; w < warps; ++w) {
    of_warps[w] = Simd::reduce_add(sums[w][0]) + Simd::reduce_add(sums[w][1]);
  }
  return Simd::reduce_add(Simd::add(Simd::load(of_warps), Simd::load(of_warps + 16)));
}

void rms_norm(const float* x, int64_t n, const float* weight, float eps, float* y) {
  const float mean = sum_of_row<SumOfSquares>(x, n) / static_cast<float>(n);
  const F32x16 factor = Simd::set(1.0F / sqrt_f32(mean + eps));
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    const F32x16 scaled = Simd::mul(load_lanes(x + i, lanes), factor);
    store_lanes(y + i, lanes, Simd::mul(scaled, load_lanes(weight + i, lanes)));
  });
}

inline void layer_norm(const float* x, int64_t k, const GemmInput& norm, float* y) {
  const auto n = static_cast<float>(k);
  const F32x16 mean = Simd::set(sum_of_row<SumOfValues>(x, k) / n);
  in_vectors(k, [&](int64_t i, int64_t lanes) {
    store_lanes(y + i, lanes, Simd::sub(load_lanes(x + i, lanes), mean));
  });
  const float variance = sum_of_row<SumOfSquares>(y, k) / n;
  const F32x16 factor = Simd::set(1.0F / sqrt_f32(variance + norm.eps));
  in_vectors(k, [&](int64_t i, int64_t lanes) {
    const F32x16 scaled = Simd::mul(load_lanes(y + i, lanes), factor);
    const F32x16 weight = load_lanes(norm.norm_weight + i, lanes);
    store_lanes(y + i, lanes, Simd::fma(scaled, weight, load_lanes(norm.norm_bias + i, lanes)));
  });
}

inline void relu(ConstNumbers x, int64_t n, float* y) {
  in_vectors(n, [&](int64_t i, int64_t lanes) {  // max takes its second operand when that is NaN
    store_lanes(y + i, lanes, Simd::max(Simd::set(0.0F), load_numbers(x, i, lanes)));
  });
}

/// x / (1 + e^-2u), where tanh(u) is that of the formula.
inline void gelu_tanh(ConstNumbers x, int64_t n, float* y) {
  in_vectors(n, [&](int64_t i, int64_t lanes) {  // max takes its second operand when that is NaN
    const F32x16 v = Simd::max(Simd::set(kLeastGelu), load_numbers(x, i, lanes));
    const F32x16 slope =
        Simd::fma(Simd::mul(v, v), Simd::set(-kGeluCubic), Simd::set(-kGeluLinear));
    const F32x16 e = exp(Simd::mul(v, slope));
    store_lanes(y + i, lanes, Simd::div(v, Simd::add(Simd::set(1.0F), e)));
  });
}

inline void silu_mul(ConstNumbers gate_up, int64_t n, SiluForm form, float* y) {
  const F32x16 factor = Simd::set(form.factor);
  const I32x16 kept = Simd::set_int(static_cast<int32_t>(form.bits));
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    const F32x16 g = load_numbers(gate_up, i, lanes);
    const F32x16 e = exp(Simd::sub(Simd::set(0.0F), g));
    const F32x16 silu = Simd::mul(Simd::div(g, Simd::add(Simd::set(1.0F), e)), factor);
    const F32x16 cut = Simd::from_bits(Simd::and_int(Simd::bits(silu), kept));
    store_lanes(y + i, lanes, Simd::mul(cut, load_numbers(gate_up, n + i, lanes)));
  });
}

inline void clamped_swiglu(const InputRow& row, float* y) {
  const F32x16 limit = Simd::set(row.input.limit);
  const F32x16 least = Simd::set(-row.input.limit);
  const F32x16 factor = Simd::set(row.silu.factor);
  const I32x16 kept = Simd::set_int(static_cast<int32_t>(row.silu.bits));
  in_vectors(row.k, [&](int64_t i, int64_t lanes) {  // min and max take a second operand of NaN
    const F32x16 g = Simd::min(limit, load_numbers(row.x, i, lanes));
    const F32x16 e = exp(Simd::mul(g, Simd::set(-kSwigluAlpha)));
    const F32x16 silu = Simd::mul(Simd::div(g, Simd::add(Simd::set(1.0F), e)), factor);
    const F32x16 cut = Simd::from_bits(Simd::and_int(Simd::bits(silu), kept));
    const F32x16 up = Simd::max(least, Simd::min(limit, load_numbers(row.x, row.k + i, lanes)));
    store_lanes(y + i, lanes, Simd::mul(cut, Simd::add(up, Simd::set(1.0F))));
  });
}

void load_row(ConstNumbers x, int64_t n, float* y) {
  in_vectors(
      n, [&](int64_t i, int64_t lanes) { store_lanes(y + i, lanes, load_numbers(x, i, lanes)); });
}

inline const float* as_floats(ConstNumbers x, int64_t n, float* buffer) {
  if (x.type == Element::kF32) {
    return static_cast<const float*>(x.data);
  }
  load_row(x, n, buffer);
  return buffer;
}

inline void norm_or_activate(const InputRow& row, float* y) {
  const GemmInput& input = row.input;
  switch (input.kind) {
    case GemmInput::Kind::kPlain:
      return load_row(row.x, row.k, y);
    case GemmInput::Kind::kRmsNorm:
      return rms_norm(as_floats(row.x, row.k, y), row.k, input.norm_weight, input.eps, y);
    case GemmInput::Kind::kLayerNorm:
      return layer_norm(as_floats(row.x, row.k, y), row.k, input, y);
    case GemmInput::Kind::kSiluMul:
      return silu_mul(row.x, row.k, row.silu, y);
    case GemmInput::Kind::kRelu:
      return relu(row.x, row.k, y);
    case GemmInput::Kind::kGeluTanh:
      return gelu_tanh(row.x, row.k, y);
    case GemmInput::Kind::kClampedSwiglu:
      return clamped_swiglu(row, y);
  }
}

void make_input(const InputRow& row, float* y) {
  norm_or_activate(row, y);
  if (row.input.turn > 1) {
    turn_row(y, row.k, row.input.turn);
  }
}

void store_row(const float* x, int64_t n, Numbers y) {
  in_vectors(
      n, [&](int64_t i, int64_t lanes) { store_numbers(y, i, lanes, load_lanes(x + i, lanes)); });
}

void add_weighted(ConstNumbers x, int64_t n, float weight, float* y) {
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    const F32x16 product = Simd::mul(load_numbers(x, i, lanes), Simd::set(weight));
    store_lanes(y + i, lanes, Simd::add(load_lanes(y + i, lanes), product));
  });
}

void round_row(float* x, int64_t n, int places) {
  I32x16 largest = Simd::set_int(0);
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    const I32x16 bits = Simd::bits(load_lanes(x + i, lanes));
    largest = Simd::max_int(largest, Simd::and_int(bits, Simd::set_int(kMagnitude)));
  });
  const int32_t power = Simd::reduce_max_int(largest) & kInfinityBits;
  const F32x16 shift = Simd::set(__builtin_bit_cast(float, power) * rounding_shift(places));
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    store_lanes(x + i, lanes, Simd::sub(Simd::add(load_lanes(x + i, lanes), shift), shift));
  });
}

void rotate(float* head, int64_t dim, const float* cosine, const float* sine) {
  float* upper = head + dim / 2;
  in_vectors(dim / 2, [&](int64_t i, int64_t lanes) {
    const F32x16 a = load_lanes(head + i, lanes);
    const F32x16 b = load_lanes(upper + i, lanes);
    const F32x16 c = load_lanes(cosine + i, lanes);
    const F32x16 s = load_lanes(sine + i, lanes);
    const F32x16 minus_s = Simd::sub(Simd::set(0.0F), s);
    store_lanes(head + i, lanes, Simd::fma(a, c, Simd::mul(b, minus_s)));
    store_lanes(upper + i, lanes, Simd::fma(b, c, Simd::mul(a, s)));
  });
}

/// Largest magnitude of a row divided by `top`; NaN when the row is not finite. Integers order
/// magnitudes as floats do and put NaNs on top, so the order of the lanes does not matter.
inline float row_scale(const float* x, int64_t n, float top) {
  I32x16 largest = Simd::set_int(0);
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    const I32x16 bits = Simd::bits(load_lanes(x + i, lanes));
    largest = Simd::max_int(largest, Simd::and_int(bits, Simd::set_int(kMagnitude)));
  });
  const int32_t bits = Simd::reduce_max_int(largest);
  return bits >= kInfinityBits ? __builtin_bit_cast(float, kNanBits)
                               : __builtin_bit_cast(float, bits) / top;
}

/// The largest magnitude of a row of BF16, NaN when the row is not finite: bits without the sign,
/// 32 at a time. The row at `next` is fetched on the way, for memory is slower than this.
inline float largest_bf16(const uint8_t* x, int64_t n, const uint8_t* next) {
  I32x16 largest = Simd::set_int(0);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const I32x16 pairs = Simd::and_int(Simd::load_int(x + 2 * i), Simd::set_int(0x7fff7fff));
    largest = Simd::max_u16(largest, pairs);
    if (next != nullptr) {
      __builtin_prefetch(next + 2 * i, 0, 2);
    }
  }
  largest = Simd::max_int(Simd::and_int(largest, Simd::set_int(0x7fff0000)),
                          Simd::shift_left<16>(largest));
  in_vectors(n - i, [&](int64_t at, int64_t lanes) {
    const I32x16 bits = Simd::bits(load_numbers({x, Element::kBf16}, i + at, lanes));
    largest = Simd::max_int(largest, Simd::and_int(bits, Simd::set_int(kMagnitude)));
  });
  const int32_t bits = Simd::reduce_max_int(largest);
  return __builtin_bit_cast(float, bits >= kInfinityBits ? kNanBits : bits);
}

/// x / scale in [-limit, limit]; 0 for a scale of 0 and for NaN.
inline F32x16 scaled_code(F32x16 x, float scale, float limit) {
  if (!(scale > 0.0F)) {
    return Simd::set(0.0F);
  }
  const F32x16 code = Simd::div(x, Simd::set(scale));
  return Simd::max(Simd::set(-limit), Simd::min(Simd::set(limit), code));
}

/// What a row is multiplied with to span -top..top: 0 for a row of zeros (or of values so small
/// that their factor is infinite), anything for a row that is not finite.
inline F32x16 row_factor(float largest, float top) {
  const float factor = top / largest;
  return Simd::set(factor < __builtin_inff() ? factor : 0.0F);
}

template <Element kType>
Int8RowResult quantize_row(const Int8Row& row, float largest) {
  const F32x16 factor = row_factor(largest, 127.0F);
  const I32x16 offset = Simd::set_int(row.offset);
  I32x16 sum = Simd::set_int(0);
  uint8_t* out = row.out;
  const ConstNumbers x{row.x.data, kType};
  for (int64_t piece = 0; piece < row.k; piece += 64) {
    const int64_t columns = row.k - piece < 64 ? row.k - piece : 64;
    if (columns == 64) {
      I32x16 q[4];
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        q[i] = Simd::to_int(Simd::mul(load_numbers(x, piece + 16 * i, 16), factor));
        sum = Simd::add_int(sum, q[i]);
      }
      Simd::store_bytes(out, q, static_cast<uint8_t>(row.offset));
    } else {
      in_vectors(columns, [&](int64_t i, int64_t lanes) {
        const I32x16 q = Simd::to_int(Simd::mul(load_numbers(x, piece + i, lanes), factor));
        sum = Simd::add_int(sum, q);
        Simd::store_u8(out + i, Simd::add_int(q, offset));
      });
      for (int64_t i = (columns + 15) / 16 * 16; i < 64; ++i) {
        out[i] = 0;
      }
    }
    const bool slab_ends = piece / 64 % kSlabPieces == kSlabPieces - 1;
    out += slab_ends ? row.slab_stride - (kSlabPieces - 1) * row.piece_stride : row.piece_stride;
  }
  return {largest / 127.0F, Simd::reduce_add_int(sum)};
}

Int8RowResult quantize_int8(const Int8Row& row) {
  if (row.x.type == Element::kF32) {
    const float largest = row.largest > 0.0F
                              ? row.largest
                              : row_scale(static_cast<const float*>(row.x.data), row.k, 1.0F);
    return quantize_row<Element::kF32>(row, largest);
  }
  const float largest = largest_bf16(static_cast<const uint8_t*>(row.x.data), row.k,
                                     static_cast<const uint8_t*>(row.next));
  return quantize_row<Element::kBf16>(row, largest);
}

/// |v| <= 448 rounded to E4M3, ties to even. From 2^-6 up three mantissa bits stay; below, adding
/// and taking away 2^14, whose last place is 2^-9, rounds to the subnormal step.
inline F32x16 round_e4m3(F32x16 v) {
  const I32x16 bits = Simd::bits(v);
  const I32x16 sign = Simd::and_int(bits, Simd::set_int(~kMagnitude));
  const I32x16 magnitude = Simd::and_int(bits, Simd::set_int(kMagnitude));
  const I32x16 odd = Simd::and_int(Simd::shift_right<20>(magnitude), Simd::set_int(1));
  const I32x16 sum = Simd::add_int(Simd::add_int(magnitude, Simd::set_int(0x7ffff)), odd);
  const I32x16 normal = Simd::and_int(sum, Simd::set_int(~0xfffff));
  const F32x16 shift = Simd::set(16384.0F);
  const F32x16 small = Simd::from_bits(magnitude);
  const F32x16 subnormal = Simd::sub(Simd::add(small, shift), shift);
  const F32x16 rounded =
      Simd::select_less(small, Simd::set(0.015625F), subnormal, Simd::from_bits(normal));
  return Simd::from_bits(Simd::or_int(Simd::bits(rounded), sign));
}

float quantize_fp8(const float* x, int64_t k, float given, float* out) {
  const float largest = given > 0.0F ? given : row_scale(x, k, 1.0F);
  const F32x16 factor = row_factor(largest, kFp8Max);
  in_vectors(k, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, lanes, round_e4m3(Simd::mul(load_lanes(x + i, lanes), factor)));
  });
  return largest / kFp8Max;
}

void round_bf16(const float* x, int64_t k, float* out) {
  in_vectors(k, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, lanes, nearest_bf16(load_lanes(x + i, lanes)));
  });
}

inline void write_kv_int8(const float* x, int64_t dim, uint8_t* row, float* params) {
  const float scale = row_scale(x, dim, 127.0F);
  in_vectors(dim, [&](int64_t i, int64_t lanes) {
    uint8_t bytes[16];
    Simd::store_u8(bytes, Simd::to_int(scaled_code(load_lanes(x + i, lanes), scale, 127.0F)));
    __builtin_memcpy(row + i, bytes, static_cast<size_t>(lanes));
  });
  params[0] = scale;
}

/// A row's values around their middle as scale * code + offset, codes 0..15.
struct CodeLine {
  float scale = 0.0F;
  float offset = 0.0F;
};

/// The row minus `middle`, and 1 in the lanes that exist.
template <typename Body>
[[gnu::always_inline]] inline void in_centred(const float* x,
                                              int64_t dim,
                                              float middle,
                                              const Body& body) {
  static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  in_vectors(dim, [&](int64_t i, int64_t lanes) {
    const F32x16 mask = load_lanes(kOnes, lanes);
    body(i, lanes, Simd::mul(Simd::sub(load_lanes(x + i, lanes), Simd::set(middle)), mask), mask);
  });
}

inline I32x16 code_on(CodeLine line, F32x16 v) {
  const F32x16 code = Simd::mul(Simd::sub(v, Simd::set(line.offset)), Simd::set(1 / line.scale));
  return Simd::to_int(Simd::max(Simd::set(0.0F), Simd::min(Simd::set(15.0F), code)));
}

/// The line of least squared error through the codes that another line gives, and the squares that
/// it explains: 0 when the codes are all one.
struct FittedLine {
  CodeLine line;
  float explained = 0.0F;
};

inline FittedLine fit_codes(const float* x, int64_t dim, float middle, float mean, CodeLine given) {
  const auto n = static_cast<float>(dim);
  F32x16 sum_c = Simd::set(0.0F);
  F32x16 sum_cc = sum_c;
  F32x16 sum_xc = sum_c;
  in_centred(x, dim, middle, [&](int64_t, int64_t, F32x16 v, F32x16 mask) {
    const F32x16 code = Simd::mul(Simd::to_float(code_on(given, v)), mask);
    sum_c = Simd::add(sum_c, code);
    sum_cc = Simd::fma(code, code, sum_cc);
    sum_xc = Simd::fma(v, code, sum_xc);
  });
  const float c = Simd::reduce_add(sum_c);
  const float variance = Simd::reduce_add(sum_cc) - c * (c / n);
  const float covariance = Simd::reduce_add(sum_xc) - c * mean;
  if (!(variance > 0.0F && covariance > 0.0F)) {
    return {};
  }
  const float scale = covariance / variance;
  return {{scale, mean - scale * (c / n)}, covariance * scale};
}

/// A row's codes are those nearest to `codes`; `values` is the best line through them.
struct RowLines {
  CodeLine codes;
  CodeLine values;
};

/// The best line that fitting again and again comes to from clipped ranges (ops/kv.h).
inline RowLines fit_row(const float* x, int64_t dim, float middle, float range) {
  F32x16 sum = Simd::set(0.0F);
  in_centred(x, dim, middle, [&](int64_t, int64_t, F32x16 v, F32x16) { sum = Simd::add(sum, v); });
  const float mean = Simd::reduce_add(sum) / static_cast<float>(dim);
  FittedLine best;
  for (const float part : kKvRanges) {
    const float scale = range * part / 15.0F;
    FittedLine fitted{{scale, -7.5F * scale}, 1.0F};
    for (int fit = 0; fit < kKvFits && fitted.explained > 0.0F; ++fit) {
      fitted = fit_codes(x, dim, middle, mean, fitted.line);
    }
    best = fitted.explained > best.explained ? fitted : best;
  }
  const FittedLine last =
      best.explained > 0.0F ? fit_codes(x, dim, middle, mean, best.line) : FittedLine{};
  return {best.line, last.line};
}

/// A row's lines about the middle of its range; the offset is NaN where a number is not finite.
struct CentredLines {
  RowLines lines;
  float middle;
  float spoiled;
};

inline CentredLines fit_centred(const float* x, int64_t dim) {
  F32x16 low = Simd::set(x[0]);
  F32x16 high = low;
  in_vectors(dim, [&](int64_t i, int64_t lanes) {
    float values[16];
    Simd::store(values, load_lanes(x + i, lanes));
    for (int64_t j = lanes; j < 16; ++j) {
      values[j] = x[0];
    }
    low = Simd::min(low, Simd::load(values));
    high = Simd::max(high, Simd::load(values));
  });
  const float least = Simd::reduce_min(low);
  const float range = Simd::reduce_max(high) - least;
  const float middle = least + 0.5F * range;
  const float spoiled = row_scale(x, dim, 1.0F) * 0.0F;  // NaN when a value is not finite, else 0
  const bool fits = spoiled == 0.0F && range > 0.0F;
  return {fits ? fit_row(x, dim, middle, range) : RowLines{}, middle, spoiled};
}

/// Codes of `lanes` numbers, a byte each, two in a byte.
inline void store_nibbles(const uint8_t* codes, int64_t lanes, uint8_t* row) {
  for (int64_t j = 0; j < lanes / 2; ++j) {
    row[j] = static_cast<uint8_t>(codes[2 * j] | (codes[2 * j + 1] << 4));
  }
}

inline void write_kv_int4(const float* x, int64_t dim, uint8_t* row, float* params) {
  const CentredLines fit = fit_centred(x, dim);
  in_centred(x, dim, fit.middle, [&](int64_t i, int64_t lanes, F32x16 v, F32x16) {
    uint8_t bytes[16] = {};
    if (fit.lines.values.scale > 0.0F) {
      Simd::store_u8(bytes, code_on(fit.lines.codes, v));
    }
    store_nibbles(bytes, lanes, row + i / 2);
  });
  params[0] = fit.lines.values.scale;
  params[1] = fit.lines.values.offset + fit.middle + fit.spoiled;
}

/// Scale and offset of the line that suits INT4 codes of x best.
void fit_int4(const float* x, int64_t n, float* line) {
  const CentredLines fit = fit_centred(x, n);
  line[0] = fit.lines.values.scale;
  line[1] = fit.lines.values.offset + fit.middle + fit.spoiled;
}

void code_int4(const float* x, const CodeGrid& grid, uint8_t* row) {
  in_vectors(grid.dim, [&](int64_t i, int64_t lanes) {
    const F32x16 v = Simd::sub(load_lanes(x + i, lanes), load_lanes(grid.offsets + i, lanes));
    const F32x16 code = Simd::mul(v, load_lanes(grid.inverses + i, lanes));
    const F32x16 clamped = Simd::max(Simd::set(0.0F), Simd::min(Simd::set(15.0F), code));
    uint8_t bytes[16];
    Simd::store_u8(bytes, Simd::to_int(clamped));
    store_nibbles(bytes, lanes, row + i / 2);
  });
}

void write_kv(const KvLayout& kv, const float* x, uint8_t* row, float* params) {
  switch (kv.code) {
    case 0:
      __builtin_memcpy(row, x, static_cast<size_t>(kv.head_dim) * 4);
      return;
    case 1:
      return store_row(x, kv.head_dim, {row, Element::kBf16});
    case 2:
      return write_kv_int8(x, kv.head_dim, row, params);
    default:
      return write_kv_int4(x, kv.head_dim, row, params);
  }
}

}  // namespace
}  // namespace nibble::cpu
