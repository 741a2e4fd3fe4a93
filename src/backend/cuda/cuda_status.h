#pragma once

#include <string_view>

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace nibble::cuda {

/// Ok for cudaSuccess; otherwise kUnavailable (kResourceExhausted for missing memory) with CUDA's
/// name and text of the error and `what` was tried.
Status check(cudaError_t error, std::string_view what);

/// Throws InternalError with the message where a step cannot go on.
void must(const Status& status);
void must(cudaError_t error, std::string_view what);

}  // namespace nibble::cuda
