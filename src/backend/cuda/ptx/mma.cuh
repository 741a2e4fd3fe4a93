#pragma once

#include <cstdint>

// Matrix products of one warp (PTX ISA, mma.sync m16n8k16) and the loads that feed them. Fragments,
// of lane l with g = l / 4 and t = l % 4:
//   a[i]  row g + 8 (i & 1), columns 2 t + 8 (i >> 1) and the next
//   b[i]  rows 2 t + 8 i and the next, column g
//   d[i]  row g + 8 (i >> 1), column 2 t + (i & 1)
namespace nibble::cuda::ptx {

/// d [16, 8] f32 += a [16, 16] bf16 * b [16, 8] bf16.
__device__ __forceinline__ void warp_mma_bf16(float (&d)[4],
                                              const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// The same for fp16 operands, subnormal ones included.
__device__ __forceinline__ void warp_mma_f16(float (&d)[4],
                                             const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four 8x8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8
/// (16 bytes) of matrix l / 8. v[i] of the lane: row g, columns 2 t and 2 t + 1 of matrix i.
__device__ __forceinline__ void load_matrix4(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

/// Each matrix transposed: rows 2 t and 2 t + 1, column g.
__device__ __forceinline__ void load_matrix4_transposed(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

/// Transposes an 8x8 matrix of 16-bit elements that lies across the warp, row g in lanes 4 g to 4 g
/// + 3, two elements each.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t v) {
  uint32_t result = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(v));
  return result;
}

/// a in the low half, b in the high half; past the largest fp16, that.
__device__ __forceinline__ uint32_t pack_f16(float a, float b) {
  uint32_t packed = 0;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(b), "f"(a));
  return packed;
}

/// 2^x, relative error 2^-22, results below the smallest normal number are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two e4m3 (low byte first) as two fp16. From sm_89 on.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<uint16_t>(two)));
#endif
  return result;
}

/// Two floats as e4m3, a in the low byte, clipped to 448. From sm_89 on.
__device__ __forceinline__ uint32_t narrow_e4m3(float a, float b) {
  uint16_t result = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(b), "f"(a));
#endif
  return result;
}

/// Products of two fp16 numbers each.
__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t products = 0;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
  return products;
}

}  // namespace nibble::cuda::ptx
