#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/kernels/gemm_blocks.h"
#include "backend/cpu/kernels/gemm_expanded.h"
#include "backend/cpu/kernels/gemm_fixed.h"
#include "backend/cpu/kernels/gemm_levels.h"
#include "backend/cpu/kernels/gemm_wide.h"

namespace nibble::cpu::NIBBLE_ISA {

extern const GemmKernels kGemm;
constinit const GemmKernels kGemm = {
    .int8_offset = Simd::kInt8Offset,
    .gemm_f32 = gemm_float<CodecF32>,
    .gemm_f16 = gemm_float<CodecF16>,
    .gemm_bf16 = gemm_float<CodecBf16>,
    .gemm_int8 = gemm_expanded<CodecInt8>,
    .gemm_fp8 = gemm_expanded<CodecFp8>,
    .gemm_int4 = gemm_float<CodecInt4>,
    .gemm_fp4 = gemm_float<CodecFp4>,
    .gemm_int8_zeros = gemm_float<WithZeros<CodecInt8>>,
    .gemm_int4_zeros = gemm_float<WithZeros<CodecInt4>>,
    .gemm_int4_minimums = float_tiles<CodecInt4Minimums, Groups::kNone>,
    .gemm_int8_int8 = gemm_int<IntCodecInt8>,
    .gemm_int4_int8 = gemm_int<IntCodecInt4>,
    .gemm_levels_int8 = gemm_levels,
    .gemm_int4_fixed = gemm_fixed<Zeros::kNone>,
    .gemm_int4_fixed_zeros = gemm_fixed<Zeros::kEach>,
    .gemm_int4_fixed_minimums = gemm_fixed<Zeros::kMinimums>,
    .gemm_int4_blocks = gemm_blocks,
    .gemm_int4_wide = gemm_wide,
};

}  // namespace nibble::cpu::NIBBLE_ISA
