#include "bench/cuda/gemm_bench.h"
#include "bench/cuda/replay_bench.h"
#include "bench/kernels/cuda_bench.h"

// The exported names of libnibble_cuda_bench.so, and two of libnibble_cuda.so's.

extern "C" {

const std::span<const nibble::cuda::GemmEntry>* nibble_cuda_gemm_entries();
void* nibble_cuda_stream(const nibble::Backend& backend);

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

void nibble_cuda_bench_replay(int device,
                              const nibble::CudaReplayWork& work,
                              nibble::Result<nibble::CudaReplays>& replays) {
  auto* stream = static_cast<cudaStream_t>(nibble_cuda_stream(*work.backend));
  replays = nibble::cuda::time_replays(device, work, stream);
}

}  // extern "C"
