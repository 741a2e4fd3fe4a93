#pragma once

#include "quantizer/kernels/encode_lanes.h"

// Products of matrices and rounding by columns over the vocabulary Lanes.
namespace nibble::rows {
namespace {

template <int kRows, int kVectors>
inline void add_tile(const ProductArgs& args, int64_t i, int64_t j) {
  F sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = Lanes::set(0);
    }
  }
  const float* a = args.a + i;
  const float* b = args.b + j;
  for (int64_t t = 0; t < args.depth; ++t, a += args.a_stride, b += args.b_stride) {
    F columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = Lanes::load(b + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const F row = Lanes::set(a[r]);
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Lanes::fma(row, columns[v], sums[r][v]);
      }
    }
  }
  const F sign = Lanes::set(args.sign);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* c = args.c + (i + r) * args.c_stride + j + v * kLanes;
      Lanes::store(c, Lanes::fma(sign, sums[r][v], Lanes::load(c)));
    }
  }
}

template <int kVectors>
inline void add_panel(const ProductArgs& args, int64_t j) {
  constexpr int kRows = 6;
  int64_t i = 0;
  for (; i + kRows <= args.m; i += kRows) {
    add_tile<kRows, kVectors>(args, i, j);
  }
  for (; i < args.m; ++i) {
    add_tile<1, kVectors>(args, i, j);
  }
}

void add_products(const ProductArgs& args) {
  constexpr int kVectors = Lanes::kFewRegisters ? 1 : 4;  // sums of a tile stay in registers
  int64_t j = 0;
  for (; j + kVectors * kLanes <= args.n; j += kVectors * kLanes) {
    add_panel<kVectors>(args, j);
  }
  for (; j < args.n; j += kLanes) {
    add_panel<1>(args, j);
  }
}

template <typename Codec>
void round_columns(const ColumnsArgs& args) {
  for (int64_t lane = 0; lane < args.rows; lane += kLanes) {
    for (int64_t j = 0; j < args.columns; ++j) {
      const int64_t at = j * args.rows + lane;
      const float* factor = args.factor + j * args.factor_stride;
      const F w = Lanes::load(args.w + at);
      const F zero = args.zeros == nullptr ? Lanes::set(0) : Lanes::load(args.zeros[j] + lane);
      const F target =
          Lanes::add(w, Lanes::div(Lanes::load(args.sums + at), Lanes::set(factor[j])));
      const F value = Codec(Lanes::load(args.scales[j] + lane), zero).encode(target).value;
      const F error = Lanes::sub(w, value);
      Lanes::store(args.values + at, value);
      Lanes::store(args.errors + at, error);
      for (int64_t next = j + 1; next < args.columns; ++next) {
        float* sums = args.sums + next * args.rows + lane;
        Lanes::store(sums, Lanes::fma(error, Lanes::set(factor[next]), Lanes::load(sums)));
      }
    }
  }
}

template <typename Codec>
void sweep_columns(const SweepArgs& args) {
  const F damping = Lanes::set(args.damping);
  const F margin = Lanes::set(1 - 0x1p-18F);  // what is no nearer by this stays, for its rounding
  for (int64_t lane = 0; lane < args.rows; lane += kLanes) {
    for (int64_t j = 0; j < args.columns; ++j) {
      const int64_t at = j * args.rows + lane;
      const float* gram = args.gram + j * args.gram_stride;
      const F before = Lanes::load(args.values + at);
      const F gradient = Lanes::load(args.gradients + at);
      const F zero = args.zeros == nullptr ? Lanes::set(0) : Lanes::load(args.zeros[j] + lane);
      const F step = Lanes::div(gradient, Lanes::add(Lanes::set(gram[j]), damping));
      const F target = Lanes::add(before, step);
      const F best = Codec(Lanes::load(args.scales[j] + lane), zero).encode(target).value;
      const F value = Lanes::select_less(magnitude(Lanes::sub(target, best)),
                                         Lanes::mul(margin, magnitude(step)), best, before);
      const F change = Lanes::sub(before, value);
      Lanes::store(args.values + at, value);
      Lanes::store(args.changes + at, change);
      for (int64_t other = 0; other < args.columns; ++other) {
        float* sums = args.gradients + other * args.rows + lane;
        Lanes::store(sums, Lanes::fma(change, Lanes::set(gram[other]), Lanes::load(sums)));
      }
      Lanes::store(args.gradients + at,
                   Lanes::fma(change, damping, Lanes::load(args.gradients + at)));
    }
  }
}

}  // namespace
}  // namespace nibble::rows
