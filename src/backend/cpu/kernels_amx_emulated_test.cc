// The AMX kernels on emulated tiles.
#define NIBBLE_EMULATED_TILES
#include "backend/cpu/simd/simd_avx512.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"
// Tiles come on top of the vector kernels.
#include "backend/cpu/amx/amx_attention.h"
#include "backend/cpu/amx/amx_table.h"

namespace nibble::cpu {

extern const KernelTable kAmxEmulatedKernels;
const KernelTable kAmxEmulatedKernels = with_tile_attention(with_tiles(kernels_named("amx")));

}  // namespace nibble::cpu
