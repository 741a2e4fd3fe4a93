#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<2, false>;

constexpr W4AxTile kFew[] = {few_tile<Form, FewTile<16, 32, 4, 6, 1>>()};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 2, 2, 6, 1>>(),
                              wide_tile<Form, WideTile<64, 2, 2, 4, 1>>()};

}  // namespace

const W4AxTiles kW4AxBlock64{kFew, kWide};

}  // namespace nibble::cuda
