#pragma once

// The families that each instruction set has; backend/CMakeLists.txt compiles them.

#include "backend/cpu/kernel_table.h"

// Tiles, and attention in them: of AMX and its stand-in.
#define NIBBLE_FAMILIES(isa)                    \
  namespace nibble::cpu::isa {                  \
  extern const GemmKernels kGemm;               \
  extern const RowKernels kRows;                \
  extern const AttentionKernels kAttention;     \
  extern const TileKernels kTiles;              \
  extern const AttentionKernels kTileAttention; \
  }

NIBBLE_FAMILIES(scalar)
NIBBLE_FAMILIES(avx2)
NIBBLE_FAMILIES(avx2_vnni)
NIBBLE_FAMILIES(avx512_bw)
NIBBLE_FAMILIES(avx512)
NIBBLE_FAMILIES(amx)
NIBBLE_FAMILIES(portable)
