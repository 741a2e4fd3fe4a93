#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "backend/cuda/device_info.h"
#include "backend/cuda/memory.h"

/// Ends a test as skipped, with the reason, where there is no GPU.
#define NIBBLE_NEEDS_GPU()                                   \
  do {                                                       \
    const auto info = ::nibble::cuda::query_device(0);       \
    if (!info.ok()) GTEST_SKIP() << info.status().message(); \
  } while (false)

namespace nibble::cuda::testing {

/// Whether tests are to launch each kernel a few times only: under compute-sanitizer a launch costs
/// a tenth of a second.
inline bool brief_tests() { return std::getenv("NIBBLE_BRIEF_TESTS") != nullptr; }

/// Numbers of rows to test: all of them, or of brief tests those of `few`.
inline std::vector<int64_t> row_counts(std::vector<int64_t> all, std::vector<int64_t> few) {
  return brief_tests() ? std::move(few) : std::move(all);
}

/// Normally distributed values, the same for the same seed.
inline std::vector<float> random_values(size_t count, uint32_t seed, float spread) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(generator);
  }
  return values;
}

/// Device memory of a test; starts poisoned with 0xff bytes (NaN in every float type).
template <typename T>
class DeviceArray final {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), bytes() + 256), cudaSuccess);
    EXPECT_TRUE(fill_device(data_, 0xff, bytes() + 256).ok());
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    EXPECT_TRUE(copy_to_device(data_, values.data(), bytes()).ok());
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] size_t bytes() const { return size_ * sizeof(T); }
  void zero() { EXPECT_TRUE(fill_device(data_, 0, bytes()).ok()); }
  /// Waits for the device.
  [[nodiscard]] std::vector<T> host() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace nibble::cuda::testing
