#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/log.h"
#include "base/mapped_bytes.h"

namespace nibble {

struct CudaBackendOptions {
  int device = 0;
  bool record_steps = true;          // decode steps as CUDA graphs
  bool branch_steps = true;          // branches of steps on a second stream; results are the same
  std::vector<std::string> kernels;  // as those of CpuBackendOptions
  // The program's own: the library has a copy of that code, which knows none of the mapped files.
  CopyBytes* copy = copy_bytes;
  LogLevel log_level = LogLevel::kInfo;  // of the library's own log; open_backend() sets it
};

/// Which device computes, and how.
struct BackendOptions {
  std::string device = "auto";  // auto, cpu, cuda or cuda:N
  CpuBackendOptions cpu;
  CudaBackendOptions cuda;           // its device is what `device` says
  std::vector<std::string> kernels;  // of whichever device computes
  std::string cuda_library;  // path of libnibble_cuda.so; "": beside the program, or in ../lib
};

/// Opens the device that `options` name. "auto" is the first GPU where libnibble_cuda.so is
/// installed and can use one, else the CPU; the log says which and why. A device that was named is
/// never replaced by another: kUnavailable or kUnsupported with the reason and the remedy.
Result<std::unique_ptr<Backend>> open_backend(const BackendOptions& options);

/// Path of libnibble_cuda.so: `given`, unless that is empty; empty where it is not installed.
[[nodiscard]] std::string find_cuda_library(const std::string& given);
/// Number of the GPU that --device names; "auto" is the first. kInvalidArgument for other devices.
[[nodiscard]] Result<int> cuda_device(const std::string& device);

/// Version of the interface between the program and libnibble_cuda.so, which must be built from the
/// same sources. Raise it when Backend changes.
inline constexpr int kCudaInterface = 8;
/// The library's function nibble_cuda_make_backend; nibble_cuda_interface is the number above.
using MakeCudaBackend = void(const CudaBackendOptions& options,
                             Result<std::unique_ptr<Backend>>& result);

}  // namespace nibble
