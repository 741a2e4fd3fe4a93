#pragma once

#include <cstdint>

#include "backend/cuda/gemm_kernel.h"
#include "base/math.h"

// What the kernels of w4a16_sm90/decode.cuh and w4a16_sm90/planes.cuh share: products of
// few tokens, whose rows are dealt to the multiprocessors in slices of 16.
namespace nibble::cuda {

/// Bytes of a slice's weights and scales of 128 of K (Int4GroupLayout).
[[nodiscard]] constexpr int w4a16_slice_bytes(int group_size) {
  return group_size == 32 ? 1152 : 1056;
}

/// Parameters of the kernels.
template <typename Plan>
struct W4A16FewArgs {
  const uint8_t* weights = nullptr;  // Int4GroupLayout
  const void* x = nullptr;           // [m, k] bf16
  const float* bias = nullptr;
  void* y = nullptr;
  int64_t y_stride = 0;
  int m = 0, n = 0, k = 0;
  int pairs = 0;  // of 128 of K
  int packed_slices = 0;
  GemmResult result = GemmResult::kBf16;
  Plan plan;
};

template <typename Plan>
[[nodiscard]] W4A16FewArgs<Plan> w4a16_few_args(const GemmLaunch& args,
                                                int64_t n,
                                                int64_t k,
                                                const Plan& plan) {
  return {.weights = static_cast<const uint8_t*>(args.packed),
          .x = args.x,
          .bias = args.bias,
          .y = args.y,
          .y_stride = args.y_stride,
          .m = static_cast<int>(args.m),
          .n = static_cast<int>(n),
          .k = static_cast<int>(k),
          .pairs = static_cast<int>(ceil_div(k, 128)),
          .packed_slices = static_cast<int>(ceil_div(n, 64)) * 4,
          .result = args.result,
          .plan = plan};
}

}  // namespace nibble::cuda
