#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// Arrives at the barrier, as one of the arrivals it counts, when this thread's copies
/// (copy_async16 of ptx/copy.cuh) so far have come (PTX ISA, cp.async.mbarrier.arrive).
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace nibble::cuda::ptx
