// Whether this build has code for a GPU at all.

#include "backend/cuda/device_info.h"

namespace nibble::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

cudaError_t probe_device_code() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, probe_kernel);
}

}  // namespace nibble::cuda
