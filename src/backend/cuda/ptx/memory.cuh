#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

/// 4 bytes of shared memory.
__device__ __forceinline__ uint32_t load_shared4(uint32_t address) {
  uint32_t value = 0;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared16(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// 2 bytes of shared memory.
__device__ __forceinline__ uint16_t load_shared2(uint32_t address) {
  uint16_t value = 0;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

/// 8 bytes of shared memory.
__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared8(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void store_shared2(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

/// 16 bytes that nobody writes during the kernel, read once.
__device__ __forceinline__ uint4 load_stream16(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

/// Adds `value` with the effect of a release of this thread's earlier writes (and of those that a
/// barrier ordered before it) and an acquire of what earlier adders released; returns what was
/// there.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* pointer, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(pointer), "r"(value)
               : "memory");
  return before;
}

/// Adds `value` with the effect of a release, as above.
__device__ __forceinline__ void add_release(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

/// Reads with the effect of an acquire of what adders released.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* pointer) {
  uint32_t value = 0;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

/// Adds to two neighbouring floats, rounded to nearest, without waiting for what is there. Aligned
/// to 8 bytes. Subnormal sums become zeros.
__device__ __forceinline__ void add_pair(float* pointer, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(first),
               "f"(second)
               : "memory");
#endif
}

/// Stores four 8x8 matrices of 16-bit elements, each transposed: lane l gives the address of one
/// 16-byte row, registers hold mma fragments.
__device__ __forceinline__ void store_matrix4_transposed(uint32_t address, const uint32_t (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
#endif
}

/// a in the low half, b in the high half, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
  uint32_t packed = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(b), "f"(a));
  return packed;
}

/// Any function of three bits, applied to each bit position (PTX ISA, lop3).
template <int kTable>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return result;
}

/// x, which the compiler now has to keep in a register instead of computing it again in a loop.
__device__ __forceinline__ uint32_t keep(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

/// The low, or high, half of x in both: as an operand of instructions for two bf16 it costs
/// nothing.
__device__ __forceinline__ uint32_t low_twice(uint32_t x) {
  uint32_t result = 0;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
      : "=r"(result)
      : "r"(x));
  return result;
}
__device__ __forceinline__ uint32_t high_twice(uint32_t x) {
  uint32_t result = 0;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
      : "=r"(result)
      : "r"(x));
  return result;
}

/// a * b on two bf16 each.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#endif
  return result;
}

/// x * scale + offset on two bf16 each.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t x, uint32_t scale, uint32_t offset) {
  uint32_t result = 0;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(scale), "r"(offset));
  return result;
}

/// Each times a factor, in the register that it has: sums of products are bound to theirs.
template <int kCount>
__device__ __forceinline__ void multiply_in_place(float (&values)[kCount], float factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("mul.f32 %0, %0, %1;" : "+f"(values[i]) : "f"(factor));
  }
}

/// Asks for the 128 bytes of global memory that hold `address`, into the second cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace nibble::cuda::ptx
