#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// The warp counts as 32 of the `threads` that group_sync(index, threads) waits for, without
/// waiting itself; what it wrote before is visible to those that wait.
__device__ __forceinline__ void group_arrive(uint32_t index, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace nibble::cuda::ptx
