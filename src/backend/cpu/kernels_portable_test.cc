// The AVX-512 and the AMX kernels on processors that have AVX2 only.
#include "backend/testing/avx512_portable.h"
// Its intrinsics are what the rest is written in.
#define NIBBLE_EMULATED_TILES
#include "backend/cpu/simd/simd_avx512.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"
// Tiles come on top of the vector kernels.
#include "backend/cpu/amx/amx_attention.h"
#include "backend/cpu/amx/amx_table.h"

namespace nibble::cpu {

extern const KernelTable kAvx512PortableKernels;
const KernelTable kAvx512PortableKernels = kernels_named("avx512");

extern const KernelTable kAmxPortableKernels;
const KernelTable kAmxPortableKernels = with_tile_attention(with_tiles(kernels_named("amx")));

}  // namespace nibble::cpu
