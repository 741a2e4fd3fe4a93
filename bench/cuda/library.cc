#include "bench/cuda/gemm_bench.h"
#include "bench/kernels/cuda_bench.h"

// The exported names of libnibble_cuda_bench.so, and one of libnibble_cuda.so's.

extern "C" {

const std::span<const nibble::cuda::GemmEntry>* nibble_cuda_gemm_entries();

extern const int nibble_cuda_bench_interface;
const int nibble_cuda_bench_interface = nibble::kCudaBenchInterface;

void nibble_cuda_bench_read(int device, nibble::Result<double>& gbps) {
  const auto info = nibble::cuda::query_device(device);
  gbps = info.ok() ? nibble::cuda::measure_read_tbps(*info) : info.status();
  if (gbps.ok()) {
    *gbps *= 1e3;
  }
}

void nibble_cuda_bench_kernels(int device,
                               const nibble::KernelBenchOptions& options,
                               nibble::Result<nibble::Json>& report) {
  report = nibble::cuda::bench_kernels(device, *nibble_cuda_gemm_entries(), options);
}

}  // extern "C"
