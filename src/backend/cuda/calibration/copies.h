#pragma once

#include <span>

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// In the order of a stream's work.
template <typename T>
void copy_in(DeviceBuffer& to, std::span<const T> from, cudaStream_t stream) {
  must(cudaMemcpyAsync(to.as<void>(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice,
                       stream),
       "copying to the GPU");
}

/// The same, and waits.
template <typename T>
void copy_out(std::span<T> to, const DeviceBuffer& from, cudaStream_t stream) {
  must(cudaMemcpyAsync(to.data(), from.as<void>(), to.size_bytes(), cudaMemcpyDeviceToHost, stream),
       "copying from the GPU");
  must(cudaStreamSynchronize(stream), "a calibration");
}

}  // namespace nibble::cuda
