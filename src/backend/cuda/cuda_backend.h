#pragma once

#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/open_backend.h"

namespace nibble {

/// The backend of one NVIDIA GPU. kUnavailable, with the remedy, without GPU, driver or a library
/// that is needed; kUnsupported for GPUs that there are no kernels for.
/// `entries` are the families of products to choose from; they must outlive the backend.
Result<std::unique_ptr<Backend>> make_cuda_backend(
    const CudaBackendOptions& options,
    std::span<const cuda::GemmEntry> entries = cuda::gemm_entries());

/// The stream on which a backend that make_cuda_backend() made issues its work: benchmarks record
/// it.
[[nodiscard]] cudaStream_t stream_of(const Backend& backend);

}  // namespace nibble
