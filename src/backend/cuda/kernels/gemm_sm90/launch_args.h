#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/instance.h"

namespace nibble::cuda {

/// What a launch says of a kernel's parameters; n, blocks of K and rows, scales of weights and the
/// schedule are the kernel's to add.
inline GemmSm90Args launch_args(const GemmLaunch& args) {
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  return {.weights = static_cast<const uint8_t*>(args.packed),
          .x_scales = args.x_scales,
          .bias = args.bias,
          .y = args.y,
          .counters = reinterpret_cast<uint32_t*>(workspace),
          .parts = workspace + kGemmCounterBytes,
          .y_stride = args.y_stride,
          .m = static_cast<int>(args.m),
          .result = args.result};
}

}  // namespace nibble::cuda
