#include "backend/open_backend.h"

#include <charconv>
#include <filesystem>
#include <system_error>
#include <utility>

#include <dlfcn.h>

#include "base/log.h"

namespace nibble {
namespace {

constexpr const char* kLibrary = "libnibble_cuda.so";
constexpr std::string_view kCudaPrefix = "cuda:";

Result<std::unique_ptr<Backend>> open_cuda(const std::string& path,
                                           const CudaBackendOptions& options) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: its code is in use
  if (library == nullptr) {
    return make_error(StatusCode::kUnavailable, "{}: {}; reinstall it, or use --device cpu", path,
                      dlerror());
  }
  const auto* interface = static_cast<const int*>(dlsym(library, "nibble_cuda_interface"));
  if (interface == nullptr || *interface != kCudaInterface) {
    return make_error(StatusCode::kUnsupported,
                      "{} belongs to another version of nibble; install both from one build", path);
  }
  auto* make = reinterpret_cast<MakeCudaBackend*>(dlsym(library, "nibble_cuda_make_backend"));
  if (make == nullptr) {
    return make_error(StatusCode::kUnsupported, "{} lacks nibble_cuda_make_backend", path);
  }
  Result<std::unique_ptr<Backend>> backend =
      make_error(StatusCode::kUnavailable, "{} made no backend", path);
  CudaBackendOptions own = options;
  own.log_level = log_level();
  make(own, backend);
  return backend;
}

}  // namespace

std::string find_cuda_library(const std::string& given) {
  if (!given.empty()) {
    return given;
  }
  std::error_code ignored;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  for (const char* place : {"", "../lib", "../lib/nibble"}) {
    const auto path = folder / place / kLibrary;
    if (std::filesystem::exists(path, ignored)) {
      return path;
    }
  }
  return {};
}

Result<int> cuda_device(const std::string& device) {
  if (device == "cuda" || device == "auto") {
    return 0;
  }
  int index = 0;
  const char* begin = device.data() + kCudaPrefix.size();
  const char* end = device.data() + device.size();
  const bool prefixed = device.starts_with(kCudaPrefix);
  if (!prefixed || begin == end || std::from_chars(begin, end, index).ptr != end || index < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "--device {}: choose auto, cpu, cuda or cuda:N with N from 0", device);
  }
  return index;
}

Result<std::unique_ptr<Backend>> open_backend(const BackendOptions& options) {
  CpuBackendOptions cpu = options.cpu;
  CudaBackendOptions cuda = options.cuda;
  cpu.kernels = options.kernels;
  cuda.kernels = options.kernels;
  if (options.device == "cpu") {
    return make_cpu_backend(cpu);
  }
  const std::string library = find_cuda_library(options.cuda_library);
  if (options.device == "auto") {
    if (library.empty()) {
      return make_cpu_backend(cpu);
    }
    auto backend = open_cuda(library, cuda);
    // A kernel that the GPU lacks is no reason to compute elsewhere.
    if (backend.ok() || backend.status().code() == StatusCode::kInvalidArgument) {
      return backend;
    }
    NIBBLE_LOG(kInfo, "computing on the CPU: {}", backend.status().message());
    return make_cpu_backend(cpu);
  }
  NIBBLE_ASSIGN_OR_RETURN(cuda.device, cuda_device(options.device));
  if (library.empty()) {
    return make_error(StatusCode::kUnavailable,
                      "--device {}: {} is neither beside the program nor in ../lib; build it with "
                      "the preset cuda, or use --device cpu",
                      options.device, kLibrary);
  }
  return open_cuda(library, cuda);
}

}  // namespace nibble
