#include "backend/cpu/amx/tiles.h"
#include "bench/ceilings/ceiling_loops.h"

namespace nibble::cpu {

namespace {

/// Scrambled bytes: what the multipliers draw depends on their data. With `high`, the upper byte
/// of each 16 bits becomes a sign with this exponent of BF16.
void fill(uint8_t* factors, int high) {
  uint32_t state = 12345;
  for (int i = 0; i < 4 * kTileBytes; ++i) {
    state = state * 1664525U + 1013904223U;
    const auto byte = static_cast<uint8_t>(state >> 24);
    factors[i] = high >= 0 && i % 2 == 1 ? static_cast<uint8_t>((byte & 0x80) | high) : byte;
  }
}

/// Sums in tiles 0 to 3, factors in tiles 4 to 7.
template <typename Products>
[[gnu::always_inline]] inline void tile_loop(int high, int64_t turns, const Products& products) {
  alignas(64) uint8_t factors[4 * kTileBytes];
  fill(factors, high);
  configure_tiles(16);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  load_tile<4>(factors);
  load_tile<5>(factors + kTileBytes);
  load_tile<6>(factors + 2 * kTileBytes);
  load_tile<7>(factors + 3 * kTileBytes);
  for (int64_t turn = 0; turn < turns; ++turn) {
    products();
  }
  release_tiles();
}

}  // namespace

void amx_int8_loop(int64_t turns) {
  tile_loop(-1, turns, [] {
    dot_u8s8<0, 4, 6>();
    dot_u8s8<1, 4, 7>();
    dot_u8s8<2, 5, 6>();
    dot_u8s8<3, 5, 7>();
  });
}

void amx_bf16_loop(int64_t turns) {
  tile_loop(0x3e, turns, [] {
    dot_bf16<0, 4, 6>();
    dot_bf16<1, 4, 7>();
    dot_bf16<2, 5, 6>();
    dot_bf16<3, 5, 7>();
  });
}

}  // namespace nibble::cpu
