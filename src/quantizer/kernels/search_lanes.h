#pragma once

#include "quantizer/kernels/matrix_lanes.h"

// Extents and searches of scales over the vocabulary Lanes. Narrow groups lie side by side, one per
// lane; a wide one is spread over the lanes.
namespace nibble::rows {
namespace {

/// Calls visit(sixteen weights) over a row, the last padded with zeros.
template <typename Visit>
inline void for_each_vector(const float* x, int64_t width, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    visit(Lanes::load(x + i));
  }
  if (i < width) {
    float rest[kLanes] = {};
    __builtin_memcpy(rest, x + i, static_cast<size_t>(width - i) * 4);
    visit(Lanes::load(rest));
  }
}

uint16_t bf16_absmax(const uint8_t* x, int64_t count) {
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    __builtin_memcpy(&bits, x + 2 * i, 2);
    bits &= 0x7fff;
    most = bits > most ? bits : most;
  }
  return most;
}

void group_absmax(const float* x, int64_t groups, int64_t width, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    I largest = Lanes::set_int(0);  // as integers, so that NaN is the largest
    for_each_vector(x + g * width, width, [&](F values) {
      largest = Lanes::max_int(Lanes::bits(magnitude(values)), largest);
    });
    const int32_t bits = Lanes::reduce_max_int(largest);
    __builtin_memcpy(out + g, &bits, 4);
  }
}

void group_minmax(const float* x, int64_t groups, int64_t width, float* low, float* high) {
  for (int64_t g = 0; g < groups; ++g) {
    const float* values = x + g * width;
    F least = Lanes::set(values[0]);
    F most = least;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      least = Lanes::min(least, Lanes::load(values + i));
      most = Lanes::max(most, Lanes::load(values + i));
    }
    low[g] = Lanes::reduce_min(least);
    high[g] = Lanes::reduce_max(most);
    for (; i < width; ++i) {
      low[g] = values[i] < low[g] ? values[i] : low[g];
      high[g] = values[i] > high[g] ? values[i] : high[g];
    }
  }
}

/// What the squared error of sixteen weights counts: one, or their importance.
struct Alike {};
inline F times(Alike /*one*/, F x) { return x; }
inline F times(F importance, F x) { return Lanes::mul(importance, x); }

/// Up to sixteen groups turned so that lane g of vector i is weight i of group g.
struct Columns {
  alignas(64) float x[kMostColumnWidth * kLanes];
  int64_t width = 0;

  explicit Columns(const SearchArgs& args) : width(args.width) { turn(args, args.x, x); }
  /// visit(parity, weights, importance): even and odd vectors, so that two sums are under way.
  template <typename Visit>
  inline void for_each(Visit visit) const {
    for (int64_t i = 0; i < width; i += 2) {
      visit(0, Lanes::load(x + i * kLanes), Alike());
      visit(1, Lanes::load(x + (i + 1) * kLanes), Alike());
    }
  }
  static F total(F even, F odd) { return Lanes::add(even, odd); }

  static void turn(const SearchArgs& args, const float* from, float* to) {
    for (int64_t begin = 0; begin < args.width; begin += kLanes) {
      F block[kLanes];
      for (int64_t g = 0; g < kLanes; ++g) {
        block[g] = g < args.groups ? Lanes::load(from + g * args.width + begin) : Lanes::set(0);
      }
      Lanes::transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) {
        Lanes::store(to + (begin + i) * kLanes, block[i]);
      }
    }
  }
};

/// The same with an importance of each weight.
struct WeightedColumns {
  Columns columns;
  alignas(64) float u[kMostColumnWidth * kLanes];

  explicit WeightedColumns(const SearchArgs& args) : columns(args) {
    Columns::turn(args, args.importance, u);
  }
  template <typename Visit>
  inline void for_each(Visit visit) const {
    for (int64_t i = 0; i < columns.width; i += 2) {
      const int64_t at = i * kLanes;
      visit(0, Lanes::load(columns.x + at), Lanes::load(u + at));
      visit(1, Lanes::load(columns.x + at + kLanes), Lanes::load(u + at + kLanes));
    }
  }
  static F total(F even, F odd) { return Columns::total(even, odd); }
};

/// One group over all lanes.
struct Row {
  const float* x;
  int64_t width;

  template <typename Visit>
  inline void for_each(Visit visit) const {
    int64_t i = 0;
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
      visit(0, Lanes::load(x + i), Alike());
      visit(1, Lanes::load(x + i + kLanes), Alike());
    }
    for_each_vector(x + i, width - i, [&](F values) { visit(0, values, Alike()); });
  }
  static F total(F even, F odd) { return Lanes::set(Lanes::reduce_add(Lanes::add(even, odd))); }
};

struct WeightedRow {
  const float* x;
  const float* u;
  int64_t width;

  template <typename Visit>
  inline void for_each(Visit visit) const {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      visit(0, Lanes::load(x + i), Lanes::load(u + i));
    }
    if (i < width) {
      float rest[2][kLanes] = {};
      __builtin_memcpy(rest[0], x + i, static_cast<size_t>(width - i) * 4);
      __builtin_memcpy(rest[1], u + i, static_cast<size_t>(width - i) * 4);
      visit(0, Lanes::load(rest[0]), Lanes::load(rest[1]));
    }
  }
  static F total(F even, F odd) { return Row::total(even, odd); }
};

/// Codes seen by least squares: the best scale for them is sum(x * code) / sum(code^2), and it
/// removes sum(x * code)^2 / sum(code^2) from the error.
struct Fit {
  F dot;
  F square;
};

/// Nearest integer of x * inverse, ties to even, where its magnitude is below 2^22.
inline F nearest_step(F x, F inverse) {
  const F magic = Lanes::set(12582912.0F);
  return Lanes::sub(Lanes::fma(x, inverse, magic), magic);
}

struct FitSum {
  F dot[2] = {Lanes::set(0), Lanes::set(0)};
  F square[2] = {Lanes::set(0), Lanes::set(0)};

  template <typename Importance>
  inline void add(int parity, F x, F code, Importance u) {
    const F counted = times(u, code);
    dot[parity] = Lanes::fma(x, counted, dot[parity]);
    square[parity] = Lanes::fma(code, counted, square[parity]);
  }
  template <typename Source>
  [[nodiscard]] Fit total(const Source& /*source*/) const {
    return {Source::total(dot[0], dot[1]), Source::total(square[0], square[1])};
  }
};

/// The best candidate so far. Sums are taken relative to absmax, so that their products stay far
/// from the limits of single precision.
struct Best {
  F unit;                  // 1 / absmax
  F gain = Lanes::set(0);  // gain / square is the error removed
  F dot = Lanes::set(0);
  F square = Lanes::set(1);
  F label = Lanes::set(0);

  void offer(const Fit& fit, F candidate) {
    const F new_dot = Lanes::mul(fit.dot, unit);
    const F new_gain = Lanes::mul(new_dot, new_dot);
    const F old_side = Lanes::mul(gain, fit.square);
    const F new_side = Lanes::mul(new_gain, square);
    const auto better = [&](F yes, F no) {
      return Lanes::select_less(old_side, new_side, yes, no);
    };
    gain = better(new_gain, gain);
    dot = better(fit.dot, dot);
    square = better(fit.square, square);
    label = better(candidate, label);
  }
  [[nodiscard]] F scale() const { return Lanes::div(dot, square); }
};

/// Codes that the range does not clip.
template <typename Source>
Fit fit_inside(const Source& source, F inverse) {
  FitSum sum;
  source.for_each(
      [&](int parity, F x, auto u) { sum.add(parity, x, nearest_step(x, inverse), u); });
  return sum.total(source);
}

template <typename Source>
Fit fit_clipped(const Source& source, F inverse, F low, F high) {
  FitSum sum;
  source.for_each([&](int parity, F x, auto u) {
    sum.add(parity, x, Lanes::min(Lanes::max(nearest_step(x, inverse), low), high), u);
  });
  return sum.total(source);
}

/// Fits of inverse and, with the sign of its codes turned, of -inverse: they differ in what the
/// range clips. kOneStep: no code is beyond the range by more than one step.
struct FitPair {
  Fit plain;
  Fit turned;
};

template <bool kOneStep, typename Source>
FitPair fit_both(const Source& source, F inverse, const SearchArgs& args) {
  const F low = Lanes::set(args.low);
  const F high = Lanes::set(args.high);
  const F turned_low = Lanes::set(-args.high);
  const F turned_high = Lanes::set(-args.low);
  FitSum plain;
  FitSum turned;
  source.for_each([&](int parity, F x, auto u) {
    const F nearest = nearest_step(x, inverse);
    const F above = kOneStep ? nearest : Lanes::max(nearest, low);
    const F below = kOneStep ? nearest : Lanes::min(nearest, turned_high);
    plain.add(parity, x, Lanes::min(above, high), u);
    turned.add(parity, x, Lanes::max(below, turned_low), u);
  });
  FitPair pair = {plain.total(source), turned.total(source)};
  pair.turned.dot = Lanes::sub(Lanes::set(0), pair.turned.dot);
  return pair;
}

// llama.cpp's make_qx_quants moves the inverse scale around -8 / m; here it moves around
// 7.5 / absmax, which reaches both 8 / |m| and 7 / |m|. Inside the range both signs fit alike.
template <bool kSigned, typename Source>
F lsq_of(const Source& source, F absmax, const SearchArgs& args) {
  const F none = Lanes::set(0);
  const float middle = args.high + 0.5F;
  Best best{Lanes::div(Lanes::set(1), absmax)};
  for (int i = -9; i <= 9; ++i) {
    const float steps = middle + 0.15F * static_cast<float>(i);
    const F inverse = Lanes::mul(Lanes::set(steps), best.unit);
    if (i < 0) {
      best.offer(fit_inside(source, inverse), none);
    } else if (kSigned) {
      const FitPair fits = steps < middle + 0.99F ? fit_both<true>(source, inverse, args)
                                                  : fit_both<false>(source, inverse, args);
      best.offer(fits.plain, none);
      best.offer(fits.turned, none);
    } else {
      best.offer(fit_clipped(source, inverse, Lanes::set(args.low), Lanes::set(args.high)), none);
    }
  }
  return best.scale();
}

template <typename Source>
F mse_of(const Source& source, F absmax, const SearchArgs& args) {
  const F low = Lanes::set(args.low);
  const F high = Lanes::set(args.high);
  const F most = Lanes::set(100);
  const float middle = (args.high + 0.5F) * 100.0F;
  Best best{Lanes::div(Lanes::set(1), absmax)};
  best.label = most;
  const auto attempt = [&](F steps, F percent) {
    best.offer(fit_clipped(source, Lanes::mul(steps, best.unit), low, high), percent);
  };
  for (int i = 100; i >= 28; i -= 4) {
    const auto percent = static_cast<float>(i);
    attempt(Lanes::set(middle / percent), Lanes::set(percent));
  }
  const F coarse = best.label;
  for (const int step : {-3, -2, -1, 1, 2, 3}) {
    const F percent = Lanes::min(Lanes::add(coarse, Lanes::set(static_cast<float>(step))), most);
    attempt(Lanes::div(Lanes::set(middle), percent), percent);
  }
  return best.scale();
}

inline bool side_by_side(const SearchArgs& args) {
  return args.width <= kMostColumnWidth && args.width % kLanes == 0;
}

inline F load_groups(const float* values, int64_t groups, float rest) {
  float lanes[kLanes];
  for (int64_t g = 0; g < kLanes; ++g) {
    lanes[g] = g < groups ? values[g] : rest;
  }
  return Lanes::load(lanes);
}

inline void store_groups(F values, int64_t groups, float* out) {
  float lanes[kLanes];
  Lanes::store(lanes, values);
  for (int64_t g = 0; g < groups; ++g) {
    out[g] = lanes[g];
  }
}

/// scales[g] = search(source, absmax) for every group.
template <typename Search>
inline void search_groups(const SearchArgs& args, float* scales, Search search) {
  const bool weighted = args.importance != nullptr;
  if (side_by_side(args)) {
    const F absmax = load_groups(args.absmax, args.groups, 1);
    const F best = weighted ? search(WeightedColumns(args), absmax) : search(Columns(args), absmax);
    store_groups(best, args.groups, scales);
    return;
  }
  for (int64_t g = 0; g < args.groups; ++g) {
    const float* x = args.x + g * args.width;
    const F absmax = Lanes::set(args.absmax[g]);
    const F best =
        weighted ? search(WeightedRow{x, args.importance + g * args.width, args.width}, absmax)
                 : search(Row{x, args.width}, absmax);
    store_groups(best, 1, scales + g);
  }
}

void search_lsq(const SearchArgs& args, float* scales) {
  search_groups(args, scales,
                [&](const auto& source, F absmax) { return lsq_of<false>(source, absmax, args); });
}

void search_lsq_signed(const SearchArgs& args, float* scales) {
  search_groups(args, scales,
                [&](const auto& source, F absmax) { return lsq_of<true>(source, absmax, args); });
}

void search_mse(const SearchArgs& args, float* scales) {
  search_groups(args, scales,
                [&](const auto& source, F absmax) { return mse_of(source, absmax, args); });
}

inline F round_bf16(F x) {
  const I bits = Lanes::bits(x);
  const I odd = Lanes::and_int(Lanes::shift_right<16>(bits), Lanes::set_int(1));
  const I rounded = Lanes::add_int(Lanes::add_int(bits, Lanes::set_int(0x7fff)), odd);
  return Lanes::from_bits(Lanes::and_int(rounded, Lanes::set_int(-65536)));
}

// Errors are compared in steps of the first candidate, whose square cannot overflow.
template <typename Source>
inline void shrink_of(const Source& columns,
                      const SearchArgs& args,
                      const float* low,
                      const float* high,
                      float* factors) {
  const F range_low = Lanes::set(args.low);
  const F range_high = Lanes::set(args.high);
  const F steps = Lanes::set(args.high - args.low);
  const F least = load_groups(low, args.groups, -1);
  const F most = load_groups(high, args.groups, 1);
  F best_error = Lanes::set(3e38F);
  F best_factor = Lanes::set(1);
  F first = Lanes::set(1);
  for (int percent = 100; percent >= 70; percent -= 3) {
    const F factor = Lanes::set(static_cast<float>(percent) / 100);
    const F bottom = Lanes::mul(least, factor);
    const F top = Lanes::mul(most, factor);
    const F scale = round_bf16(Lanes::sub(Lanes::div(top, steps), Lanes::div(bottom, steps)));
    first = percent == 100 ? scale : first;
    const F zero = round_even(Lanes::min(
        Lanes::max(Lanes::sub(range_low, Lanes::div(bottom, scale)), range_low), range_high));
    const F inverse = Lanes::div(Lanes::set(1), scale);
    F noise[2] = {Lanes::set(0), Lanes::set(0)};
    columns.for_each([&](int parity, F x, auto u) {
      const F shifted = Lanes::fma(x, inverse, zero);
      const F code = round_even(Lanes::min(Lanes::max(shifted, range_low), range_high));
      const F error = Lanes::sub(shifted, code);
      noise[parity] = Lanes::fma(error, times(u, error), noise[parity]);
    });
    const F ratio = Lanes::div(scale, first);
    const F error = Lanes::mul(Lanes::add(noise[0], noise[1]), Lanes::mul(ratio, ratio));
    best_factor = Lanes::select_less(error, best_error, factor, best_factor);
    best_error = Lanes::select_less(error, best_error, error, best_error);
  }
  store_groups(best_factor, args.groups, factors);
}

void search_shrink(const SearchArgs& args, const float* low, const float* high, float* factors) {
  args.importance == nullptr ? shrink_of(Columns(args), args, low, high, factors)
                             : shrink_of(WeightedColumns(args), args, low, high, factors);
}

template <typename Source>
inline void exponent_of(const Source& columns, const SearchArgs& args, float* powers) {
  const F middle = load_groups(powers, args.groups, 1);
  const F least = Lanes::set(0x1p-127F);
  const F largest = Lanes::set(0x1p125F);
  F best_error = Lanes::set(3e38F);
  F best = middle;
  for (const float factor : {1.0F, 0.5F, 2.0F}) {
    const F power = Lanes::min(Lanes::max(Lanes::mul(middle, Lanes::set(factor)), least), largest);
    const F inverse = Lanes::div(Lanes::set(1), power);  // exact
    F noise[2] = {Lanes::set(0), Lanes::set(0)};
    columns.for_each([&](int parity, F x, auto u) {
      const F scaled = Lanes::mul(x, inverse);
      const F error = Lanes::sub(scaled, encode_float<E2M1>(scaled).value);
      noise[parity] = Lanes::fma(error, times(u, error), noise[parity]);
    });
    const F ratio = Lanes::div(power, middle);
    const F error = Lanes::mul(Lanes::add(noise[0], noise[1]), Lanes::mul(ratio, ratio));
    best = Lanes::select_less(error, best_error, power, best);
    best_error = Lanes::select_less(error, best_error, error, best_error);
  }
  store_groups(best, args.groups, powers);
}

void search_exponent(const SearchArgs& args, float* powers) {
  args.importance == nullptr ? exponent_of(Columns(args), args, powers)
                             : exponent_of(WeightedColumns(args), args, powers);
}

constexpr RowKernels rows_named(std::string_view isa) {
  return {.isa = isa,
          .absmax = group_absmax,
          .absmax_bf16 = bf16_absmax,
          .minmax = group_minmax,
          .lsq = search_lsq,
          .lsq_signed = search_lsq_signed,
          .mse = search_mse,
          .shrink = search_shrink,
          .exponent = search_exponent,
          .int4 = encode_groups<IntCodec<4, 8, false>>,
          .int4_zeros = encode_groups<IntCodec<4, 8, true>>,
          .int8 = encode_groups<IntCodec<8, 0, false>>,
          .fp8 = encode_groups<FloatCodec<E4M3, false>>,
          .fp4 = encode_groups<FloatCodec<E2M1, true>>,
          .bf16 = encode_groups<Bf16Codec>,
          .add_products = add_products,
          .add_row_products = add_row_products,
          .columns_int4 = round_columns<IntCodec<4, 8, false>>,
          .columns_int4_zeros = round_columns<IntCodec<4, 8, true>>,
          .columns_int8 = round_columns<IntCodec<8, 0, false>>,
          .columns_fp4 = round_columns<FloatCodec<E2M1, true>>,
          .sweep_int4 = sweep_columns<IntCodec<4, 8, false>>,
          .sweep_int4_zeros = sweep_columns<IntCodec<4, 8, true>>,
          .sweep_int8 = sweep_columns<IntCodec<8, 0, false>>,
          .sweep_fp4 = sweep_columns<FloatCodec<E2M1, true>>,
          .progressive = encode_progressive,
          .reorder = reorder_words};
}

}  // namespace
}  // namespace nibble::rows
