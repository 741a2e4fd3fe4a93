#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"

// Where weights lie in the units of gemm_sm90/gemm_sm90.cuh. A thread of the warpgroup holds rows l
// / 4 and l / 4 + 8 of its warp's 16; they are given to neighbouring channels, so that results are
// stored in pairs.
namespace nibble::cuda {

struct GemmUnits {
  int row_blocks = 0, k_blocks = 0;
  [[nodiscard]] unsigned units() const { return static_cast<unsigned>(row_blocks * k_blocks); }
};

/// Units of n rows for x_bytes of x along K: K blocks of 128, their number a multiple of `depth`.
inline GemmUnits gemm_units(int64_t n, int64_t x_bytes, int depth) {
  return {.row_blocks = static_cast<int>((n + 63) / 64),
          .k_blocks = static_cast<int>(((x_bytes + 127) / 128 + depth - 1) / depth * depth)};
}

/// Channel of a unit that a thread's row l / 4 (odd = 0) or l / 4 + 8 (odd = 1) stands for.
__device__ __forceinline__ int gemm_row(int thread, int odd) {
  return 16 * (thread >> 5) + 2 * ((thread & 31) >> 2) + odd;
}

/// Thread that holds this channel of a unit and this byte of a K block.
__device__ __forceinline__ int gemm_thread(int row, int column) {
  return (row >> 4) * 32 + ((row & 15) >> 1) * 4 + ((column >> 2) & 3);
}

/// Units of 4096 bytes that hold for each thread t two 16-byte words, K steps 0 and 1 at 16 t and 2
/// and 3 at 2048 + 16 t: what their codecs begin with.
struct HalvesCodec {
  static constexpr int kUnitBytes = 4096;
  static constexpr bool kRowScales = true;
  struct Fetched {
    uint4 halves[2];
  };
  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return {
        {ptx::load_shared16(unit + thread * 16), ptx::load_shared16(unit + 2048 + thread * 16)}};
  }
  /// widen(word, to) for each 32-bit word, half a K step, and its two operand registers.
  template <typename Widen>
  static __device__ __forceinline__ void expand_words(const Fetched& fetched,
                                                      uint32_t (&a)[4][4],
                                                      const Widen& widen) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = fetched.halves[half];
      const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        widen(words[w], a[2 * half + w / 2] + 2 * (w % 2));
      }
    }
  }
};

/// Codes [n, k] to units or back, as GemmSm90Family has them. Packing says kPack and kUnpack, the
/// kernels; Codes, the words of codes that they take; kDepth, of units; kXBytes of a column of x;
/// kColumns that a thread of kUnpack takes.
template <typename Packing>
cudaError_t pack_units(const void* codes, int64_t n, int64_t k, void* units, cudaStream_t stream) {
  const GemmUnits count = gemm_units(n, Packing::kXBytes * k, Packing::kDepth);
  return launch(Packing::kPack, {.blocks = dim3(count.units()), .threads = 256},
                {.stream = stream, .overlap = false},
                static_cast<const typename Packing::Codes*>(codes), n, k, count.k_blocks,
                static_cast<uint32_t*>(units));
}

template <typename Packing>
cudaError_t unpack_units(
    const void* units, int64_t n, int64_t k, void* codes, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((n * (k / Packing::kColumns) + 255) / 256);
  return launch(Packing::kUnpack, {.blocks = dim3(blocks), .threads = 256},
                {.stream = stream, .overlap = false}, static_cast<const uint32_t*>(units), n, k,
                gemm_units(n, Packing::kXBytes * k, Packing::kDepth).k_blocks,
                static_cast<typename Packing::Codes*>(codes));
}

/// An instance of the kernel and what its choice needs.
template <typename Codec, typename Tile>
constexpr GemmSm90Tile gemm_tile() {
  return {.tokens = Tile::kTokens,
          .row_blocks = Tile::kRowBlocks * Tile::kCluster,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .cluster = Tile::kCluster,
          .clusters = Tile::kClusters,
          .threads = Tile::kThreads,
          .shared_bytes = GemmShared<Codec, Tile>::kBytes,
          .kernel = gemm_sm90<Codec, Tile>};
}

}  // namespace nibble::cuda
