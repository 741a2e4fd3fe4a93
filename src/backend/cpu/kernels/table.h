#pragma once

// All kernels over one vector vocabulary; the last line of a source file for one ISA.

#include "backend/cpu/kernels/attention_kernels.h"
#include "backend/cpu/kernels/gemm_kernels.h"
#include "backend/cpu/kernels/row_kernels.h"

namespace nibble::cpu {
namespace {

constexpr KernelTable kernels_named(const char* name) {
  KernelTable table;
  table.name = name;
  table.int8_offset = Simd::kInt8Offset;
  table.gemm_f32 = gemm_float<CodecF32>;
  table.gemm_f16 = gemm_float<CodecF16>;
  table.gemm_bf16 = gemm_float<CodecBf16>;
  table.gemm_int8 = gemm_float<CodecInt8>;
  table.gemm_fp8 = gemm_float<CodecFp8>;
  table.gemm_int4 = gemm_float<CodecInt4>;
  table.gemm_int8_int8 = gemm_int<IntCodecInt8>;
  table.gemm_int4_int8 = gemm_int<IntCodecInt4>;
  table.gemm_int4_fixed = gemm_fixed;
  table.quantize_int8 = quantize_int8;
  table.quantize_fp8 = quantize_fp8;
  table.round_bf16 = round_bf16;
  table.round_fixed = round_fixed;
  table.rms_norm = rms_norm;
  table.round_row = round_row;
  table.silu_mul = silu_mul;
  table.load = load_row;
  table.store = store_row;
  table.rotate = rotate;
  table.write_kv = write_kv;
  table.attention_rows = 256;
  table.attention = attention;
  table.merge_attention = merge_attention;
  return table;
}

}  // namespace
}  // namespace nibble::cpu
