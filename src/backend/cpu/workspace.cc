#include "backend/cpu/workspace.h"

#include <algorithm>

#include "base/math.h"

namespace nibble::cpu {
namespace {

/// Replaces a buffer that is too small; what it held is not kept.
Status grow(Buffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) >= bytes) {
    return {};
  }
  buffer = Buffer();
  NIBBLE_ASSIGN_OR_RETURN(buffer, Buffer::allocate(static_cast<size_t>(bytes)));
  return {};
}

}  // namespace

Status Workspace::reserve(int64_t rows, int64_t k) {
  const int64_t padded_rows = round_up(rows, kTileRows);  // activations may come in tiles
  const int64_t padded_k = round_up(k, 64 * kSlabPieces);
  NIBBLE_RETURN_IF_ERROR(grow(activations_, padded_rows * padded_k * 4));
  NIBBLE_RETURN_IF_ERROR(grow(scales_, padded_rows * 4));
  NIBBLE_RETURN_IF_ERROR(grow(sums_, padded_rows * 4));
  row_floats_ = std::max(row_floats_, padded_k);
  return grow(rows_, pool_.threads() * 2 * row_floats_ * 4);
}

Status Workspace::reserve_tiles() {
  constexpr int64_t kHugePage = int64_t{2} << 20;  // small pages would take up the TLB
  return grow(tiles_, round_up(pool_.threads() * kTileScratchBytes, kHugePage));
}

}  // namespace nibble::cpu
