// The tiles of gemm_w4a16_sm90 for groups of 128.

#include "backend/cuda/kernels/w4a16_sm90/tiles.cuh"

namespace nibble::cuda {

template std::span<const GemmSm90Tile> w4a16_tiles<128>();

}  // namespace nibble::cuda
