#pragma once

#include "backend/cuda/calibration/column_rows.cuh"

namespace nibble::cuda {

inline constexpr int kColumnThreads = 64;  // rows of a block of threads
inline constexpr int kSquareBytes = kSquarePitch * kSquarePitch * static_cast<int>(sizeof(float));

/// A square [count, count] of a matrix, rows `stride` numbers apart, aligned to 16 bytes; count and
/// stride are multiples of 4.
struct ColumnSquare {
  const float* numbers = nullptr;
  int64_t stride = 0;
  int count = 0;
};

/// Takes its upper triangle into shared memory, with zeros where it ends.
__device__ __forceinline__ void load_square(const ColumnSquare& square, float* to) {
  constexpr int kFours = kSquarePitch / 4;  // of a line
  auto* fours = reinterpret_cast<FourFloats*>(to);
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < kSquarePitch * kFours; i += kColumnThreads) {
    const int row = i / kFours;
    const int column = i % kFours * 4;
    FourFloats four{0.0F, 0.0F, 0.0F, 0.0F};
    if (row < square.count && column < square.count && row < column + 4) {
      four = *reinterpret_cast<const FourFloats*>(square.numbers + row * square.stride + column);
      four.x = row <= column ? four.x : 0.0F;
      four.y = row <= column + 1 ? four.y : 0.0F;
      four.z = row <= column + 2 ? four.z : 0.0F;
    }
    fours[i] = four;
  }
  __syncthreads();
}

}  // namespace nibble::cuda
