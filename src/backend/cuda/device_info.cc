#include "backend/cuda/device_info.h"

#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

Status explain_no_gpu(cudaError_t error, int driver_version, int runtime_version) {
  if (driver_version == 0) {
    return make_error(
        StatusCode::kUnavailable,
        "no GPU can be used: there is no NVIDIA driver; install one for CUDA {} or later, or use "
        "--device cpu",
        version_text(runtime_version));
  }
  if (error == cudaErrorInsufficientDriver) {
    return make_error(StatusCode::kUnavailable,
                      "no GPU can be used: the NVIDIA driver is one for CUDA {}, but this build "
                      "needs {} or later; "
                      "update the driver, or use --device cpu",
                      version_text(driver_version), version_text(runtime_version));
  }
  if (error == cudaSuccess || error == cudaErrorNoDevice) {
    return make_error(StatusCode::kUnavailable,
                      "no GPU can be used: the NVIDIA driver shows none; see nvidia-smi, and "
                      "CUDA_VISIBLE_DEVICES, "
                      "which may hide it, or use --device cpu");
  }
  return make_error(StatusCode::kUnavailable,
                    "no GPU can be used: the NVIDIA driver (for CUDA {}) does not start: {} ({}); "
                    "see nvidia-smi, or "
                    "use --device cpu",
                    version_text(driver_version), cudaGetErrorString(error),
                    cudaGetErrorName(error));
}

Status check_capability(const DeviceInfo& device, cudaError_t probe) {
  if (device.major < 8) {
    return make_error(
        StatusCode::kUnsupported,
        "{} has compute capability {}.{}; kernels need 8.0 or later: use --device cpu", device.name,
        device.major, device.minor);
  }
  if (probe == cudaErrorNoKernelImageForDevice || probe == cudaErrorInvalidDeviceFunction) {
    return make_error(StatusCode::kUnsupported,
                      "{} has compute capability {}.{}, which this build has no code for; build it "
                      "with the preset cuda (8.x and 9.0), or use --device cpu",
                      device.name, device.major, device.minor);
  }
  return check(probe, "looking for kernels");
}

Result<DeviceInfo> query_device(int index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    int driver = 0;
    int runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess ||
        cudaRuntimeGetVersion(&runtime) != cudaSuccess) {
      cudaGetLastError();
    }
    return explain_no_gpu(error, driver, runtime);
  }
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
