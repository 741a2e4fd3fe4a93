#pragma once

#include "backend/cuda/ptx/copy.cuh"

namespace nibble::cuda::ptx {

/// tensor_copy() of three coordinates that says how long the L2 cache should keep what it reads.
__device__ __forceinline__ void tensor_copy(uint32_t destination,
                                            const CUtensorMap& map,
                                            int column,
                                            int row,
                                            int plane,
                                            uint32_t barrier,
                                            CacheHint hint) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "l"(static_cast<uint64_t>(hint))
      : "memory");
#endif
}

}  // namespace nibble::cuda::ptx
