#include "backend/cuda/memory.h"

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

size_t free_device_memory() {
  size_t free = 0;
  size_t total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : 0;
}

Result<DeviceBuffer> allocate_device(size_t bytes, std::string_view what) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return make_error(StatusCode::kResourceExhausted,
                      "{} needs {} MiB of GPU memory, but {} MiB are free; give the KV cache less, "
                      "or end what else uses this GPU",
                      what, (bytes >> 20) + 1, free_device_memory() >> 20);
  }
  NIBBLE_RETURN_IF_ERROR(check(error, "allocating GPU memory"));
  return DeviceBuffer(data, bytes, [](void* memory) { cudaFree(memory); });
}

Result<DeviceBuffer> allocate_zeroed(size_t bytes, std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer buffer, allocate_device(bytes, what));
  NIBBLE_RETURN_IF_ERROR(fill_device(buffer.as<void>(), 0, bytes));
  return buffer;
}

Status fill_device(void* to, int byte, size_t bytes) {
  NIBBLE_RETURN_IF_ERROR(check(cudaMemset(to, byte, bytes), "filling GPU memory"));
  return check(cudaStreamSynchronize(cudaStreamLegacy), "filling GPU memory");
}

Status copy_to_device(void* to, const void* from, size_t bytes) {
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU"));
  return check(cudaStreamSynchronize(cudaStreamLegacy), "copying to the GPU");
}

Result<DeviceBuffer> allocate_pinned(size_t bytes) {
  void* data = nullptr;
  NIBBLE_RETURN_IF_ERROR(check(cudaMallocHost(&data, bytes), "allocating page-locked memory"));
  return DeviceBuffer(data, bytes, [](void* memory) { cudaFreeHost(memory); });
}

Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  NIBBLE_RETURN_IF_ERROR(
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event"));
  return Event(event);
}

}  // namespace nibble::cuda
