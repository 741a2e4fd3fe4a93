#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// Stores 4 bytes to shared memory.
__device__ __forceinline__ void store_shared4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace nibble::cuda::ptx
