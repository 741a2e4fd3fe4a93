#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "base/status.h"

namespace nibble::cuda {

/// Memory on the current GPU, cleared.
class DeviceMemory final {
 public:
  DeviceMemory() = default;
  static Result<DeviceMemory> allocate(size_t bytes) {
    DeviceMemory memory;
    NIBBLE_RETURN_IF_ERROR(check(cudaMalloc(&memory.data_, std::max<size_t>(bytes, 256)),
                                 "allocating memory for a benchmark"));
    NIBBLE_RETURN_IF_ERROR(fill_device(memory.data_, 0, bytes));
    return memory;
  }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

/// A stream and two events.
class Timer final {
 public:
  static Result<std::unique_ptr<Timer>> make() {
    auto timer = std::make_unique<Timer>();
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&timer->stream_, cudaStreamNonBlocking),
                                 "creating a stream"));
    NIBBLE_RETURN_IF_ERROR(check(cudaEventCreate(&timer->begin_), "creating an event"));
    NIBBLE_RETURN_IF_ERROR(check(cudaEventCreate(&timer->end_), "creating an event"));
    return timer;
  }
  Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  /// Microseconds from before work() to its end on the device.
  template <typename Work>
  Result<double> time(Work&& work) {
    NIBBLE_RETURN_IF_ERROR(check(cudaEventRecord(begin_, stream_), "recording"));
    NIBBLE_RETURN_IF_ERROR(work());
    NIBBLE_RETURN_IF_ERROR(check(cudaEventRecord(end_, stream_), "recording"));
    NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "running a benchmark"));
    float ms = 0.0F;
    NIBBLE_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, begin_, end_), "timing"));
    return static_cast<double>(ms) * 1e3;
  }
  Status wait() { return check(cudaStreamSynchronize(stream_), "running a benchmark"); }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace nibble::cuda
