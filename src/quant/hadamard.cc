#include "quant/hadamard.h"

#include <cmath>

namespace nibble {
namespace {

void flip_signs(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = hadamard_flips(i) ? -x[i] : x[i];
  }
}

template <typename Number>
void turn_block(Number* x, int64_t count) {
  for (int64_t distance = 1; distance < count; distance *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * distance) {
      for (int64_t i = begin; i < begin + distance; ++i) {
        const Number low = x[i], high = x[i + distance];
        x[i] = low + high;
        x[i + distance] = low - high;
      }
    }
  }
  const auto factor = static_cast<Number>(1.0 / std::sqrt(static_cast<double>(count)));
  for (int64_t i = 0; i < count; ++i) {
    x[i] *= factor;
  }
}

template <typename Number>
void turn_all(Number* x, int64_t dim, int64_t block) {
  for (int64_t i = 0; i < dim; i += block) {
    turn_block(x + i, block);
  }
}

}  // namespace

void turn_blocks(float* x, int64_t dim, int64_t block) { turn_all(x, dim, block); }
void turn_blocks(double* x, int64_t dim, int64_t block) { turn_all(x, dim, block); }

void hadamard(float* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t i = 0; i < dim; i += block) {
    flip_signs(x + i, block);
    turn_block(x + i, block);
  }
}

void inverse_hadamard(float* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t i = 0; i < dim; i += block) {
    turn_block(x + i, block);
    flip_signs(x + i, block);
  }
}

}  // namespace nibble
