#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble {

/// The families of products that models are tested with: all, or, in brief tests, those whose
/// kernels are ours, since initcheck does not see what cuBLASLt stores.
inline std::span<const cuda::GemmEntry> tested_families() {
  static const std::vector<cuda::GemmEntry> own = [] {
    std::vector<cuda::GemmEntry> entries;
    std::ranges::copy_if(
        cuda::gemm_entries(), std::back_inserter(entries),
        [](const cuda::GemmEntry& entry) { return entry.name != "gemm_bf16_cublaslt"; });
    return entries;
  }();
  return cuda::testing::brief_tests() ? own : cuda::gemm_entries();
}

}  // namespace nibble
