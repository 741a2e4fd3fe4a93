#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

Status check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) {
    return {};
  }
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
                                                             : StatusCode::kUnavailable;
  return make_error(code, "{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace nibble::cuda
