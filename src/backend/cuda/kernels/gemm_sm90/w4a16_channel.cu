// y [m, n] = x [m, k] bf16 · (w [n, k] int4)ᵀ with one scale for each channel, summed in f32 by the
// tensor cores and scaled once at the end: weights that were made for INT8 activations, with
// activations as they are.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/int4.cuh"

namespace nibble::cuda {
namespace {

// One thread for each 32-bit word of the units.
__global__ void pack_int4(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  const int64_t row0 = unit / k_blocks * 64, column0 = unit % k_blocks * 64;
  const Int4Codes from{codes, n, k};
  for (int i = static_cast<int>(threadIdx.x); i < Int4ToBf16Codec::kUnitWords;
       i += static_cast<int>(blockDim.x)) {
    units[unit * Int4ToBf16Codec::kUnitWords + i] = Int4ToBf16Codec::word(
        i, [&](int row, int column) { return from.at<2>(row0 + row, column0 + column); });
  }
}

// One thread for each 32-bit word of the codes.
__global__ void unpack_int4(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint32_t* codes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * (k / 8)) {
    return;
  }
  const int64_t row = i / (k / 8), column = i % (k / 8) * 8;
  const uint32_t* unit = units + (row / 64 * k_blocks + column / 64) * Int4ToBf16Codec::kUnitWords;
  uint32_t word = 0;
  for (int j = 0; j < 8; j += 2) {
    word |=
        Int4ToBf16Codec::two(unit, static_cast<int>(row % 64), static_cast<int>(column % 64) + j)
        << (4 * j);
  }
  codes[i] = word;
}

struct Int4Packing {
  static constexpr auto kPack = pack_int4;
  static constexpr auto kUnpack = unpack_int4;
  using Codes = uint32_t;
  static constexpr int kDepth = 2, kXBytes = 2, kColumns = 8;
};

constexpr GemmSm90Tile kTiles[] = {gemm_tile<Int4ToBf16Codec, GemmTile<8, 1, 2, 6, 2>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<16, 1, 2, 6, 2>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<32, 1, 2, 5, 2>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<Int4ToBf16Codec, GemmTile<128, 2, 1, 6, 1>>()};

constexpr GroupedSm90Tile kGroupedTiles[] = {
    grouped_tile<Int4ToBf16Codec, GroupedTile<8, 1, 2, 6, 2>>(),
    grouped_tile<Int4ToBf16Codec, GroupedTile<16, 1, 2, 6, 2>>(),
    grouped_tile<Int4ToBf16Codec, GroupedTile<32, 1, 2, 5, 2>>(),
    grouped_tile<Int4ToBf16Codec, GroupedTile<96, 2, 1, 7, 1>>(),
    grouped_tile<Int4ToBf16Codec, GroupedTile<128, 2, 1, 6, 1>>(),
    grouped_tile<Int4ToBf16Codec, GroupedTile<256, 1, 1, 5, 1, 2>>()};

constexpr GemmSm90Family kFamily{.name = "gemm_w4a16_channel_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = Int4ToBf16Codec::kUnitBytes,
                                 .block_elements = Int4ToBf16Codec::kBlockElements,
                                 .depth = Int4Packing::kDepth,
                                 .pack = pack_units<Int4Packing>,
                                 .unpack = unpack_units<Int4Packing>,
                                 .grouped = kGroupedTiles};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return scaled_by_channel_and_token(problem, device, WeightCode::kInt4, ActFormat::kBf16);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmW4A16ChannelSm90{
    .name = kFamily.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
