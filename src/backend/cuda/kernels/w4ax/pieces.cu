#include "backend/cuda/kernels/w4ax/pack.cuh"

namespace nibble::cuda {

const W4AxPieces& w4ax_pieces_of(const WeightFormat& weight) {
  static constexpr W4AxPieces kBlock128 = w4ax_pieces<W4AxForm<1>>();
  static constexpr W4AxPieces kBlock64 = w4ax_pieces<W4AxForm<2>>();
  static constexpr W4AxPieces kBlock32 = w4ax_pieces<W4AxForm<4>>();
  switch (weight.group_size) {
    case 128:
      return kBlock128;
    case 64:
      return kBlock64;
    default:
      return kBlock32;
  }
}

}  // namespace nibble::cuda
