#pragma once

#include <memory>

#include "backend/open_backend.h"

namespace nibble {

/// The backend of one NVIDIA GPU. kUnavailable, with the remedy, without GPU, driver or a library
/// that is needed; kUnsupported for GPUs that there are no kernels for.
Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaBackendOptions& options);

}  // namespace nibble
