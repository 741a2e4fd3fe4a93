#pragma once

#include <cstddef>
#include <string>

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

}  // namespace nibble::cuda
