#pragma once

#include <cmath>
#include <cstdint>

// What is done to one row of a matrix whose codes are chosen column by column, written once for the
// threads of a GPU and for tests on the host. Every operation is rounded by itself, as on the CPU.

#ifdef __CUDACC__
#define NIBBLE_ROW __host__ __device__ __forceinline__
#else
#define NIBBLE_ROW inline
#endif
#ifdef __CUDA_ARCH__
#define NIBBLE_UNROLL _Pragma("unroll")
#define NIBBLE_UNROLL_FOUR _Pragma("unroll 4")
#else
#define NIBBLE_UNROLL
#define NIBBLE_UNROLL_FOUR
#endif

namespace nibble::cuda {

inline constexpr int kColumnPart = 32;    // columns whose sums a thread has in registers
inline constexpr int kSquarePitch = 128;  // numbers from one row to the next of a block's square

#ifdef __CUDA_ARCH__
NIBBLE_ROW float plus(float a, float b) { return __fadd_rn(a, b); }
NIBBLE_ROW float minus(float a, float b) { return __fsub_rn(a, b); }
NIBBLE_ROW float times(float a, float b) { return __fmul_rn(a, b); }
NIBBLE_ROW float over(float a, float b) { return __fdiv_rn(a, b); }
NIBBLE_ROW float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
NIBBLE_ROW float plus(float a, float b) { return a + b; }
NIBBLE_ROW float minus(float a, float b) { return a - b; }
NIBBLE_ROW float times(float a, float b) { return a * b; }
NIBBLE_ROW float over(float a, float b) { return a / b; }
NIBBLE_ROW float fused(float a, float b, float c) { return std::fma(a, b, c); }
#endif

/// The value of the code that is nearest to a number of steps (a weight over its scale).
struct IntCodec {
  float low = 0;
  float high = 0;

  NIBBLE_ROW float nearest(float steps, float scale, float zero) const {
    const float code = rintf(fminf(fmaxf(plus(steps, zero), low), high));
    return times(minus(code, zero), scale);
  }
  NIBBLE_ROW float value(float x, float scale, float zero) const {
    return nearest(over(x, scale), scale, zero);
  }
};

/// E2M1: steps of 0.5 below 2, of 1 below 4, of 2 up to 6; ties to the even code.
struct Fp4Codec {
  NIBBLE_ROW float nearest(float steps, float scale, float /*zero*/) const {
    const float size = fminf(fabsf(steps), 6.0F);
    const float step = size < 2.0F ? 0.5F : size < 4.0F ? 1.0F : 2.0F;
    const float rounded = times(rintf(over(size, step)), step);
    return times(copysignf(rounded, steps), scale);
  }
  NIBBLE_ROW float value(float x, float scale, float zero) const {
    return nearest(over(x, scale), scale, zero);
  }
};

/// Four numbers that are loaded at once.
struct alignas(16) FourFloats {
  float x, y, z, w;
};

/// Numbers of one row in columns of a block, `stride` apart.
struct RowColumns {
  const float* numbers = nullptr;  // of column 0
  int64_t stride = 0;
  int begin = 0;  // columns [begin, end)
  int end = 0;
};

/// sums[i] += over the columns t: number t times line t of the square at column `at` + i.
NIBBLE_ROW void add_lines(const RowColumns& row,
                          const float* square,
                          int at,
                          float (&sums)[kColumnPart]) {
  NIBBLE_UNROLL_FOUR
  for (int t = row.begin; t < row.end; ++t) {
    const float number = row.numbers[t * row.stride];
    const auto* line = reinterpret_cast<const FourFloats*>(square + t * kSquarePitch + at);
    NIBBLE_UNROLL
    for (int i = 0; i < kColumnPart / 4; ++i) {
      const FourFloats four = line[i];
      sums[4 * i] = fused(number, four.x, sums[4 * i]);
      sums[4 * i + 1] = fused(number, four.y, sums[4 * i + 1]);
      sums[4 * i + 2] = fused(number, four.z, sums[4 * i + 2]);
      sums[4 * i + 3] = fused(number, four.w, sums[4 * i + 3]);
    }
  }
}

/// What a row has in the columns from `begin` on, up to kColumnPart of them; `rest` past `count`.
NIBBLE_ROW void load_part(const RowColumns& row, float rest, float (&part)[kColumnPart]) {
  NIBBLE_UNROLL
  for (int i = 0; i < kColumnPart; ++i) {
    part[i] = row.begin + i < row.end ? row.numbers[(row.begin + i) * row.stride] : rest;
  }
}

}  // namespace nibble::cuda
