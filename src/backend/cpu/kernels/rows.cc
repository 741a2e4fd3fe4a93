#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/kernels/block_rows.h"
#include "backend/cpu/kernels/row_kernels.h"
#include "backend/cpu/kernels/wide_rows.h"

namespace nibble::cpu::NIBBLE_ISA {

extern const RowKernels kRows;
constinit const RowKernels kRows = {
    .round_fixed = round_fixed,
    .quantize_int8 = quantize_int8,
    .quantize_blocks = quantize_blocks,
    .quantize_classes = quantize_classes,
    .quantize_wide_blocks = quantize_wide_blocks,
    .quantize_fp8 = quantize_fp8,
    .round_bf16 = round_bf16,
    .make_input = make_input,
    .rms_norm = rms_norm,
    .load = load_row,
    .store = store_row,
    .add_weighted = add_weighted,
    .rotate = rotate,
    .round_row = round_row,
    .write_kv = write_kv,
    .fit_int4 = fit_int4,
    .code_int4 = code_int4,
};

}  // namespace nibble::cpu::NIBBLE_ISA
