#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<1, false>;

constexpr W4AxTile kFew[] = {few_tile<Form, FewTile<8, 64, 4, 9, 1>>(),
                             few_tile<Form, FewTile<16, 64, 4, 6, 1>>()};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 2, 4, 4, 1>>(),
                              wide_tile<Form, WideTile<64, 2, 2, 5, 1>>(),
                              wide_tile<Form, WideTile<128, 2, 2, 4, 1>>()};

}  // namespace

const W4AxTiles kW4AxBlock128{kFew, kWide};

}  // namespace nibble::cuda
