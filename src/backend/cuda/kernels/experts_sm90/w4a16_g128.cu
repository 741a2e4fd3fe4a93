#include "backend/cuda/kernels/experts_sm90/tiles.cuh"

namespace nibble::cuda {

template std::span<const ExpertsSm90Tile> experts_sm90_tiles<Int4Codec<128>>();

}  // namespace nibble::cuda
