#pragma once

#include "quantizer/kernels/encode_lanes.h"

// Products of matrices and rounding by columns over the vocabulary Lanes.
namespace nibble::rows {
namespace {

/// Where a tile of products finds its rows of a: element t of row r.
struct ByColumns {
  const float* a;
  int64_t stride;  // from one t to the next
  [[nodiscard]] float at(int r, int64_t t) const { return a[t * stride + r]; }
  [[nodiscard]] ByColumns from(int64_t row) const { return {a + row, stride}; }
  template <int kRows>
  void prefetch(int64_t /*t*/) const {}
};
struct ByRows {
  const float* a;
  int64_t stride;  // from one row to the next
  [[nodiscard]] float at(int r, int64_t t) const { return a[r * stride + t]; }
  [[nodiscard]] ByRows from(int64_t row) const { return {a + row * stride, stride}; }
  /// The rows of the next tile: hardware follows rows that are pages apart too late.
  template <int kRows>
  void prefetch(int64_t t) const {
    for (int r = 0; t % kLanes == 0 && r < kRows; ++r) {
      __builtin_prefetch(a + (kRows + r) * stride + t);
    }
  }
};

/// Products of some rows of a with a panel of b, whose sums stay in registers.
template <int kRows, int kVectors, typename Rows>
inline void add_tile(const ProductArgs& args, const Rows& a, int64_t i, int64_t j) {
  F sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = Lanes::set(0);
    }
  }
  const float* b = args.b + j;
  for (int64_t t = 0; t < args.depth; ++t, b += args.b_stride) {
    a.template prefetch<kRows>(t);
    F columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = Lanes::load(b + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const F row = Lanes::set(a.at(r, t));
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

template <int kVectors, typename Rows>
inline void add_panel(const ProductArgs& args, const Rows& a, int64_t j) {
  constexpr int kRows = 6;
  int64_t i = 0;
  for (; i + kRows <= args.m; i += kRows) {
    add_tile<kRows, kVectors>(args, a.from(i), i, j);
  }
  for (; i + 2 <= args.m; i += 2) {
    add_tile<2, kVectors>(args, a.from(i), i, j);
  }
  if (i < args.m) {
    add_tile<1, kVectors>(args, a.from(i), i, j);
  }
}

constexpr int kPanelVectors = Lanes::kFewRegisters ? 1 : 4;  // sums of a tile stay in registers
constexpr int64_t kPanel = kPanelVectors * kLanes;

template <typename Rows>
inline void add_panels(const ProductArgs& args, const Rows& a) {
  int64_t j = 0;
  for (; j + kPanel <= args.n; j += kPanel) {
    add_panel<kPanelVectors>(args, a, j);
  }
  for (; j < args.n; j += kLanes) {
    add_panel<1>(args, a, j);
  }
}

constexpr int64_t kPackedRows = 96;
constexpr int64_t kPackedDepth = 256;

/// Numbers [depth, width] one line behind the other.
inline void pack_lines(const float* from, int64_t stride, int64_t depth, int64_t width, float* to) {
  for (int64_t t = 0; t < depth; ++t) {
    __builtin_memcpy(to + t * width, from + t * stride, static_cast<size_t>(width) * sizeof(float));
  }
}

/// Lines of large matrices are pages apart, and where these are a power of two apart they push each
/// other out of the caches: tiles read copies (1.5 times as fast at 14,336 columns).
void add_products(const ProductArgs& args) {
  if (args.depth > kPackedDepth || args.m < kLanes) {
    return add_panels(args, ByColumns{args.a, args.a_stride});
  }
  alignas(64) float a[kPackedRows * kPackedDepth];
  alignas(64) float b[kPanel * kPackedDepth];
  for (int64_t i = 0; i < args.m; i += kPackedRows) {
    const int64_t rows = args.m - i < kPackedRows ? args.m - i : kPackedRows;
    pack_lines(args.a + i, args.a_stride, args.depth, rows, a);
    for (int64_t j = 0; j < args.n; j += kPanel) {
      ProductArgs part = args;
      part.n = args.n - j < kPanel ? args.n - j : kPanel;
      part.m = rows;
      part.c = args.c + i * args.c_stride + j;
      part.b = args.b + j;
      if (part.b_stride != part.n) {
        pack_lines(args.b + j, args.b_stride, args.depth, part.n, b);
        part.b = b;
        part.b_stride = part.n;
      }
      add_panels(part, ByColumns{a, rows});
    }
  }
}

void add_row_products(const ProductArgs& args) { add_panels(args, ByRows{args.a, args.a_stride}); }

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
