#include "bench/kernels/cuda_bench.h"

#include <filesystem>
#include <string>
#include <system_error>

#include <dlfcn.h>

namespace nibble {

Result<CudaBench> CudaBench::open(const BackendOptions& options) {
  CudaBench bench;
  NIBBLE_ASSIGN_OR_RETURN(bench.device_, cuda_device(options.device));
  std::string path;
  for (const std::string& given : {options.cuda_library, std::string()}) {
    const std::filesystem::path backend = find_cuda_library(given);
    const std::filesystem::path beside = backend.parent_path() / "libnibble_cuda_bench.so";
    std::error_code ignored;
    if (path.empty() && !backend.empty() && std::filesystem::exists(beside, ignored)) {
      path = beside;
    }
  }
  if (path.empty()) {
    return make_error(
        StatusCode::kUnavailable,
        "libnibble_cuda_bench.so is not beside libnibble_cuda.so; build both with the "
        "preset cuda, or measure with cpu");
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: its code is in use
  if (library == nullptr) {
    return make_error(StatusCode::kUnavailable, "{}: {}; reinstall it", path, dlerror());
  }
  const auto* interface = static_cast<const int*>(dlsym(library, "nibble_cuda_bench_interface"));
  bench.read_ = reinterpret_cast<CudaBenchRead*>(dlsym(library, "nibble_cuda_bench_read"));
  bench.kernels_ = reinterpret_cast<CudaBenchKernels*>(dlsym(library, "nibble_cuda_bench_kernels"));
  bench.replay_ = reinterpret_cast<CudaBenchReplay*>(dlsym(library, "nibble_cuda_bench_replay"));
  if (interface == nullptr || *interface != kCudaBenchInterface || bench.read_ == nullptr ||
      bench.kernels_ == nullptr || bench.replay_ == nullptr) {
    return make_error(StatusCode::kUnsupported,
                      "{} belongs to another version of nibble; install both from one build", path);
  }
  return bench;
}

Result<double> CudaBench::read_gbps() const {
  Result<double> gbps = make_error(StatusCode::kUnavailable, "nothing was measured");
  read_(device_, gbps);
  return gbps;
}

Result<Json> CudaBench::kernels(const KernelBenchOptions& options) const {
  Result<Json> report = make_error(StatusCode::kUnavailable, "nothing was measured");
  kernels_(device_, options, report);
  return report;
}

Result<CudaReplays> CudaBench::replay(const CudaReplayWork& work) const {
  Result<CudaReplays> replays = make_error(StatusCode::kUnavailable, "nothing was measured");
  replay_(device_, work, replays);
  return replays;
}

}  // namespace nibble
