#pragma once

#include <cstdint>

// Small stores to shared memory.
namespace nibble::cuda::ptx {

__device__ __forceinline__ void store_shared8(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}

}  // namespace nibble::cuda::ptx
