// y [m, n] = x [m, k] bf16 · (w [n, k] int4)ᵀ with one scale for each channel, summed in f32 by the
// tensor cores and scaled once at the end: weights that were made for INT8 activations, with
// activations as they are.
//
// A byte alone in a BF16 is that integer times 2^-133: a code, or 16 codes, becomes a weight by one
// exact product and one exact offset. Eight weights take seven integer and four floating-point
// operations. They are 2^-40 times what they are, so that the factors fit; kScale puts sums right.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

namespace nibble::cuda {
namespace {

/// A unit is 64 rows x 64 of K, for each thread one word of 32 bits for each K step: nibble i is
/// the even element of operand register i, nibble 4 + i the odd one.
struct Int4ToBf16Codec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kUnitBytes = 2048;
  static constexpr int kBlockElements = 64;
  static constexpr float kScale = 0x1p40F;
  static constexpr bool kRowScales = true;

  using Fetched = uint4;
  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return ptx::load_shared16(unit + thread * 16);
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    constexpr uint32_t kLow = 0x6e006e00U, kHigh = 0x6c006c00U;  // 2^93, 2^89
    constexpr uint32_t kOffsets = 0xad00ad00U;                   // -8 * 2^-40
    const uint32_t words[4] = {fetched.x, fetched.y, fetched.z, fetched.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t low = words[step], high = low >> 8;
      a[step][0] = ptx::fma_bf16x2(low & 0x000f000fU, kLow, kOffsets);
      a[step][1] = ptx::fma_bf16x2(low & 0x00f000f0U, kHigh, kOffsets);
      a[step][2] = ptx::fma_bf16x2(high & 0x000f000fU, kLow, kOffsets);
      a[step][3] = ptx::fma_bf16x2(high & 0x00f000f0U, kHigh, kOffsets);
    }
  }
};

constexpr int kUnitWords = Int4ToBf16Codec::kUnitBytes / 4;

// One thread for each 32-bit word of the units.
__global__ void pack_int4(
    const uint8_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  for (int word = static_cast<int>(threadIdx.x); word < kUnitWords;
       word += static_cast<int>(blockDim.x)) {
    const int thread = word / 4, step = word % 4;
    uint32_t packed = 0;
    for (int i = 0; i < 4; ++i) {
      const int64_t row = unit / k_blocks * 64 + gemm_row(thread, i % 2);
      const int64_t column = unit % k_blocks * 64 + 16 * step + 2 * (thread & 3) + i / 2 * 8;
      const uint32_t two = row < n && column < k ? codes[(row * k + column) / 2] : 0x88U;
      packed |= (two & 15U) << (4 * i) | (two >> 4) << (4 * i + 16);
    }
    units[unit * kUnitWords + word] = packed;
  }
}

// One thread for each byte of the codes.
__global__ void unpack_int4(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint8_t* codes) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= n * (k / 2)) {
    return;
  }
  const int64_t row = index / (k / 2), column = index % (k / 2) * 2;
  const int within = static_cast<int>(column % 64);
  const int thread = gemm_thread(static_cast<int>(row % 64), 2 * within);
  const int i = static_cast<int>(row % 2) + within / 8 % 2 * 2;
  const int64_t unit = row / 64 * k_blocks + column / 64;
  const uint32_t two = units[unit * kUnitWords + thread * 4 + within / 16] >> (4 * i);
  codes[index] = static_cast<uint8_t>((two & 15U) | (two >> 16 & 15U) << 4);
}

struct Int4Packing {
  static constexpr auto kPack = pack_int4;
  static constexpr auto kUnpack = unpack_int4;
  using Codes = uint8_t;
  static constexpr int kDepth = 2, kXBytes = 2, kColumns = 2;
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
