#pragma once

// The vocabulary of AVX-512 and AMX tiles for processors that have AVX2 only.
#include "backend/testing/avx512_portable.h"
// Its intrinsics are what the rest is written in.
#define NIBBLE_EMULATED_TILES
#include "backend/cpu/simd/simd_avx512.h"
