#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<2>;

constexpr W4AxTile kFew[] = {few_tile<Form, FewTile<16, 32, 4, 6, 1>>({.alone = 1100})};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 1, 4, 5, 1>>({.alone = 1800}),
                              wide_tile<Form, WideTile<64, 2, 2, 4, 1>>({.alone = 2000}),
                              wide_tile<Form, WideTile<128, 2, 2, 4, 1>>({.alone = 3400})};

}  // namespace

const W4AxTiles kW4AxBlock64{kFew, kWide};

}  // namespace nibble::cuda
