#include "quant/hadamard.h"

#include <cmath>

namespace nibble {
namespace {

void flip_signs(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = hadamard_flips(i) ? -x[i] : x[i];
  }
}

// Sums of two, at growing distances; then the factor that keeps lengths.
void add_up(float* x, int64_t count) {
  for (int64_t distance = 1; distance < count; distance *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * distance) {
      for (int64_t i = begin; i < begin + distance; ++i) {
        const float low = x[i], high = x[i + distance];
        x[i] = low + high;
        x[i + distance] = low - high;
      }
    }
  }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(count)));
  for (int64_t i = 0; i < count; ++i) {
    x[i] *= factor;
  }
}

}  // namespace

void hadamard(float* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t i = 0; i < dim; i += block) {
    flip_signs(x + i, block);
    add_up(x + i, block);
  }
}

void inverse_hadamard(float* x, int64_t dim) {
  const int64_t block = hadamard_block(dim);
  for (int64_t i = 0; i < dim; i += block) {
    add_up(x + i, block);
    flip_signs(x + i, block);
  }
}

}  // namespace nibble
