#pragma once

#include <cstdint>

#include <cuda.h>

namespace nibble::cuda::ptx {

// Blocks of a cluster (PTX ISA): they run at the same time and reach each other's shared memory.

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// All threads of all blocks of the cluster meet; what they wrote to shared memory is visible.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// The two halves of cluster_sync().
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// cluster_arrive() that makes nothing visible but barriers that barrier_init_fence() followed, and
/// so waits for no copies under way.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

/// What one thread initialised is there for the block's others, who wait, or in a cluster of
/// several blocks for all after their cluster_wait().
template <int kBlocks>
__device__ __forceinline__ void announce_barriers() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_arrive_relaxed();
  }
}

/// The address of the same place in the block `rank`, for load_cluster16 and store_async16.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t peer = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
#endif
  return peer;
}

/// 16 bytes of another block's shared memory.
__device__ __forceinline__ uint4 load_cluster16(uint32_t address) {
  uint4 value{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

/// Writes 16 bytes to another block's shared memory, in its own time; they count for that block's
/// `barrier`. Both addresses by peer_address().
__device__ __forceinline__ void store_async16(uint32_t address, uint4 value, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
#endif
}

/// The same for 4 bytes.
__device__ __forceinline__ void store_async4(uint32_t address, uint32_t value, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(value), "r"(barrier)
      : "memory");
#endif
}

/// Arrives at the barrier that has the address `barrier` in the block `rank`.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
#endif
}

/// warp_arrive() at the barriers that have the address `barrier` in the kBlocks blocks of a
/// cluster.
template <int kBlocks>
__device__ __forceinline__ void warp_arrive_at_all(uint32_t barrier) {
#pragma unroll
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    barrier_arrive_at(barrier, rank);
  }
}

/// tensor_copy() to the same place in all blocks whose bits are set in `blocks`; each one's barrier
/// counts the bytes.
__device__ __forceinline__ void tensor_copy_to_all(uint32_t destination,
                                                   const CUtensorMap& map,
                                                   int column,
                                                   int row,
                                                   uint32_t barrier,
                                                   uint16_t blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
#endif
}

/// The same for three coordinates.
__device__ __forceinline__ void tensor_copy_to_all(uint32_t destination,
                                                   const CUtensorMap& map,
                                                   int column,
                                                   int row,
                                                   int plane,
                                                   uint32_t barrier,
                                                   uint16_t blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "h"(blocks)
      : "memory");
#endif
}

}  // namespace nibble::cuda::ptx
