#include "backend/cuda/cuda_backend.h"
#include "base/log.h"

// The exported names of libnibble_cuda.so.

extern "C" {

extern const int nibble_cuda_interface;
const int nibble_cuda_interface = nibble::kCudaInterface;

void nibble_cuda_make_backend(const nibble::CudaBackendOptions& options,
                              nibble::Result<std::unique_ptr<nibble::Backend>>& result) {
  nibble::set_log_level(options.log_level);
  result = nibble::make_cuda_backend(options);
}

// For libnibble_cuda_bench.so, which times them.
const std::span<const nibble::cuda::GemmEntry>* nibble_cuda_gemm_entries() {
  static const std::span<const nibble::cuda::GemmEntry> entries = nibble::cuda::gemm_entries();
  return &entries;
}
// For the same: the cudaStream_t on which a backend of this library issues its work.
void* nibble_cuda_stream(const nibble::Backend& backend) { return nibble::stream_of(backend); }

}  // extern "C"
