#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "base/status.h"
#include "bench/cuda/bench_data.h"
#include "core/device_buffer.h"

namespace nibble::cuda {

/// Memory on the current GPU, cleared.
class DeviceMemory final {
 public:
  DeviceMemory() = default;
  static Result<DeviceMemory> allocate(size_t bytes);
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

/// Work on the GPU that is recorded once and launched again and again.
class Recording final {
 public:
  Recording() = default;
  explicit Recording(cudaGraphExec_t graph) : graph_(graph) {}
  Recording(Recording&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Recording& operator=(Recording&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() {
    if (graph_ != nullptr) {
      cudaGraphExecDestroy(graph_);
    }
  }

  Status launch(cudaStream_t stream) const {
    return check(cudaGraphLaunch(graph_, stream), "launching a graph");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// A stream and two events. The GPU begins when it has all of what is timed: the start of a graph
/// takes the host up to 25 us, which a step hides behind the one before.
class Timer final {
 public:
  static Result<std::unique_ptr<Timer>> make();
  Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  /// Microseconds that the device takes for what work() issues.
  template <typename Work>
  Result<double> time(Work&& work) {
    volatile uint32_t* released = released_.as<uint32_t>();
    *released = 0;
    NIBBLE_RETURN_IF_ERROR(check(hold(released_.as<uint32_t>(), stream_), "holding a stream"));
    const Status issued = issue(work);
    *released = 1;
    NIBBLE_RETURN_IF_ERROR(issued);
    NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "running a benchmark"));
    float ms = 0.0F;
    NIBBLE_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, begin_, end_), "timing"));
    return static_cast<double>(ms) * 1e3;
  }
  Result<double> replay(const Recording& recording) {
    return time([&] { return recording.launch(stream_); });
  }
  /// What work() issues on the stream.
  template <typename Work>
  Result<Recording> record(Work&& work) {
    NIBBLE_RETURN_IF_ERROR(
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording"));
    const Status issued = work();
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    NIBBLE_RETURN_IF_ERROR(issued);
    NIBBLE_RETURN_IF_ERROR(check(ended, "recording"));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    NIBBLE_RETURN_IF_ERROR(check(made, "making a graph"));
    return Recording(executable);
  }
  Status wait() { return check(cudaStreamSynchronize(stream_), "running a benchmark"); }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  template <typename Work>
  Status issue(Work&& work) {
    NIBBLE_RETURN_IF_ERROR(check(cudaEventRecord(begin_, stream_), "recording"));
    NIBBLE_RETURN_IF_ERROR(work());
    return check(cudaEventRecord(end_, stream_), "recording");
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  DeviceBuffer released_;  // a word that the host writes and the device reads
};

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace nibble::cuda
