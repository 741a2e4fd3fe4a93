// y [m, n] = x [m, k] int8 · (w [n, k] int4)ᵀ with one scale for each channel and each token,
// summed exactly in int32: results do not depend on m, tiles or the order of parts.
//
// A weight becomes an int8 operand in the high half of a byte, 16 times its value, in one operation
// for four of them (COMET, section 4: zero extension by position); the scale makes up for it, which
// is exact. |sum| <= 16 * 8 * 127 k fits an int32 for k up to 132104.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

namespace nibble::cuda {
namespace {

/// Byte b of a 32-bit word is element 4 (t % 4) + b of half a K step: the low nibble of the even
/// channel, the high one of the odd, in two's complement.
struct Int4Codec : HalvesCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kBlockElements = 128;
  static constexpr float kScale = 1.0F / 16.0F;

  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    expand_words(fetched, a, [](uint32_t word, uint32_t* to) {
      to[0] = (word << 4) & 0xf0f0f0f0U;
      to[1] = word & 0xf0f0f0f0U;
    });
  }
};

// One thread for each 32-bit word of the units.
__global__ void pack_int4(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  const int row0 = static_cast<int>(unit / k_blocks) * 64;
  for (int i = static_cast<int>(threadIdx.x); i < Int4Codec::kUnitBytes / 4;
       i += static_cast<int>(blockDim.x)) {
    const int thread = (i >> 2) & 127;
    const int step = 2 * (i >> 9) + ((i & 3) >> 1);
    const int64_t column = unit % k_blocks * 128 + 32 * step + 16 * (i & 1) + 4 * (thread & 3);
    uint32_t word = 0;
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t row = row0 + gemm_row(thread, odd);
      if (row >= n || column >= k) {
        continue;
      }
      const uint32_t four = codes[row * (k / 8) + column / 8] >> (4 * (column % 8));
      for (int b = 0; b < 4; ++b) {
        word |= (((four >> (4 * b)) & 15U) ^ 8U) << (8 * b + 4 * odd);
      }
    }
    units[unit * (Int4Codec::kUnitBytes / 4) + i] = word;
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
  const int64_t unit = row / 64 * k_blocks + column / 128;
  uint32_t word = 0;
  for (int j = 0; j < 8; j += 4) {
    const int within = static_cast<int>(column % 128) + j;
    const int step = within / 32;
    const int thread = gemm_thread(static_cast<int>(row % 64), within);
    const uint32_t four = units[unit * (Int4Codec::kUnitBytes / 4) + step / 2 * 512 + thread * 4 +
                                step % 2 * 2 + within / 16 % 2];
    for (int b = 0; b < 4; ++b) {
      word |= (((four >> (8 * b + 4 * (row % 2))) & 15U) ^ 8U) << (4 * (j + b));
    }
  }
  codes[i] = word;
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
