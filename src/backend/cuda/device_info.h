#pragma once

#include <cstddef>
#include <string>

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace nibble::cuda {

/// What kernels are chosen by.
struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int sms = 0;               // multiprocessors
  size_t shared_bytes = 0;   // largest dynamic shared memory of a block
  size_t l2_bytes = 0;
  size_t memory_bytes = 0;

  [[nodiscard]] bool hopper() const { return major == 9 && minor == 0; }
};

/// Asks the driver about GPU `index`. kUnavailable, with the remedy, without a GPU or driver;
/// kInvalidArgument when there are fewer GPUs.
Result<DeviceInfo> query_device(int index);

/// What it means that the runtime counts GPUs with `error`, or none: kUnavailable, saying whether
/// the driver is missing, too old or without a GPU. Versions as CUDA counts them: 13000 is 13.0,
/// and a driver's 0 that there is none.
[[nodiscard]] Status explain_no_gpu(cudaError_t error, int driver_version, int runtime_version);

/// kUnsupported, with the remedy, for a GPU that is older than our kernels, or that this build has
/// no code for according to `probe`, the result of probe_device_code().
[[nodiscard]] Status check_capability(const DeviceInfo& device, cudaError_t probe);
/// cudaErrorNoKernelImageForDevice when this build has no code for the current device.
cudaError_t probe_device_code();

}  // namespace nibble::cuda
