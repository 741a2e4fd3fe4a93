#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/launch.h"

namespace nibble::cuda {

inline constexpr int32_t kMostFewRows = 4;       // of a product of few rows
inline constexpr int32_t kMostFewColumns = 512;  // of its matrices

/// y_h = x_h · w_hᵀ for each head h: up to kMostFewRows rows, summed in f32 in one order for any
/// number of them. In latent attention these are the products of a decode step, whose matrices are
/// read once: they are on their way before the kernel in front has ended.
///   w [heads, n, k] bf16, k a multiple of 8 up to kMostFewColumns
///   x, y [m, ...] bf16: a head's numbers x_head or y_head behind those of the head before, rows
///   x_stride or y_stride apart; x, x_stride and x_head multiples of 8 numbers
struct FewHeadsLaunch {
  const void* w = nullptr;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t x_stride = 0, x_head = 0;
  int64_t y_stride = 0, y_head = 0;
  int32_t heads = 0;
  int32_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
};

/// Whether the kernel takes such a product.
[[nodiscard]] bool are_few_heads(const FewHeadsLaunch& args);
/// cudaErrorInvalidValue for what are_few_heads() refuses.
cudaError_t multiply_few_heads(const FewHeadsLaunch& args, const LaunchContext& context);

}  // namespace nibble::cuda
