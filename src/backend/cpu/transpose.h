#pragma once

#include <array>
#include <cstdint>

#include "backend/cpu/kernel_table.h"

namespace nibble::cpu {

/// What becomes of the words (4 bytes) that stand at the same place of 16 rows.
enum class WordOrder : uint8_t {
  kWords,    // 16 words
  kHalves,   // 16 low halves, 16 high halves
  kBytes,    // 16 first bytes, 16 second, third and fourth ones
  kNibbles,  // 16 words with their nibbles shuffled to 0 4 1 5 2 6 3 7
  kEvenOdd,  // 16 words with their nibbles shuffled to 0 2 4 6 1 3 5 7
};

using TileRows = std::array<const uint8_t*, kTileRows>;

/// The rows of one tile.
struct RowsToTranspose {
  TileRows rows = {};  // null: a row of `fill`
  int64_t bytes = 0;   // of each row
  uint32_t last_word =
      ~0U;  // bits of a row's last word that count; the others become those of fill
  uint32_t fill = 0;
  uint32_t flip = 0;  // of nibbles: what every word's go through last, by exclusive or
};

/// out [words][16 words in `order`]; words past the end of the rows are `fill`. Written for any
/// CPU: memory, not arithmetic, bounds it.
void transpose_rows(const RowsToTranspose& rows, int64_t words, WordOrder order, uint8_t* out);

}  // namespace nibble::cpu
