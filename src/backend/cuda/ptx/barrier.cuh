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

/// `count` arrivals at once.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
#endif
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

/// Orders ordinary accesses to shared memory before later ones by the copy engine or the tensor
/// cores; where it is another thread that starts these, a barrier must follow.
__device__ __forceinline__ void fence_shared_to_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Arrivals that a warp_arrive() counts as.
constexpr uint32_t kWarpArrivals = 32;

/// What the lanes have done in shared memory before it happens before whatever waits for the phase.
/// Every lane arrives for itself: compute-sanitizer's racecheck does not see that __syncwarp and an
/// arrival of one lane order the same, and one lane's arrival is not faster.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) { barrier_arrive(barrier); }

/// Ordinary reads of shared memory that happen before it also happen before this thread's next bulk
/// copies, which write through another proxy.
__device__ __forceinline__ void fence_before_refill() { fence_shared_to_async(); }

/// Waits until all have arrived who read a stage of a ring, before it is copied to again.
__device__ __forceinline__ void barrier_wait_to_refill(uint32_t barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
  fence_before_refill();
}

/// Synchronises `threads` threads (a multiple of 32) of the block on hardware barrier `index`, 1 to
/// 15 (__syncthreads uses 0).
__device__ __forceinline__ void group_sync(uint32_t index, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

/// The warp counts as 32 of the `threads` that group_sync(index, threads) waits for, without
/// waiting itself; what it wrote before is visible to those that wait.
__device__ __forceinline__ void group_arrive(uint32_t index, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

/// Initialises the barriers of a ring: kStages that count one arrival, with bytes, when a stage is
/// full, then as many that its readers empty by `readers` arrivals. Called by one thread.
template <int kStages>
__device__ __forceinline__ void init_ring(uint32_t barriers, uint32_t readers) {
  for (int s = 0; s < kStages; ++s) {
    barrier_init(barriers + 8 * s, 1);
    barrier_init(barriers + 8 * (kStages + s), readers);
  }
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
