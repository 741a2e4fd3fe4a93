#pragma once

// Products of attention: rows of queries with keys, rows of weights with values.

#include "backend/cpu/kernels/attention_state.h"

namespace nibble::cpu {
namespace {

/// How the 32 products of an element of a block are halved.
enum class Halves : uint8_t { kEvenAndOdd, kFirstAndSecond };

/// c [rows][columns] from a [rows][32] and b [32][columns]: an element is the sum of both halves of
/// its products, each by fused multiply-adds in order from 0.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
};

/// Which sums are in registers at once: rows by vectors of 16 columns, of both halves. Two fused
/// multiply-adds a cycle take at least 12 of them, as registers of the processor's own (measured on
/// Zen 4: 8 reach 62 % of the peak, 12 and more 97 %).
template <int kRowCount, int kVectorCount>
struct SumShape {
  static constexpr int kRows = kRowCount;
  static constexpr int kVectors = kVectorCount;
  using Sums = F32x16[2][kRows][kVectors];
};

constexpr bool kManyRegisters = Simd::kRows >= 8;
constexpr int kProductRows = kManyRegisters ? 8 : 3;  // most rows that share what is loaded of b

template <int kRows>
constexpr int kSumVectors = kManyRegisters ? (kRows == 1 ? 4 : (kRows <= 3 ? 2 : 1))
                                           : (kRows == 1 ? 2 : 1);

/// c += the sums; kFirst: c = the sums.
template <typename Shape, bool kFirst, Halves kHalves>
void multiply(const Product& p) {
  typename Shape::Sums sums;
  for (auto& of_rows : sums) {
    for (auto& of_row : of_rows) {
      for (F32x16& sum : of_row) {
        sum = Simd::set(0.0F);
      }
    }
  }
  for (int64_t i = 0; i < kDotBlock / 2; ++i) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t k = kHalves == Halves::kEvenAndOdd ? 2 * i + half : i + half * kDotBlock / 2;
      F32x16 b[Shape::kVectors];
      for (int64_t v = 0; v < Shape::kVectors; ++v) {
        b[v] = Simd::load(p.b + k * p.b_stride + 16 * v);
      }
      for (int64_t r = 0; r < Shape::kRows; ++r) {
        const F32x16 a = Simd::set(p.a[r * p.a_stride + k]);
        for (int64_t v = 0; v < Shape::kVectors; ++v) {
          sums[half][r][v] = Simd::fma(a, b[v], sums[half][r][v]);
        }
      }
    }
  }
  for (int64_t r = 0; r < Shape::kRows; ++r) {
    for (int64_t v = 0; v < Shape::kVectors; ++v) {
      float* c = p.c + r * p.c_stride + 16 * v;
      const F32x16 sum = Simd::add(sums[0][r][v], sums[1][r][v]);
      Simd::store(c, kFirst ? sum : Simd::add(Simd::load(c), sum));
    }
  }
}

/// step(column, Constant) for groups of 16 kVectors columns, then of half as many.
template <int kVectors>
struct Constant {
  static constexpr int kValue = kVectors;
};
template <int kVectors, typename Step>
[[gnu::always_inline]] inline void in_columns(int64_t begin, int64_t end, const Step& step) {
  for (; begin + 16 * kVectors <= end; begin += 16 * kVectors) {
    step(begin, Constant<kVectors>());
  }
  if constexpr (kVectors > 1) {
    in_columns<kVectors / 2>(begin, end, step);
  }
}

/// step(Constant) of the number of rows, up to kMost.
template <int kMost, typename Step>
[[gnu::always_inline]] inline void with_rows(int64_t rows, const Step& step) {
  if (rows == kMost) {
    step(Constant<kMost>());
  } else if constexpr (kMost > 1) {
    with_rows<kMost - 1>(rows, step);
  }
}

/// The products of up to kProductRows rows; `columns` is a multiple of 16.
template <bool kFirst, Halves kHalves>
void multiply_rows(const Product& p, int64_t rows, int64_t columns) {
  with_rows<kProductRows>(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::kValue;
    in_columns<kSumVectors<kRows>>(0, columns, [&](int64_t begin, auto vectors) {
      Product part = p;
      part.b += begin;
      part.c += begin;
      multiply<SumShape<kRows, decltype(vectors)::kValue>, kFirst, kHalves>(part);
    });
  });
}

/// c [rows][columns] from pairs of 16-bit integers, a [rows][pairs] and b [pairs][columns]: exact
/// sums from `first` on, times `unit`.
struct PairProduct {
  const int32_t* a;
  int64_t pairs;
  const int32_t* b;
  int64_t b_stride;
  const int32_t* first;  // [rows]
  const float* unit;     // [rows]
  float* c;
  int64_t c_stride;
};

template <int kRows, int kVectors>
void multiply_pairs(const PairProduct& p) {
  I32x16 sums[kRows][kVectors];
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      sums[r][v] = Simd::set_int(p.first[r]);
    }
  }
  for (int64_t k = 0; k < p.pairs; ++k) {
    I32x16 b[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      b[v] = Simd::load_int(p.b + k * p.b_stride + 16 * v);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
      const I32x16 a = Simd::set_int(p.a[r * p.pairs + k]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] = Simd::dot_s16(sums[r][v], a, b[v]);
      }
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const F32x16 sum = Simd::mul(Simd::to_float(sums[r][v]), Simd::set(p.unit[r]));
      Simd::store(p.c + r * p.c_stride + 16 * v, sum);
    }
  }
}

inline void multiply_pair_rows(const PairProduct& p, int64_t rows, int64_t columns) {
  with_rows<kProductRows>(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::kValue;
    constexpr int kVectors = kManyRegisters ? (kRows <= 4 ? 4 : 2) : (kRows == 1 ? 2 : 1);
    in_columns<kVectors>(0, columns, [&](int64_t begin, auto vectors) {
      PairProduct part = p;
      part.b += begin;
      part.c += begin;
      multiply_pairs<kRows, decltype(vectors)::kValue>(part);
    });
  });
}

}  // namespace
}  // namespace nibble::cpu
