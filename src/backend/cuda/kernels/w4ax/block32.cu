#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<4>;

constexpr W4AxTile kFew[] = {few_tile<Form, FewTile<16, 32, 4, 5, 1>>({.alone = 1500})};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 1, 4, 5, 1>>({.alone = 2800}),
                              wide_tile<Form, WideTile<64, 2, 2, 4, 1>>({.alone = 3200}),
                              wide_tile<Form, WideTile<128, 2, 2, 3, 1>>({.alone = 5600})};

}  // namespace

const W4AxTiles kW4AxBlock32{kFew, kWide};

}  // namespace nibble::cuda
