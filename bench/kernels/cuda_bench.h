#pragma once

#include "backend/open_backend.h"
#include "base/json.h"
#include "bench/kernels/kernel_bench.h"

namespace nibble {

/// Version of the interface between the program and libnibble_cuda_bench.so.
inline constexpr int kCudaBenchInterface = 2;
/// Its functions nibble_cuda_bench_read and nibble_cuda_bench_kernels; nibble_cuda_bench_interface
/// is the number above.
using CudaBenchRead = void(int device, Result<double>& gbps);
using CudaBenchKernels = void(int device, const KernelBenchOptions& options, Result<Json>& report);

/// The benchmarks of one GPU.
class CudaBench final {
 public:
  /// Opens libnibble_cuda_bench.so beside the libnibble_cuda.so of `options`, or beside the
  /// program's. kUnavailable, with the remedy, where it is not.
  static Result<CudaBench> open(const BackendOptions& options);

  /// GB/s at which the GPU reads its memory.
  [[nodiscard]] Result<double> read_gbps() const;
  /// {"ceilings", "kernels"} of its matrix products.
  [[nodiscard]] Result<Json> kernels(const KernelBenchOptions& options) const;

 private:
  CudaBench() = default;

  int device_ = 0;
  CudaBenchRead* read_ = nullptr;
  CudaBenchKernels* kernels_ = nullptr;
};

}  // namespace nibble
