#pragma once

#include <cstdint>

#include <cuda.h>

#include "base/status.h"

namespace nibble::cuda {

/// Makes tensor maps, which tell the copy engine of Hopper how a matrix lies in memory.
class TensorMaps {
 public:
  /// Refuses where the driver has none.
  static Result<TensorMaps> find();
  /// Map of x [rows, columns] bf16, dense, aligned to 16 bytes and its columns a multiple of 64, as
  /// [columns / 64][rows][64]: one copy brings `panels` x `box_rows` x 64, swizzled by 128 bytes;
  /// what lies outside reads as zeros.
  [[nodiscard]] bool map_bf16(const void* x,
                              int64_t rows,
                              int64_t columns,
                              int box_rows,
                              int panels,
                              CUtensorMap& map) const;

 private:
  void* encode_ = nullptr;  // the driver's cuTensorMapEncodeTiled
};

}  // namespace nibble::cuda
