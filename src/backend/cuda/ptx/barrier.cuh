#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// Address of shared memory as PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Transaction barriers in shared memory (PTX ISA, mbarrier): a phase ends when `count` arrivals
// and all expected bytes have come. Phases alternate in parity, the first has parity 0.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// Makes initialised barriers visible to the copy engine and the other blocks of a cluster. A
/// __syncthreads (or cluster barrier) must follow.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

/// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

/// Arrivals that a warp_arrive() counts as.
#ifdef NIBBLE_RACECHECK
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif

/// What all lanes have done in shared memory before it happens before whatever waits for the phase.
/// The whole warp calls it.
///
/// One lane arrives for all: __syncwarp orders the others' accesses before its arrival, which
/// releases, at the scope of the block, also what it has observed to happen (PTX ISA, causality
/// order is transitive). racecheck follows only what a thread itself does at a barrier; for it
/// NIBBLE_RACECHECK makes every lane arrive, which orders the same accesses, one by one.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  if constexpr (kWarpArrivals == 32) {
    barrier_arrive(barrier);
  } else {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      barrier_arrive(barrier);
    }
  }
}

/// Waits until all have arrived who read a stage of a ring, before it is copied to again.
__device__ __forceinline__ void barrier_wait_to_refill(uint32_t barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
}

/// Synchronises `threads` threads (a multiple of 32) of the block on hardware barrier `index`, 1 to
/// 15 (__syncthreads uses 0).
__device__ __forceinline__ void group_sync(uint32_t index, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

/// Orders this thread's ordinary writes to shared memory before later reads of them by the copy
/// engine or the tensor cores. A barrier must follow.
__device__ __forceinline__ void fence_shared_to_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Gives the warpgroup's registers back, down to kCount per thread (24 to 256 in steps of 8). All
/// four warps must execute it.
template <int kCount>
__device__ __forceinline__ void registers_release() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

/// Waits for free registers and takes them, up to kCount per thread.
template <int kCount>
__device__ __forceinline__ void registers_take() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace nibble::cuda::ptx
