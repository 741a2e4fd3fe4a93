#pragma once

// Rows that are multiplied by Hadamard matrices: sums and differences of two numbers, in the order
// of turn_blocks() (quant/hadamard.h), so that all instruction sets and GPUs give its bits.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

/// Sums and differences of vectors `distance` apart.
inline void add_vectors(F32x16* v, int64_t count, int64_t distance) {
  for (int64_t begin = 0; begin < count; begin += 2 * distance) {
    for (int64_t i = begin; i < begin + distance; ++i) {
      const F32x16 low = v[i];
      const F32x16 high = v[i + distance];
      v[i] = Simd::add(low, high);
      v[i + distance] = Simd::sub(low, high);
    }
  }
}

/// The distances below 256 of the 256 numbers at x, of which `count` exist.
inline void turn_piece(float* x, int64_t count, int64_t block) {
  F32x16 v[16];
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t left = count - 16 * i;
    v[i] = left >= 16 ? Simd::load(x + 16 * i)
           : left > 0 ? load_some(x + 16 * i, left)
                      : Simd::set(0.0F);
  }
  Simd::transpose(v);  // neighbours lie in neighbouring vectors
  for (int64_t distance = 1; distance < (block < 16 ? block : 16); distance *= 2) {
    add_vectors(v, 16, distance);
  }
  Simd::transpose(v);
  for (int64_t distance = 1; 16 * distance < (block < 256 ? block : 256); distance *= 2) {
    add_vectors(v, 16, distance);
  }
  for (int64_t i = 0; i < 16 && 16 * i < count; ++i) {
    const int64_t left = count - 16 * i;
    store_lanes(x + 16 * i, left < 16 ? left : 16, v[i]);
  }
}

/// The distances from 256 on of a block of x, four numbers at a time where two distances are left.
inline void turn_far(float* x, int64_t block) {
  int64_t distance = 256;
  for (; 4 * distance <= block; distance *= 4) {
    for (int64_t begin = 0; begin < block; begin += 4 * distance) {
      for (int64_t i = begin; i < begin + distance; i += 16) {
        F32x16 v[4];
        for (int64_t part = 0; part < 4; ++part) {
          v[part] = Simd::load(x + i + part * distance);
        }
        add_vectors(v, 4, 1);
        add_vectors(v, 4, 2);
        for (int64_t part = 0; part < 4; ++part) {
          Simd::store(x + i + part * distance, v[part]);
        }
      }
    }
  }
  for (int64_t i = 0; distance < block && i < distance; i += 16) {
    F32x16 v[2] = {Simd::load(x + i), Simd::load(x + i + distance)};
    add_vectors(v, 2, 1);
    Simd::store(x + i, v[0]);
    Simd::store(x + i + distance, v[1]);
  }
}

/// Each `block` neighbours of x [n] are multiplied by the Hadamard matrix of that order.
inline void turn_row(float* x, int64_t n, int64_t block) {
  constexpr int64_t kPieceNumbers = 256;
  for (int64_t i = 0; i < n; i += kPieceNumbers) {
    turn_piece(x + i, n - i < kPieceNumbers ? n - i : kPieceNumbers, block);
  }
  for (int64_t i = 0; block > kPieceNumbers && i < n; i += block) {
    turn_far(x + i, block);
  }
  const double factor_of_lengths = 1.0 / __builtin_sqrt(static_cast<double>(block));
  const F32x16 factor = Simd::set(static_cast<float>(factor_of_lengths));
  in_vectors(n, [&](int64_t i, int64_t lanes) {
    store_lanes(x + i, lanes, Simd::mul(load_lanes(x + i, lanes), factor));
  });
}

}  // namespace
}  // namespace nibble::cpu
