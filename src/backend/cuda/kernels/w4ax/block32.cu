#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<4, false>;

constexpr W4AxTile kFew[] = {few_tile<Form, FewTile<16, 32, 4, 5, 1>>()};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 2, 2, 5, 1>>(),
                              wide_tile<Form, WideTile<64, 2, 2, 4, 1>>()};

}  // namespace

const W4AxTiles kW4AxBlock32{kFew, kWide};

}  // namespace nibble::cuda
