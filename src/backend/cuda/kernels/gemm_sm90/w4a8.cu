// y [m, n] = x [m, k] int8 · (w [n, k] int4)ᵀ with one scale for each channel and each token,
// summed exactly in int32: results do not depend on m, tiles or the order of parts.
//
// A weight becomes an int8 operand in the high half of a byte, 16 times its value, in one operation
// for four of them (COMET, section 4: zero extension by position); the scale makes up for it, which
// is exact. |sum| <= 16 * 8 * 127 k fits an int32 for k up to 132104.

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

namespace nibble::cuda {
namespace {

/// A unit holds for each thread t two 16-byte words, K steps 0 and 1 at 16 t and 2 and 3 at
/// 2048 + 16 t. Each 32-bit word is half a K step, byte b its element 4 (t % 4) + b: the low nibble
/// of the even channel, the high one of the odd, in two's complement.
struct Int4Codec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kUnitBytes = 4096;
  static constexpr int kBlockElements = 128;
  static constexpr float kScale = 1.0F / 16.0F;

  struct Fetched {
    uint4 halves[2];
  };
  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return {
        {ptx::load_shared16(unit + thread * 16), ptx::load_shared16(unit + 2048 + thread * 16)}};
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = fetched.halves[half];
      const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        a[2 * half + w / 2][2 * (w % 2)] = (words[w] << 4) & 0xf0f0f0f0U;
        a[2 * half + w / 2][2 * (w % 2) + 1] = words[w] & 0xf0f0f0f0U;
      }
    }
  }
};

constexpr int kDepth = 2;

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

cudaError_t pack(const void* codes, int64_t n, int64_t k, void* units, cudaStream_t stream) {
  const GemmUnits count = gemm_units(n, k, kDepth);
  return launch(pack_int4, {.blocks = dim3(count.units()), .threads = 256},
                {.stream = stream, .overlap = false}, static_cast<const uint32_t*>(codes), n, k,
                count.k_blocks, static_cast<uint32_t*>(units));
}

cudaError_t unpack(const void* units, int64_t n, int64_t k, void* codes, cudaStream_t stream) {
  return launch(unpack_int4,
                {.blocks = dim3(static_cast<unsigned>((n * (k / 8) + 255) / 256)), .threads = 256},
                {.stream = stream, .overlap = false}, static_cast<const uint32_t*>(units), n, k,
                gemm_units(n, k, kDepth).k_blocks, static_cast<uint32_t*>(codes));
}

// Six rings of 16 KiB of weights read fastest (read_ceiling.cu), and leave room for the next
// kernel's; from 64 tokens up, larger tiles save activations' way from the L2 cache.
constexpr GemmSm90Tile kTiles[] = {gemm_tile<Int4Codec, GemmTile<8, 1, 2, 6, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<Int4Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<Int4Codec, GemmTile<128, 2, 1, 6, 1>>()};

constexpr GemmSm90Family kFamily{.name = "gemm_w4a8_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = Int4Codec::kUnitBytes,
                                 .block_elements = Int4Codec::kBlockElements,
                                 .depth = kDepth,
                                 .pack = pack,
                                 .unpack = unpack};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return scaled_by_channel_and_token(problem, device, WeightCode::kInt4, ActFormat::kInt8Token);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmW4A8Sm90{.name = kFamily.name, .accepts = accepts, .make = make};

}  // namespace nibble::cuda
