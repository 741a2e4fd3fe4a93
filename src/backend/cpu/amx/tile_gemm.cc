#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/amx/tile_gemm.h"

#include "backend/cpu/amx/amx_rows.h"

namespace nibble::cpu::NIBBLE_ISA {
extern const TileKernels kTiles;
constinit const TileKernels kTiles = {
    .tiles_bf16 = tile_gemm_float<DirectPanel>,
    .tiles_int8 = tile_gemm_float<CodecPairs<CodecInt8>>,
    .tiles_fp8 = tile_gemm_float<CodecPairs<CodecFp8>>,
    .tiles_int4 = tile_gemm_int4,
    .tiles_fp4 = tile_gemm_fp4,
    .tiles_int8_int8 = tile_gemm<DirectPanel, Int8Sums>,
    .tiles_int4_int8 = tile_gemm<Int4Bytes, Int4Sums>,
    .tiles_levels_int8 = tile_gemm<LevelsBytes, LevelsSums>,
    .tiles_int4_blocks = tile_gemm_blocks,
    .round_pieces = round_pieces,
    .fixed_pieces = fixed_pieces,
    .bf16_pieces = bf16_pieces,
};

}  // namespace nibble::cpu::NIBBLE_ISA
