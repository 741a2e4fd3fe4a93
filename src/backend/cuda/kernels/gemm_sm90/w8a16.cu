// y [m, n] = x [m, k] bf16 · (w [n, k] int8)ᵀ with one scale for each channel, summed in f32 by the
// tensor cores and scaled once at the end: what an output head takes, and weights alone in INT8.
//
// A byte alone in a BF16 is that integer times 2^-133, also where its highest bit is the lowest of
// the exponent: a code, stored 128 larger, becomes a weight by one exact product and one exact
// offset. Two weights take a mask and a multiplication. They are 2^-40 times what they are, so
// that the factor fits; kScale puts sums right.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

namespace nibble::cuda {
namespace {

/// A unit is 64 rows x 64 of K. A 32-bit word is elements 2 (t % 4) and the next of 8, half a K
/// step: byte b is element b / 2 of the even channel (b even) or the odd one.
struct Int8ToBf16Codec : HalvesCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kBlockElements = 64;
  static constexpr float kScale = 0x1p40F;

  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    constexpr uint32_t kFactors = 0x6e006e00U;  // 2^93
    constexpr uint32_t kOffsets = 0xaf00af00U;  // -128 * 2^-40
    expand_words(fetched, a, [](uint32_t word, uint32_t* to) {
      to[0] = ptx::fma_bf16x2(word & 0x00ff00ffU, kFactors, kOffsets);
      to[1] = ptx::fma_bf16x2(__byte_perm(word, 0, 0x4341), kFactors, kOffsets);
    });
  }
};

constexpr int kUnitWords = Int8ToBf16Codec::kUnitBytes / 4;

// One thread for each 32-bit word of the units.
__global__ void pack_int8(
    const uint8_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < kUnitWords; i += static_cast<int>(blockDim.x)) {
    const int thread = (i >> 2) & 127;
    const int step = 2 * (i >> 9) + ((i & 3) >> 1);
    const int64_t column = unit % k_blocks * 64 + 16 * step + 8 * (i & 1) + 2 * (thread & 3);
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      const int64_t row = unit / k_blocks * 64 + gemm_row(thread, b & 1);
      const uint32_t code = row < n && column < k ? codes[row * k + column + b / 2] : 0U;
      word |= (code ^ 0x80U) << (8 * b);
    }
    units[unit * kUnitWords + i] = word;
  }
}

// One thread for each code.
__global__ void unpack_int8(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint8_t* codes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * k) {
    return;
  }
  const int row = static_cast<int>(i / k % 64), column = static_cast<int>(i % k % 64);
  const int64_t unit = i / k / 64 * k_blocks + i % k / 64;
  const int thread = gemm_thread(row, 2 * column);
  const int word = column / 32 * 512 + thread * 4 + column / 16 % 2 * 2 + column / 8 % 2;
  const auto* bytes = reinterpret_cast<const uint8_t*>(units);
  codes[i] =
      bytes[unit * Int8ToBf16Codec::kUnitBytes + 4 * word + 2 * (column % 2) + row % 2] ^ 0x80U;
}

struct Int8Packing {
  static constexpr auto kPack = pack_int8;
  static constexpr auto kUnpack = unpack_int8;
  using Codes = uint8_t;
  static constexpr int kDepth = 2, kXBytes = 2, kColumns = 1;
};

constexpr GemmSm90Tile kTiles[] = {gemm_tile<Int8ToBf16Codec, GemmTile<8, 1, 2, 6, 2>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<128, 2, 1, 6, 1>>(),
                                   gemm_tile<Int8ToBf16Codec, GemmTile<256, 1, 1, 4, 1, 2>>()};

constexpr GroupedSm90Tile kGroupedTiles[] = {
    grouped_tile<Int8ToBf16Codec, GroupedTile<8, 1, 2, 6, 2>>(),
    grouped_tile<Int8ToBf16Codec, GroupedTile<16, 1, 2, 5, 2>>(),
    grouped_tile<Int8ToBf16Codec, GroupedTile<32, 1, 2, 4, 2>>(),
    grouped_tile<Int8ToBf16Codec, GroupedTile<96, 2, 1, 7, 1>>(),
    grouped_tile<Int8ToBf16Codec, GroupedTile<128, 2, 1, 6, 1>>(),
    grouped_tile<Int8ToBf16Codec, GroupedTile<256, 1, 1, 4, 1, 2>>()};

constexpr GemmSm90Family kFamily{.name = "gemm_w8a16_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = Int8ToBf16Codec::kUnitBytes,
                                 .block_elements = Int8ToBf16Codec::kBlockElements,
                                 .depth = Int8Packing::kDepth,
                                 .pack = pack_units<Int8Packing>,
                                 .unpack = unpack_units<Int8Packing>,
                                 .grouped = kGroupedTiles};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return scaled_by_channel_and_token(problem, device, WeightCode::kInt8, ActFormat::kBf16);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmW8A16Sm90{
    .name = kFamily.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
