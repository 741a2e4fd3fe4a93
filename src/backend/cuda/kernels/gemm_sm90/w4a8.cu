// y [m, n] = x [m, k] int8 · (w [n, k] int4)ᵀ with one scale for each channel and each token,
// summed exactly in int32: results do not depend on m, tiles or the order of parts.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/int4.cuh"

namespace nibble::cuda {
namespace {

// One thread for each 32-bit word of the units.
__global__ void pack_int4(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  const int64_t row0 = unit / k_blocks * 64, column0 = unit % k_blocks * 128;
  const Int4Codes from{codes, n, k};
  for (int i = static_cast<int>(threadIdx.x); i < Int4Codec::kUnitWords;
       i += static_cast<int>(blockDim.x)) {
    units[unit * Int4Codec::kUnitWords + i] = Int4Codec::word(
        i, [&](int row, int column) { return from.at<4>(row0 + row, column0 + column); });
  }
}

// One thread for each 32-bit word of the codes.
__global__ void unpack_int4(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint32_t* codes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * (k / 8)) {
    return;
  }
  const int64_t row = i / (k / 8);
  const int64_t column = i % (k / 8) * 8;
  const uint32_t* unit = units + (row / 64 * k_blocks + column / 128) * Int4Codec::kUnitWords;
  const auto four = [&](int64_t at) {
    return Int4Codec::four(unit, static_cast<int>(row % 64), static_cast<int>(at % 128));
  };
  codes[i] = four(column) | four(column + 4) << 16;
}

struct Int4Packing {
  static constexpr auto kPack = pack_int4;
  static constexpr auto kUnpack = unpack_int4;
  using Codes = uint32_t;
  static constexpr int kDepth = 2, kXBytes = 1, kColumns = 8;
};

// Six rings of 16 KiB of weights read fastest (read_ceiling.cu), and leave room for the next
// kernel's; from 64 tokens up, larger tiles save activations' way from the L2 cache.
constexpr GemmSm90Tile kTiles[] = {gemm_tile<Int4Codec, GemmTile<8, 1, 2, 6, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<128, 2, 1, 6, 1>>()};

constexpr GroupedSm90Tile kGroupedTiles[] = {
    grouped_tile<Int4Codec, GroupedTile<8, 1, 2, 6, 2>>(),
    grouped_tile<Int4Codec, GroupedTile<16, 1, 2, 5, 2>>(),
    grouped_tile<Int4Codec, GroupedTile<32, 1, 2, 4, 2>>(),
    grouped_tile<Int4Codec, GroupedTile<96, 2, 1, 7, 1>>(),
    grouped_tile<Int4Codec, GroupedTile<128, 2, 1, 6, 1>>(),
    grouped_tile<Int4Codec, GroupedTile<160, 1, 1, 5, 1, 2>>(),
    grouped_tile<Int4Codec, GroupedTile<256, 1, 1, 5, 1, 2>>()};

constexpr GemmSm90Family kFamily{.name = "gemm_w4a8_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = Int4Codec::kUnitBytes,
                                 .block_elements = Int4Codec::kBlockElements,
                                 .depth = Int4Packing::kDepth,
                                 .pack = pack_units<Int4Packing>,
                                 .unpack = unpack_units<Int4Packing>,
                                 .grouped = kGroupedTiles};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  // Blocks of 4 and 8 bits that share a scale, as they do with weights per channel, are INT8 here.
  return scaled_by_channel_and_token(problem, device, WeightCode::kInt4, ActFormat::kInt8Token) ||
         scaled_by_channel_and_token(problem, device, WeightCode::kInt4, ActFormat::kIntBlocks);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmW4A8Sm90{
    .name = kFamily.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
