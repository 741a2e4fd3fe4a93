#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"

namespace nibble::cuda {

inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

/// `count` BF16 numbers of either sign with magnitudes from 0.5 to 2: cheap, and none is lost in
/// the rounding of its row.
inline std::vector<uint16_t> random_bf16(size_t count, uint32_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint16_t> out(count);
  for (size_t i = 0; i < count; i += 4) {
    uint64_t bits = random();
    for (size_t j = i; j < std::min(i + 4, count); ++j, bits >>= 16) {
      out[j] = static_cast<uint16_t>((bits & 0x80ffU) | 0x3f00U);
    }
  }
  return out;
}

template <typename T>
Result<DeviceBuffer> device_copy(const std::vector<T>& values) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer out,
                          allocate_device(values.size() * sizeof(T), "the self-test"));
  NIBBLE_RETURN_IF_ERROR(copy_to_device(out.as<void>(), values.data(), out.size()));
  return out;
}

/// Memory full of NaNs.
inline Result<DeviceBuffer> poisoned_device(size_t bytes) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer out, allocate_device(bytes, "the self-test"));
  NIBBLE_RETURN_IF_ERROR(fill_device(out.as<void>(), 0xff, bytes));
  return out;
}

template <typename T>
Status copy_back(const DeviceBuffer& from, size_t begin, std::span<T> to) {
  return check(cudaMemcpy(to.data(), from.as<T>() + begin, to.size_bytes(), cudaMemcpyDeviceToHost),
               "copying from the GPU");
}

/// Adds up ‖got − want‖ / ‖want‖ and remembers where the two differ most.
struct Difference {
  double squares = 0, total = 0, largest = -1, got = 0, want = 0;
  int64_t row = 0, column = 0;

  void add(double value, double reference, int64_t at_row, int64_t at_column) {
    const double gap = value > reference ? value - reference : reference - value;
    squares += gap * gap;
    total += reference * reference;
    if (!(gap <= largest)) {  // a NaN too
      largest = gap;
      got = value;
      want = reference;
      row = at_row;
      column = at_column;
    }
  }
  /// NaN where a value was.
  [[nodiscard]] double relative() const;
  [[nodiscard]] bool within(double tolerance) const {
    return squares <= tolerance * tolerance * total;
  }
};

}  // namespace nibble::cuda
