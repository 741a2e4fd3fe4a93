#pragma once

#include <cstdint>
#include <type_traits>

// Warpgroup matrix products of sm_90a (PTX ISA, wgmma): d [64, kTokens] += a [64, K] * b [K,
// kTokens], K = 32 bytes. b lies in shared memory, K-major: kTokens rows of K. Fragments, of the
// thread with lane l of warp w of the warpgroup:
//   a[i], four bytes of K   row 16 w + l / 4 + 8 (i & 1), bytes 4 (l % 4) + 16 (i >> 1) and on
//   d[i]                    row 16 w + l / 4 + 8 ((i >> 1) & 1), token 8 (i >> 2) + 2 (l % 4) + (i
//   & 1)
namespace nibble::cuda::ptx {

enum class MmaType : uint8_t { kBf16, kE4M3, kInt8 };

template <MmaType kType>
using MmaSum = std::conditional_t<kType == MmaType::kInt8, int32_t, float>;

/// Orders this warpgroup's register writes before the products that follow. All calls here are made
/// by all four warps together.
__device__ __forceinline__ void mma_fence() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Ends a group of products.
__device__ __forceinline__ void mma_commit() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until at most kPending groups are under way; then the registers of the others are free.
template <int kPending>
__device__ __forceinline__ void mma_wait() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/// Keeps the compiler from moving the computation of these registers past this point, in between
/// products that read them.
template <typename T, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

/// Low word of the descriptor of a matrix of 128-byte rows, its base a multiple of 1024. The next
/// 32 bytes of K: + 2; a further 1024 bytes: + 64.
__device__ __forceinline__ uint32_t descriptor_address(uint32_t address) {
  return (address & 0x3ffffU) >> 4 | 1U << 16;
}
/// The descriptor, for the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
__device__ __forceinline__ uint64_t with_swizzle(uint32_t descriptor_address) {
  return static_cast<uint64_t>(64U | 1U << 30) << 32 | descriptor_address;
}
/// Both at once.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
  return with_swizzle(descriptor_address(address));
}

// Operand lists of the instruction, for 4 to 128 sums per thread.
// clang-format off

#define NIBBLE_D4 "%0,%1,%2,%3"
#define NIBBLE_D8 \
  NIBBLE_D4 "," \
  "%4,%5,%6,%7"
#define NIBBLE_D16 \
  NIBBLE_D8 "," \
  "%8,%9,%10,%11,%12,%13,%14,%15"
#define NIBBLE_D32 \
  NIBBLE_D16 "," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NIBBLE_D48 \
  NIBBLE_D32 "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NIBBLE_D64 \
  NIBBLE_D48 "," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NIBBLE_D80 \
  NIBBLE_D64 "," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NIBBLE_D96 \
  NIBBLE_D80 "," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NIBBLE_D112 \
  NIBBLE_D96 "," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NIBBLE_D128 \
  NIBBLE_D112 "," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define NIBBLE_A4 "{%4,%5,%6,%7},%8"
#define NIBBLE_A8 "{%8,%9,%10,%11},%12"
#define NIBBLE_A16 "{%16,%17,%18,%19},%20"
#define NIBBLE_A32 "{%32,%33,%34,%35},%36"
#define NIBBLE_A48 "{%48,%49,%50,%51},%52"
#define NIBBLE_A64 "{%64,%65,%66,%67},%68"
#define NIBBLE_A80 "{%80,%81,%82,%83},%84"
#define NIBBLE_A96 "{%96,%97,%98,%99},%100"
#define NIBBLE_A112 "{%112,%113,%114,%115},%116"
#define NIBBLE_A128 "{%128,%129,%130,%131},%132"
#define NIBBLE_S4 "%4,%5"
#define NIBBLE_S8 "%8,%9"
#define NIBBLE_S16 "%16,%17"
#define NIBBLE_S32 "%32,%33"
#define NIBBLE_S48 "%48,%49"
#define NIBBLE_S64 "%64,%65"
#define NIBBLE_S80 "%80,%81"
#define NIBBLE_S96 "%96,%97"
#define NIBBLE_S112 "%112,%113"
#define NIBBLE_S128 "%128,%129"
#define NIBBLE_O4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define NIBBLE_O8(c, i) NIBBLE_O4(c, i), NIBBLE_O4(c, i + 4)
#define NIBBLE_O16(c, i) NIBBLE_O8(c, i), NIBBLE_O8(c, i + 8)
#define NIBBLE_O32(c, i) NIBBLE_O16(c, i), NIBBLE_O16(c, i + 16)
#define NIBBLE_O48(c, i) NIBBLE_O32(c, i), NIBBLE_O16(c, i + 32)
#define NIBBLE_O64(c, i) NIBBLE_O32(c, i), NIBBLE_O32(c, i + 32)
#define NIBBLE_O80(c, i) NIBBLE_O64(c, i), NIBBLE_O16(c, i + 64)
#define NIBBLE_O96(c, i) NIBBLE_O64(c, i), NIBBLE_O32(c, i + 64)
#define NIBBLE_O112(c, i) NIBBLE_O64(c, i), NIBBLE_O48(c, i + 64)
#define NIBBLE_O128(c, i) NIBBLE_O64(c, i), NIBBLE_O64(c, i + 64)

#define NIBBLE_MMA(sums, tokens, suffix, constraint, operands, tail, ...)                        \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #tokens suffix                      \
               " {" NIBBLE_D##sums "}," operands tail                                           \
               : NIBBLE_O##sums(constraint, 0) : __VA_ARGS__)
#define NIBBLE_MMA_TYPES(sums, tokens, operands, plain, across, ...)                             \
  if constexpr (kTokens == tokens) {                                                             \
    if constexpr (kType == MmaType::kInt8) {                                                     \
      NIBBLE_MMA(sums, tokens, "k32.s32.s8.s8", "+r", operands, ",p;\n}", __VA_ARGS__);          \
    } else if constexpr (kType == MmaType::kE4M3) {                                              \
      NIBBLE_MMA(sums, tokens, "k32.f32.e4m3.e4m3", "+f", operands, ",p,1,1;\n}", __VA_ARGS__);  \
    } else if constexpr (kTokensMajor) {                                                         \
      NIBBLE_MMA(sums, tokens, "k16.f32.bf16.bf16", "+f", operands, across, __VA_ARGS__);        \
    } else {                                                                                     \
      NIBBLE_MMA(sums, tokens, "k16.f32.bf16.bf16", "+f", operands, plain, __VA_ARGS__);         \
    }                                                                                            \
  }
#define NIBBLE_MMA_SIZES(letter, plain, across, ...) \
  NIBBLE_MMA_TYPES(4, 8, NIBBLE_##letter##4, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(8, 16, NIBBLE_##letter##8, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(16, 32, NIBBLE_##letter##16, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(32, 64, NIBBLE_##letter##32, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(48, 96, NIBBLE_##letter##48, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(64, 128, NIBBLE_##letter##64, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(80, 160, NIBBLE_##letter##80, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(96, 192, NIBBLE_##letter##96, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(112, 224, NIBBLE_##letter##112, plain, across, __VA_ARGS__) \
  NIBBLE_MMA_TYPES(128, 256, NIBBLE_##letter##128, plain, across, __VA_ARGS__)
// clang-format on

template <int kTokens>
inline constexpr bool kMmaTokens =
    kTokens == 8 || kTokens == 16 || kTokens == 32 || kTokens == 64 || kTokens == 96 ||
    kTokens == 128 || kTokens == 160 || kTokens == 192 || kTokens == 224 || kTokens == 256;

/// a from registers. kTokensMajor (bf16 only): b lies with its tokens contiguous.
template <MmaType kType, int kTokens, bool kTokensMajor = false>
__device__ __forceinline__ void mma_registers(MmaSum<kType> (&d)[kTokens / 2],
                                              const uint32_t (&a)[4],
                                              uint64_t b) {
  static_assert(kMmaTokens<kTokens>);
#if __CUDA_ARCH_FEAT_SM90_ALL
  NIBBLE_MMA_SIZES(A, ",p,1,1,0;\n}", ",p,1,1,1;\n}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "l"(b))
#endif
}

/// a from shared memory, K-major like b.
template <MmaType kType, int kTokens, bool kTokensMajor = false>
__device__ __forceinline__ void mma_shared(MmaSum<kType> (&d)[kTokens / 2],
                                           uint64_t a,
                                           uint64_t b) {
  static_assert(kMmaTokens<kTokens>);
#if __CUDA_ARCH_FEAT_SM90_ALL
  NIBBLE_MMA_SIZES(S, ",p,1,1,0,0;\n}", ",p,1,1,0,1;\n}", "l"(a), "l"(b))
#endif
}

}  // namespace nibble::cuda::ptx
