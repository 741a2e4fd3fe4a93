// y [m, n] (+)= x [m, k] bf16 · (codes [n, k] int4 * scales [n, k / 32])ᵀ (+ bias) for up to 16
// tokens; the loop is gemm_w4a16_decode_sm90.cuh.

#include "backend/cuda/kernels/gemm_w4a16_decode_sm90.cuh"

namespace nibble::cuda {

template <>
W4A16DecodeKernel w4a16_decode_kernel<32>(int tokens, int warps) {
  if (tokens <= 8) {
    return gemm_w4a16_decode_sm90<32, 8, 16>;
  }
  return warps == 14 ? gemm_w4a16_decode_sm90<32, 16, 14> : gemm_w4a16_decode_sm90<32, 16, 16>;
}

}  // namespace nibble::cuda
