#include "backend/cuda/kernels/w4ax/tiles.cuh"

namespace nibble::cuda {
namespace {

using Form = W4AxForm<1>;

constexpr W4AxTile kFew[] = {
    few_tile<Form, FewTile<8, 64, 4, 4, 2>>({.alone = 980, .shared = 1860}),
    few_tile<Form, FewTile<8, 64, 8, 4, 1>>({.alone = 1760}),
    few_tile<Form, FewTile<8, 32, 8, 7, 1>>({.alone = 990}),
    few_tile<Form, FewTile<8, 64, 4, 9, 1>>({.alone = 930}),
    few_tile<Form, FewTile<16, 64, 4, 6, 1>>({.alone = 1100}),
    few_tile<Form, FewTile<16, 64, 4, 3, 2>>({.alone = 1240, .shared = 1940}),
    few_tile<Form, FewTile<16, 32, 8, 5, 1>>({.alone = 1120}),
    few_tile<Form, FewTile<16, 64, 8, 3, 1>>({.alone = 1910}),
    few_tile<Form, FewTile<32, 32, 4, 6, 1>>({.alone = 930})};
constexpr W4AxTile kWide[] = {wide_tile<Form, WideTile<32, 1, 4, 6, 1>>({.alone = 1200}),
                              wide_tile<Form, WideTile<64, 1, 4, 4, 1>>({.alone = 1740}),
                              wide_tile<Form, WideTile<64, 2, 4, 3, 1>>({.alone = 2670}),
                              wide_tile<Form, WideTile<128, 2, 4, 2, 1>>({.alone = 4490}),
                              wide_tile<Form, WideTile<32, 2, 2, 4, 1, 2>>({.alone = 1540}),
                              wide_tile<Form, WideTile<64, 2, 4, 2, 1, 2>>({.alone = 4730})};

}  // namespace

const W4AxTiles kW4AxBlock128{kFew, kWide};

}  // namespace nibble::cuda
