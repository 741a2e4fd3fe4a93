// y [m, n] (+)= x [m, k] bf16 · (codes [n, k] int4 * scales [n, k / 32])ᵀ (+ bias) for one or two
// tokens; the loop is w4a16_sm90/planes.cuh.

#include "backend/cuda/kernels/w4a16_sm90/planes.cuh"

namespace nibble::cuda {

template <>
W4A16PlanesKernel w4a16_planes_kernel<32>(int tokens) {
  return tokens == 1 ? gemm_w4a16_planes_sm90<32, 1> : gemm_w4a16_planes_sm90<32, 2>;
}

}  // namespace nibble::cuda
