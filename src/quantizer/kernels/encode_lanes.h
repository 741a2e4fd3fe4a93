#pragma once

#include "quantizer/kernels/row_kernels.h"

// Codes of rows over the vocabulary Lanes, which the including file has chosen. What codec.h
// defines for one number is done here for sixteen.
namespace nibble::rows {
namespace {

using F = cpu::F32x16;
using I = cpu::I32x16;

constexpr int64_t kVectorsPerFlush = 32;

inline F magnitude(F x) {
  return Lanes::from_bits(Lanes::and_int(Lanes::bits(x), Lanes::set_int(0x7fffffff)));
}

/// Ties to even, for magnitudes below 2^22.
inline F round_even(F x) {
  const F magic = Lanes::set(12582912.0F);
  return Lanes::sub(Lanes::add(x, magic), magic);
}

inline I select_less_int(F a, F b, I yes, I no) {
  return Lanes::bits(Lanes::select_less(a, b, Lanes::from_bits(yes), Lanes::from_bits(no)));
}

/// Codes of sixteen weights, what they decode to, and how far they lie outside.
struct Coded {
  I code;
  F value;
  F beyond;  // more than Codec::kClip counts as clipped
};

/// Integers of scale and zero point; kOffset makes codes unsigned.
template <int kBits, int kOffset, bool kZeros>
struct IntCodec {
  static constexpr int kCodeBits = kBits;
  static constexpr float kClip = 0.5F;
  static constexpr float kHigh = static_cast<float>((1 << (kBits - 1)) - 1);

  IntCodec(float scale_value, float zero_value)
      : scale(Lanes::set(scale_value)), zero(Lanes::set(zero_value)) {}
  IntCodec(F scales, F zeros) : scale(scales), zero(zeros) {}

  [[nodiscard]] Coded encode(F x) const {
    F shifted = Lanes::div(x, scale);
    if constexpr (kZeros) {
      shifted = Lanes::add(shifted, zero);
    }
    const F above = Lanes::max(shifted, Lanes::set(-kHigh - 1));
    const F clamped = Lanes::min(above, Lanes::set(kHigh));
    const F rounded = round_even(clamped);
    const F steps = kZeros ? Lanes::sub(rounded, zero) : rounded;
    return {Lanes::add_int(Lanes::to_int(rounded), Lanes::set_int(kOffset)),
            Lanes::mul(steps, scale), magnitude(Lanes::sub(shifted, clamped))};
  }

  F scale;
  F zero;
};

/// Floating-point codes of kExponents and kMantissa bits without infinity: E4M3 and E2M1.
struct E4M3 {
  static constexpr int kCodeBits = 8;
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr int kTopCode = 0x7e;
  static constexpr float kTop = 448;
  static constexpr float kClip = 464;
};
struct E2M1 {
  static constexpr int kCodeBits = 4;
  static constexpr int kMantissa = 1;
  static constexpr int kBias = 1;
  static constexpr int kTopCode = 7;
  static constexpr float kTop = 6;
  static constexpr float kClip = 7;
};

/// Rounds to nearest, ties to even, saturating. `code` lacks nothing but the scale.
template <typename Format>
inline Coded encode_float(F x) {
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr int kHalf = (1 << (kDropped - 1)) - 1;
  constexpr int kRebias = (127 - Format::kBias) << Format::kMantissa;
  // Adding this power of two leaves an ulp of the smallest code.
  constexpr int kAlignExponent = 127 + 1 - Format::kBias - Format::kMantissa + 23;
  const I bits = Lanes::bits(x);
  const I size_bits = Lanes::and_int(bits, Lanes::set_int(0x7fffffff));
  const F size = Lanes::from_bits(size_bits);
  const F least_normal = Lanes::from_bits(Lanes::set_int((128 - Format::kBias) << 23));
  const F align = Lanes::from_bits(Lanes::set_int(kAlignExponent << 23));
  const I odd = Lanes::and_int(Lanes::template shift_right<kDropped>(size_bits), Lanes::set_int(1));
  const I rounded = Lanes::add_int(Lanes::add_int(size_bits, Lanes::set_int(kHalf)), odd);
  const I normal =
      Lanes::sub_int(Lanes::template shift_right<kDropped>(rounded), Lanes::set_int(kRebias));
  const F normal_value =
      Lanes::from_bits(Lanes::and_int(rounded, Lanes::set_int(-(1 << kDropped))));
  const F aligned = Lanes::add(size, align);
  const I small = Lanes::sub_int(Lanes::bits(aligned), Lanes::bits(align));
  const F small_value = Lanes::sub(aligned, align);
  const F top = Lanes::set(Format::kTop);
  I code = select_less_int(size, least_normal, small, normal);
  F value = Lanes::select_less(size, least_normal, small_value, normal_value);
  code = select_less_int(size, top, code, Lanes::set_int(Format::kTopCode));
  value = Lanes::select_less(size, top, value, top);
  const I sign = Lanes::and_int(bits, Lanes::set_int(-0x7fffffff - 1));
  code = Lanes::or_int(code, Lanes::template shift_right<32 - Format::kCodeBits>(sign));
  return {code, Lanes::from_bits(Lanes::or_int(Lanes::bits(value), sign)), size};
}

/// Scales that are powers of two have exact inverses.
template <typename Format, bool kPowers>
struct FloatCodec {
  static constexpr int kCodeBits = Format::kCodeBits;
  static constexpr float kClip = Format::kClip;

  FloatCodec(float scale_value, float /*zero*/)
      : scale(Lanes::set(scale_value)), inverse(Lanes::set(1.0F / scale_value)) {}
  FloatCodec(F scales, F /*zeros*/) : scale(scales), inverse(Lanes::div(Lanes::set(1), scales)) {}

  [[nodiscard]] Coded encode(F x) const {
    Coded coded = encode_float<Format>(kPowers ? Lanes::mul(x, inverse) : Lanes::div(x, scale));
    coded.value = Lanes::mul(coded.value, scale);
    return coded;
  }

  F scale;
  F inverse;
};

struct Bf16Codec {
  static constexpr int kCodeBits = 16;
  static constexpr float kClip = 1;

  Bf16Codec(float /*scale*/, float /*zero*/) {}

  [[nodiscard]] static Coded encode(F x) {
    const I bits = Lanes::bits(x);
    const I odd = Lanes::and_int(Lanes::shift_right<16>(bits), Lanes::set_int(1));
    const I rounded = Lanes::add_int(Lanes::add_int(bits, Lanes::set_int(0x7fff)), odd);
    return {Lanes::shift_right<16>(rounded),
            Lanes::from_bits(Lanes::and_int(rounded, Lanes::set_int(-65536))), Lanes::set(0)};
  }
};

/// FP8, then INT4 by a reciprocal.
struct ProgressiveCodec {
  static constexpr int kCodeBits = 4;
  static constexpr float kClip = 0.5F;

  [[nodiscard]] Coded encode(F x) const {
    const F stage = encode_float<E4M3>(Lanes::div(x, fp8_scale)).value;
    const F scaled = Lanes::mul(stage, inverse);
    const F rounded = round_even(scaled);
    const F code = Lanes::min(Lanes::max(rounded, Lanes::set(-8)), Lanes::set(7));
    return {Lanes::add_int(Lanes::to_int(code), Lanes::set_int(8)), Lanes::mul(code, scale),
            magnitude(Lanes::sub(scaled, code))};
  }

  F fp8_scale;
  F inverse;
  F scale;
};

/// Sums of at most kVectorsPerFlush vectors.
struct Running {
  F signal = Lanes::set(0);
  F noise = Lanes::set(0);
  F product = Lanes::set(0);
  F energy = Lanes::set(0);
  F max_error = Lanes::set(0);
  I clipped = Lanes::set_int(0);
  I lost = Lanes::set_int(0);

  void add(F x, const Coded& coded, float clip) {
    const F error = Lanes::sub(x, coded.value);
    signal = Lanes::fma(x, x, signal);
    noise = Lanes::fma(error, error, noise);
    product = Lanes::fma(x, coded.value, product);
    energy = Lanes::fma(coded.value, coded.value, energy);
    max_error = Lanes::max(magnitude(error), max_error);
    clipped = Lanes::count_greater(clipped, coded.beyond, Lanes::set(clip));
    lost = Lanes::count_lost(lost, x, coded.value);
  }
};

inline void add_lanes(double (&total)[kLanes], F part) {
  float lanes[kLanes];
  Lanes::store(lanes, part);
  for (int i = 0; i < kLanes; ++i) {
    total[i] += static_cast<double>(lanes[i]);
  }
}

inline void flush(const Running& running, Sums& sums) {
  add_lanes(sums.signal, running.signal);
  add_lanes(sums.noise, running.noise);
  add_lanes(sums.product, running.product);
  add_lanes(sums.energy, running.energy);
  Lanes::store(sums.max_error, Lanes::max(running.max_error, Lanes::load(sums.max_error)));
  sums.clipped += Lanes::reduce_add_int(running.clipped);
  sums.lost += Lanes::reduce_add_int(running.lost);
}

template <int kCodeBits>
inline void store_codes(uint8_t* out, I codes) {
  if constexpr (kCodeBits == 4) {
    Lanes::store_nibbles(out, codes);
  } else if constexpr (kCodeBits == 8) {
    Lanes::store_bytes(out, codes);
  } else {
    Lanes::store_halves(out, codes);
  }
}

/// The last `count` < 16 weights of a row; `padded` bytes are written, zeros behind the codes.
template <typename Codec>
inline void encode_rest(
    const Codec& codec, const float* x, int64_t count, uint8_t* codes, Running& running) {
  float lanes[kLanes] = {};
  uint8_t bytes[kLanes * 2] = {};
  __builtin_memcpy(lanes, x, static_cast<size_t>(count) * 4);
  const F values = Lanes::load(lanes);
  const Coded coded = codec.encode(values);
  running.add(values, coded, Codec::kClip);
  store_codes<Codec::kCodeBits>(bytes, coded.code);
  const int64_t used = (count * Codec::kCodeBits + 7) / 8;
  for (int64_t i = used; i < kLanes * 2; ++i) {
    bytes[i] = 0;
  }
  if (Codec::kCodeBits == 4 && count % 2 != 0) {
    bytes[used - 1] &= 15;
  }
  // Rows of int4 end on whole words.
  const int64_t padded = Codec::kCodeBits == 4 ? (count + 7) / 8 * 4 : used;
  __builtin_memcpy(codes, bytes, static_cast<size_t>(padded));
}

template <typename Codec>
struct RowWriter {
  Sums& sums;
  Running running = {};
  int64_t vectors = 0;

  inline void write(const Codec& codec, const float* x, int64_t width, uint8_t* codes) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const F values = Lanes::load(x + i);
      const Coded coded = codec.encode(values);
      running.add(values, coded, Codec::kClip);
      store_codes<Codec::kCodeBits>(codes + i * Codec::kCodeBits / 8, coded.code);
      if (++vectors == kVectorsPerFlush) {
        finish();
      }
    }
    if (i < width) {
      encode_rest(codec, x + i, width - i, codes + i * Codec::kCodeBits / 8, running);
    }
  }
  inline void finish() {
    flush(running, sums);
    running = {};
    vectors = 0;
  }
};

template <typename Codec>
void encode_groups(const EncodeArgs& args, Sums& sums) {
  RowWriter<Codec> writer{sums};
  for (int64_t g = 0; g < args.groups; ++g) {
    const Codec codec(args.scales == nullptr ? 1.0F : args.scales[g],
                      args.zeros == nullptr ? 0.0F : args.zeros[g]);
    writer.write(codec, args.x + g * args.width, args.width,
                 args.codes + g * args.width * Codec::kCodeBits / 8);
  }
  writer.finish();
}

void encode_progressive(const ProgressiveArgs& args, Sums& sums) {
  const ProgressiveCodec codec{Lanes::set(args.fp8_scale), Lanes::set(args.inverse),
                               Lanes::set(args.scale)};
  RowWriter<ProgressiveCodec> writer{sums};
  writer.write(codec, args.x, args.width, args.codes);
  writer.finish();
}

/// Nibbles 0 2 4 6 of a word to its low half, 1 3 5 7 to its high half.
inline uint32_t even_nibbles(uint32_t word) {
  word &= 0x0f0f0f0fU;
  word = (word | word >> 4) & 0x00ff00ffU;
  return (word | word >> 8) & 0xffffU;
}

void reorder_words(uint8_t* words, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    __builtin_memcpy(&word, words + 4 * i, 4);
    word ^= 0x88888888U;
    word = even_nibbles(word) | even_nibbles(word >> 4) << 16;
    __builtin_memcpy(words + 4 * i, &word, 4);
  }
}

}  // namespace
}  // namespace nibble::rows
