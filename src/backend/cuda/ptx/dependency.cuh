#pragma once

namespace nibble::cuda::ptx {

/// Programmatic dependent launch (PTX ISA, griddepcontrol; no effect without it): waits until all
/// earlier kernels of the stream have ended and their writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start its prologue as soon as all blocks have said so or ended. What it
/// reads of ours still waits for our end.
__device__ __forceinline__ void allow_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace nibble::cuda::ptx
