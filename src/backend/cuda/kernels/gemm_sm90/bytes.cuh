#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

// Weights that are operands as they are: INT8, E4M3 and BF16. A K block is 128 bytes of a row.
namespace nibble::cuda {

/// A unit holds for each K step s and thread t its four operand registers, at 2048 s + 16 t.
template <ptx::MmaType kMmaType>
struct ByteCodec {
  static constexpr ptx::MmaType kType = kMmaType;
  static constexpr int kUnitBytes = 8192;
  static constexpr int kBlockElements = kType == ptx::MmaType::kBf16 ? 64 : 128;
  static constexpr float kScale = 1.0F;
  static constexpr bool kRowScales = kType != ptx::MmaType::kBf16;

  struct Fetched {  // nothing but the place: the words are operands as they are
    uint32_t address;
  };
  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return {unit + thread * 16};
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 word = ptx::load_shared16(fetched.address + step * 2048);
      a[step][0] = word.x;
      a[step][1] = word.y;
      a[step][2] = word.z;
      a[step][3] = word.w;
    }
  }
};

inline constexpr int kByteUnitWords = 2048;

// One thread for each 32-bit word of the units; n rows of k bytes.
static __global__ void pack_bytes(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < kByteUnitWords;
       i += static_cast<int>(blockDim.x)) {
    const int thread = (i >> 2) & 127;
    const int64_t row = unit / k_blocks * 64 + gemm_row(thread, i & 1);
    const int64_t column =
        unit % k_blocks * 128 + 32 * (i >> 9) + 16 * ((i >> 1) & 1) + 4 * (thread & 3);
    units[unit * kByteUnitWords + i] = row < n && column < k ? codes[(row * k + column) / 4] : 0;
  }
}

// One thread for each 32-bit word of the codes.
static __global__ void unpack_bytes(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint32_t* codes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * (k / 4)) {
    return;
  }
  const int64_t row = i / (k / 4);
  const int64_t column = i % (k / 4) * 4;
  const int within = static_cast<int>(column % 128);
  const int thread = gemm_thread(static_cast<int>(row % 64), within);
  codes[i] = units[(row / 64 * k_blocks + column / 128) * kByteUnitWords + within / 32 * 512 +
                   thread * 4 + within / 16 % 2 * 2 + row % 2];
}

// Columns of a byte.
struct BytePacking {
  static constexpr auto kPack = pack_bytes;
  static constexpr auto kUnpack = unpack_bytes;
  using Codes = uint32_t;
  static constexpr int kDepth = 1, kXBytes = 1, kColumns = 4;
};

template <ptx::MmaType kType>
inline constexpr GemmSm90Tile kByteTiles[] = {
    gemm_tile<ByteCodec<kType>, GemmTile<8, 1, 1, 6, 2>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<16, 1, 1, 6, 2>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<32, 1, 1, 5, 2>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<64, 1, 1, 8, 1>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<64, 2, 1, 5, 1>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<128, 1, 1, 6, 1>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<128, 2, 1, 4, 1>>(),
    gemm_tile<ByteCodec<kType>, GemmTile<256, 1, 1, 4, 1, 2>>(),
};

template <ptx::MmaType kType>
inline constexpr GroupedSm90Tile kGroupedByteTiles[] = {
    grouped_tile<ByteCodec<kType>, GroupedTile<8, 1, 1, 6, 2>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<16, 1, 1, 6, 2>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<32, 1, 1, 5, 2>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<96, 2, 1, 4, 1>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<128, 2, 1, 4, 1>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<160, 1, 1, 5, 1, 2>>(),
    grouped_tile<ByteCodec<kType>, GroupedTile<256, 1, 1, 4, 1, 2>>(),
};

}  // namespace nibble::cuda
