#include "backend/cuda/kernels/w4ax/pack.cuh"

namespace nibble::cuda {

const W4AxPieces& w4ax_pieces_of(const WeightFormat& weight) {
  static constexpr W4AxPieces kBlock128 = w4ax_pieces<W4AxForm<1, false>>();
  static constexpr W4AxPieces kBlock64 = w4ax_pieces<W4AxForm<2, false>>();
  static constexpr W4AxPieces kBlock32 = w4ax_pieces<W4AxForm<4, false>>();
  static constexpr W4AxPieces kClass = w4ax_pieces<W4AxForm<4, true>>();
  switch (weight.grouped() ? weight.group_size : 0) {
    case 128:
      return kBlock128;
    case 64:
      return kBlock64;
    case 32:
      return kBlock32;
    default:
      return kClass;
  }
}

}  // namespace nibble::cuda
