#pragma once

#include <cstdint>

#include <cuda.h>

namespace nibble::cuda::ptx {

/// How long the L2 cache should keep what a copy reads (the descriptors that createpolicy returns
/// for a fraction of 1).
enum class CacheHint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000
};

/// Copies `bytes` contiguous bytes from global to shared memory; addresses and size are multiples
/// of 16. Completes on `barrier`, which must expect the bytes. Called by one thread.
__device__ __forceinline__ void bulk_copy(uint32_t destination,
                                          const void* source,
                                          uint32_t bytes,
                                          uint32_t barrier,
                                          CacheHint hint = CacheHint::kNormal) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(static_cast<uint64_t>(hint))
      : "memory");
#endif
}

/// Copies one box of a two-dimensional tensor whose corner is (column, row) to shared memory; what
/// lies outside of the tensor arrives as zeros and counts as bytes. `map` is a __grid_constant__
/// parameter of the kernel. Called by one thread.
__device__ __forceinline__ void tensor_copy(
    uint32_t destination, const CUtensorMap& map, int column, int row, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
#endif
}

/// The same for three coordinates.
__device__ __forceinline__ void tensor_copy(uint32_t destination,
                                            const CUtensorMap& map,
                                            int column,
                                            int row,
                                            int plane,
                                            uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

/// Copies 16 bytes of which the first `valid` (0 to 16) come from global memory and the rest are
/// zero. Ends with copy_commit and copy_wait.
__device__ __forceinline__ void copy_async16(uint32_t destination,
                                             const void* source,
                                             uint32_t valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid)
               : "memory");
}

/// The same of 4 bytes, all (valid = 4) or none.
__device__ __forceinline__ void copy_async4(uint32_t destination,
                                            const void* source,
                                            uint32_t valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Arrives at the barrier, as one of the arrivals it counts, when this thread's copies so far have
/// come (PTX ISA, cp.async.mbarrier.arrive).
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace nibble::cuda::ptx
