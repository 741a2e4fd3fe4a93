#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<4, true>;

constexpr W4AxTile kFew[] = {
    few_tile<Form, FewTile<8, 64, 4, 4, 2>>({.alone = 910, .shared = 1840}),
    few_tile<Form, FewTile<8, 32, 4, 12, 1>>({.alone = 480}),
    few_tile<Form, FewTile<16, 64, 4, 6, 1>>({.alone = 1080}),
    few_tile<Form, FewTile<16, 32, 4, 10, 1>>({.alone = 690})};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 1, 4, 6, 1>>({.alone = 910}),
                              wide_tile<Form, WideTile<32, 2, 4, 4, 1>>({.alone = 1310}),
                              wide_tile<Form, WideTile<64, 2, 2, 5, 1>>({.alone = 920}),
                              wide_tile<Form, WideTile<128, 2, 2, 4, 1>>({.alone = 1510})};

}  // namespace

const W4AxTiles kW4AxClass{kFew, kWide};

}  // namespace nibble::cuda
