// y [m, n] = x [m, k] int8 · (w [n, k] int4 in groups of two levels)ᵀ with one scale for each
// channel and each token: a weight is the int8 (code - zero) * step, and the sum is exact in int32,
// so that results do not depend on m, tiles or the order of parts.
//
// Four weights become four int8 operands in one multiplication with an addition and one exclusive
// or: step * code is at most 225, so that no product carries over to the byte above it, and neither
// does the sum with 128 - step * zero, which makes it 1 to 255 (QServe, arXiv 2405.04532, section
// 5.2, which subtracts afterwards). |sum| <= 127 * 127 k fits an int32 for k up to 133144.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"
#include "quant/levels.h"

namespace nibble::cuda {
namespace {

/// A unit is 64 rows x 128 of K: the words of HalvesCodec, then four bytes for each row: step and
/// step * (zero + 8) of columns 0 to 63, and of 64 to 127. Byte b of a 32-bit word is element
/// 4 (t % 4) + b of half a K step: the low nibble of the even channel, the high one of the odd, as
/// 0 to 15.
struct LevelsCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kCodeBytes = HalvesCodec::kUnitBytes;
  static constexpr int kUnitBytes = kCodeBytes + 64 * 4;
  static constexpr int kBlockElements = 128;
  static constexpr bool kRowScales = true;
  static constexpr float kScale = 1.0F;

  struct Fetched {
    HalvesCodec::Fetched words;
    uint2 levels;  // of both rows
  };

  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return {HalvesCodec::fetch(unit, thread),
            ptx::load_shared8(unit + kCodeBytes + (thread >> 2) * 8)};
  }

  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = fetched.words.halves[half];
      const uint32_t words[4] = {q.x, q.y, q.z, q.w};
      const Level even = level_of(fetched.levels.x, half);
      const Level odd = level_of(fetched.levels.y, half);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t* to = a[2 * half + w / 2] + 2 * (w % 2);
        to[0] = even.widen(words[w]);
        to[1] = odd.widen(words[w] >> 4);
      }
    }
  }

 private:
  struct Level {
    uint32_t step;
    uint32_t offsets;  // 128 - step * zero in every byte, as numbers that borrow from each other

    [[nodiscard]] __device__ __forceinline__ uint32_t widen(uint32_t word) const {
      return ((word & 0x0f0f0f0fU) * step + offsets) ^ 0x80808080U;
    }
  };

  static __device__ __forceinline__ Level level_of(uint32_t levels, int half) {
    const uint32_t lowered = __byte_perm(levels, 0, 0x4441 + 2 * half);
    return {.step = __byte_perm(levels, 0, 0x4440 + 2 * half),
            .offsets = (128U - lowered) * 0x01010101U};
  }
};

constexpr int kUnitWords = LevelsCodec::kUnitBytes / 4;
constexpr int kCodeWords = LevelsCodec::kCodeBytes / 4;
constexpr int kSlotColumns = 64;  // that have levels of their own in a unit

// One thread for each 32-bit word of codes in the units.
__global__ void pack_codes(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  const int row0 = static_cast<int>(unit / k_blocks) * 64;
  for (int i = static_cast<int>(threadIdx.x); i < kCodeWords; i += static_cast<int>(blockDim.x)) {
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
        word |= ((four >> (4 * b)) & 15U) << (8 * b + 4 * odd);
      }
    }
    units[unit * kUnitWords + i] = word;
  }
}

// One thread for each 32-bit word of the codes.
__global__ void unpack_codes(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint32_t* codes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * (k / 8)) {
    return;
  }
  const int64_t row = i / (k / 8);
  const int64_t column = i % (k / 8) * 8;
  const uint32_t* unit = units + (row / 64 * k_blocks + column / 128) * kUnitWords;
  uint32_t word = 0;
  for (int j = 0; j < 8; j += 4) {
    const int within = static_cast<int>(column % 128) + j;
    const int step = within / 32;
    const int thread = gemm_thread(static_cast<int>(row % 64), within);
    const uint32_t four = unit[step / 2 * 512 + thread * 4 + step % 2 * 2 + within / 16 % 2];
    for (int b = 0; b < 4; ++b) {
      word |= ((four >> (8 * b + 4 * (row % 2))) & 15U) << (4 * (j + b));
    }
  }
  codes[i] = word;
}

/// Place of the levels of 64 columns of a row.
__device__ __forceinline__ uint8_t* level_place(void* units,
                                                int64_t row,
                                                int64_t slot,
                                                int k_blocks) {
  const int64_t unit = row / 64 * k_blocks + slot / 2;
  return static_cast<uint8_t*>(units) + unit * LevelsCodec::kUnitBytes + LevelsCodec::kCodeBytes +
         row % 64 * 4 + slot % 2 * 2;
}

/// Scales and zero points of a matrix, [n, groups] each, and its units with the scales of rows.
struct LevelNumbers {
  float* scales = nullptr;
  float* zeros = nullptr;
  void* units = nullptr;
  float* row_scales = nullptr;
  int64_t n = 0;
  int64_t groups = 0;
  int slots = 0;  // of a group
  int k_blocks = 0;
};

// One thread for each row: its scale as levels_of() finds it, and the steps.
__global__ void pack_levels(LevelNumbers numbers) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t first = row * numbers.groups;
  const bool there = row < numbers.n;
  float channel = 0.0F;
  for (int64_t g = 0; g < numbers.groups && there; ++g) {
    channel = common_measure(numbers.scales[first + g], channel,
                             [](float a, float b) { return fmodf(a, b); });
  }
  for (int64_t slot = 0; slot < 2 * int64_t{numbers.k_blocks}; ++slot) {
    uint8_t* place = level_place(numbers.units, row, slot, numbers.k_blocks);
    const int64_t g = slot / numbers.slots;
    const bool of_group = there && g < numbers.groups;
    const int step = of_group ? static_cast<int>(numbers.scales[first + g] / channel) : 0;
    const int zero = of_group ? static_cast<int>(numbers.zeros[first + g]) - kLowestCode : 0;
    place[0] = static_cast<uint8_t>(step);
    place[1] = static_cast<uint8_t>(step * zero);
  }
  numbers.row_scales[row] = channel;
}

// One thread for each scale.
__global__ void unpack_levels(LevelNumbers numbers) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / numbers.groups, group = index % numbers.groups;
  if (row < numbers.n) {
    const uint8_t* place = level_place(numbers.units, row, group * numbers.slots, numbers.k_blocks);
    numbers.scales[index] = numbers.row_scales[row] * static_cast<float>(place[0]);  // exact
    numbers.zeros[index] = static_cast<float>(place[1] / place[0] + kLowestCode);
  }
}

template <int kGroup>
struct LevelsPacking {
  static constexpr auto kPack = pack_codes;
  static constexpr auto kUnpack = unpack_codes;
  using Codes = uint32_t;
  static constexpr int kDepth = 2, kXBytes = 1, kColumns = 8;

  static LevelNumbers numbers_of(const float* scales, int64_t n, int64_t k, const void* units) {
    const GemmUnits count = gemm_units(n, k, kDepth);
    auto* writable = static_cast<uint8_t*>(const_cast<void*>(units));
    auto* numbers = const_cast<float*>(scales);
    const int64_t groups = k / kGroup;
    const size_t code_bytes = size_t{count.units()} * LevelsCodec::kUnitBytes;
    return {.scales = numbers,
            .zeros = numbers + n * groups,
            .units = writable,
            .row_scales = reinterpret_cast<float*>(writable + code_bytes),
            .n = n,
            .groups = groups,
            .slots = kGroup / kSlotColumns,
            .k_blocks = count.k_blocks};
  }
  static cudaError_t pack_scales(
      const float* scales, int64_t n, int64_t k, void* units, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(gemm_units(n, k, kDepth).row_blocks);
    return launch(pack_levels, {.blocks = dim3(blocks), .threads = 64},
                  {.stream = stream, .overlap = false}, numbers_of(scales, n, k, units));
  }
  static cudaError_t unpack_scales(
      const void* units, int64_t n, int64_t k, float* scales, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>((n * (k / kGroup) + 255) / 256);
    return launch(unpack_levels, {.blocks = dim3(blocks), .threads = 256},
                  {.stream = stream, .overlap = false}, numbers_of(scales, n, k, units));
  }
};

// Those of MXFP4 with FP8 activations, whose units are of one size with these.
constexpr GemmSm90Tile kTiles[] = {gemm_tile<LevelsCodec, GemmTile<8, 1, 2, 5, 2>>(),
                                   gemm_tile<LevelsCodec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<LevelsCodec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<LevelsCodec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<LevelsCodec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<LevelsCodec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<LevelsCodec, GemmTile<128, 2, 1, 6, 1>>()};

constexpr GroupedSm90Tile kGroupedTiles[] = {
    grouped_tile<LevelsCodec, GroupedTile<8, 1, 2, 5, 2>>(),
    grouped_tile<LevelsCodec, GroupedTile<16, 1, 2, 5, 2>>(),
    grouped_tile<LevelsCodec, GroupedTile<32, 1, 2, 4, 2>>(),
    grouped_tile<LevelsCodec, GroupedTile<96, 2, 1, 7, 1>>(),
    grouped_tile<LevelsCodec, GroupedTile<128, 2, 1, 6, 1>>(),
    grouped_tile<LevelsCodec, GroupedTile<256, 1, 1, 5, 1, 2>>()};

template <int kGroup>
constexpr GemmSm90Family kFamily{.name = "gemm_w4a8_levels_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = LevelsCodec::kUnitBytes,
                                 .block_elements = LevelsCodec::kBlockElements,
                                 .depth = LevelsPacking<kGroup>::kDepth,
                                 .pack = pack_units<LevelsPacking<kGroup>>,
                                 .unpack = unpack_units<LevelsPacking<kGroup>>,
                                 .pack_scales = LevelsPacking<kGroup>::pack_scales,
                                 .unpack_scales = LevelsPacking<kGroup>::unpack_scales,
                                 .grouped = kGroupedTiles};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return device.hopper() && in_two_levels(weight, problem.act) &&
         (weight.group_size == 64 || weight.group_size == 128) && problem.n >= 1 &&
         problem.k >= weight.group_size && problem.k % weight.group_size == 0 &&
         problem.k <= kGemmMaxIntegerK;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.group_size == 64 ? GemmSm90::make(kFamily<64>, problem, device)
                                         : GemmSm90::make(kFamily<128>, problem, device);
}

}  // namespace

const GemmEntry kGemmW4A8LevelsSm90{
    .name = kFamily<128>.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
