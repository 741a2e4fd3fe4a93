#pragma once

namespace nibble::cuda {

/// a / b, rounded correctly but at the ends of the range; `inverse` is 1 / b, or nearly.
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
  const float near = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-near, b, a), inverse, near);
}

}  // namespace nibble::cuda
