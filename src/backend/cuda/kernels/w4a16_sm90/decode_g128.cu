// y [m, n] (+)= x [m, k] bf16 · (codes [n, k] int4 * scales [n, k / 128])ᵀ (+ bias) for up to 16
// tokens; the loop is w4a16_sm90/decode.cuh.

#include "backend/cuda/kernels/w4a16_sm90/decode.cuh"

namespace nibble::cuda {

template <>
W4A16DecodeKernel w4a16_decode_kernel<128>(int tokens) {
  return tokens <= 8 ? gemm_w4a16_decode_sm90<128, 8> : gemm_w4a16_decode_sm90<128, 16>;
}

}  // namespace nibble::cuda
