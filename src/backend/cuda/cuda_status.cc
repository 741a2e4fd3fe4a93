#include "backend/cuda/cuda_status.h"

#include "base/check.h"

namespace nibble::cuda {

Status check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) {
    return {};
  }
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
                                                             : StatusCode::kUnavailable;
  return make_error(code, "{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

void must(const Status& status) { CHECK_MSG(status.ok(), "{}", status.message()); }
void must(cudaError_t error, std::string_view what) { must(check(error, what)); }

}  // namespace nibble::cuda
