#include "backend/cuda/device_info.h"

#include <cuda_runtime_api.h>

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

Result<DeviceInfo> query_device(int index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice || count == 0) {
    cudaGetLastError();
    return make_error(StatusCode::kUnavailable,
                      "no usable NVIDIA GPU ({}); install a driver for CUDA 13 or use --device cpu",
                      cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
  }
  NIBBLE_RETURN_IF_ERROR(check(error, "counting GPUs"));
  if (index < 0 || index >= count) {
    return make_error(StatusCode::kInvalidArgument, "there is no GPU {}: this machine has {}",
                      index, count);
  }
  cudaDeviceProp properties{};
  NIBBLE_RETURN_IF_ERROR(
      check(cudaGetDeviceProperties(&properties, index), "asking for a GPU's properties"));
  return DeviceInfo{.index = index,
                    .name = properties.name,
                    .major = properties.major,
                    .minor = properties.minor,
                    .sms = properties.multiProcessorCount,
                    .shared_bytes = properties.sharedMemPerBlockOptin,
                    .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
                    .memory_bytes = properties.totalGlobalMem};
}

}  // namespace nibble::cuda
