#pragma once

// Tile instructions, or for tests what does the same without them.
#ifdef NIBBLE_EMULATED_TILES
#include "backend/cpu/amx/tiles_emulated.h"
#else
#include "backend/cpu/amx/tiles.h"
#endif
