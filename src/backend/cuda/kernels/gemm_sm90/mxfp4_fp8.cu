// y [m, n] = x [m, k] E4M3 · (w [n, k] E2M1 with a power of two per 32 of k)ᵀ with one scale for
// each token: MXFP4 weights with FP8 activations, summed by the tensor cores, which keep about 14
// bits of a running sum. Source of MXFP4: OCP Microscaling Formats (MX) Specification 1.0.
//
// A group's power of two goes into the operands: a weight is code * 2^(6 - d) in E4M3, d the number
// of powers between the group and the largest of its row, which a scale per row makes up for. The
// largest group's 6 becomes 384. Up to d = 14 this is exact, with subnormal numbers; smaller groups
// are rounded to multiples of 2^-9, by 2^-10 or less than 3e-6 of the row's largest number.
//
// What the eight magnitudes of E2M1 become depends on d alone: a table of eight bytes in shared
// memory, from which one permutation of bytes takes four weights.

#include "backend/cuda/kernels/gemm_sm90/grouped.cuh"
#include "backend/cuda/kernels/gemm_sm90/pack.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {
namespace {

/// A unit is 64 rows x 128 of K, which is four K steps of one group each: the words of HalvesCodec,
/// then for each pair of rows, threads 4 i to 4 i + 3, four bytes d of the even and four of the odd
/// one. Word 2 (s % 2) + odd of a thread's half s / 2 has the codes of K step s of one row:
/// magnitudes of elements 4 (t % 4) to 4 (t % 4) + 3 in nibbles 0 to 3, of those 16 further on in 4
/// to 7, and above them signs, of element j of the former in nibble 2 j, of the latter in 2 j + 1.
struct Fp4ToE4M3Codec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kE4M3;
  static constexpr int kCodeBytes = HalvesCodec::kUnitBytes;
  static constexpr int kUnitBytes = kCodeBytes + 64 * 4;
  static constexpr int kBlockElements = 128;
  static constexpr bool kRowScales = true;
  static constexpr float kScale = 0x1p-6F;
  static constexpr int kTables = 256;  // of every byte d
  static constexpr int kTableBytes = kTables * 8;

  struct Fetched {
    HalvesCodec::Fetched words;
    uint2 steps;  // d of each K step, of both rows
  };

  static __device__ __forceinline__ uint2* tables() {
    __shared__ uint2 tables[kTables];
    return tables;
  }

  static __device__ __forceinline__ void begin() {
    for (unsigned d = threadIdx.x; d < kTables; d += blockDim.x) {
      const float unit = __uint_as_float((133U - min(d, 20U)) << 23);  // 2^(6 - d); 0 from 19 on
      tables()[d] = {
          ptx::narrow_e4m3(0.0F, 0.5F * unit) | ptx::narrow_e4m3(unit, 1.5F * unit) << 16,
          ptx::narrow_e4m3(2.0F * unit, 3.0F * unit) | ptx::narrow_e4m3(4.0F * unit, 6.0F * unit)
                                                           << 16};
    }
    __syncthreads();
  }

  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return {HalvesCodec::fetch(unit, thread),
            ptx::load_shared8(unit + kCodeBytes + (thread >> 2) * 8)};
  }

  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 half = fetched.words.halves[step / 2];
      widen(step % 2 == 0 ? half.x : half.z, fetched.steps.x, step, a[step][0], a[step][2]);
      widen(step % 2 == 0 ? half.y : half.w, fetched.steps.y, step, a[step][1], a[step][3]);
    }
  }

 private:
  static __device__ __forceinline__ void widen(
      uint32_t word, uint32_t steps, int step, uint32_t& first, uint32_t& second) {
    constexpr uint32_t kSigns = 0x80808080U;
    const uint2 table = tables()[__byte_perm(steps, 0, 0x4440 + step)];
    const uint32_t magnitudes = word & 0x77777777U;
    first = __byte_perm(table.x, table.y, magnitudes) | ((word << 4) & kSigns);
    second = __byte_perm(table.x, table.y, magnitudes >> 16) | (word & kSigns);
  }
};

constexpr int kUnitWords = Fp4ToE4M3Codec::kUnitBytes / 4;
constexpr int kCodeWords = Fp4ToE4M3Codec::kCodeBytes / 4;

/// Word of a unit with the codes of this K step of a thread's row.
__device__ __forceinline__ int code_word(int thread, int step, int odd) {
  return step / 2 * 512 + thread * 4 + step % 2 * 2 + odd;
}

// One thread for each 32-bit word of codes in the units.
__global__ void pack_fp4(
    const uint32_t* codes, int64_t n, int64_t k, int k_blocks, uint32_t* units) {
  const int64_t unit = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < kCodeWords; i += static_cast<int>(blockDim.x)) {
    const int thread = (i >> 2) & 127;
    const int step = 2 * (i >> 9) + ((i & 3) >> 1);
    const int64_t row = unit / k_blocks * 64 + gemm_row(thread, i & 1);
    uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
      const int64_t column = unit % k_blocks * 128 + 32 * step + 16 * half + 4 * (thread & 3);
      if (row >= n || column >= k) {
        continue;
      }
      const uint32_t four = codes[row * (k / 8) + column / 8] >> (4 * (column % 8));
      for (int j = 0; j < 4; ++j) {
        const uint32_t code = four >> (4 * j) & 15U;
        word |= (code & 7U) << (16 * half + 4 * j) | (code >> 3) << (8 * j + 4 * half + 3);
      }
    }
    units[unit * kUnitWords + i] = word;
  }
}

// One thread for each 32-bit word of the codes.
__global__ void unpack_fp4(
    const uint32_t* units, int64_t n, int64_t k, int k_blocks, uint32_t* codes) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= n * (k / 8)) {
    return;
  }
  const int64_t row = index / (k / 8);
  const int64_t column = index % (k / 8) * 8;
  const uint32_t* unit = units + (row / 64 * k_blocks + column / 128) * kUnitWords;
  uint32_t eight = 0;
  for (int i = 0; i < 8; ++i) {
    const int within = static_cast<int>(column % 128) + i;
    const int half = within / 16 % 2, j = within % 4;
    const int thread = gemm_thread(static_cast<int>(row % 64), within);
    const uint32_t word = unit[code_word(thread, within / 32, static_cast<int>(row % 2))];
    const uint32_t magnitude = word >> (16 * half + 4 * j) & 7U;
    eight |= (magnitude | (word >> (8 * j + 4 * half + 3) & 1U) << 3) << (4 * i);
  }
  codes[index] = eight;
}

// Powers of two from 2^-127 up as the exponent of E8M0, and back.
__device__ __forceinline__ int exponent_of(float scale) {
  return static_cast<int>(__float_as_uint(scale) >> 23 & 255U);
}
__device__ __forceinline__ float power_of(int exponent) {
  return __uint_as_float(exponent == 0 ? 1U << 22 : static_cast<uint32_t>(exponent) << 23);
}

/// Place of a group's byte d.
__device__ __forceinline__ uint8_t* step_place(void* units,
                                               int64_t row,
                                               int64_t group,
                                               int k_blocks) {
  const int64_t unit = row / 64 * k_blocks + group / 4;
  return static_cast<uint8_t*>(units) + unit * Fp4ToE4M3Codec::kUnitBytes +
         Fp4ToE4M3Codec::kCodeBytes + row % 64 * 4 + group % 4;
}

// A warp for each row. What has nothing but zeros does not count: its power may be any, and the
// difference to the row's is kept by its lowest eight bits.
__global__ void pack_powers(
    const float* scales, int64_t n, int64_t k, int k_blocks, void* units, float* row_scales) {
  const int64_t row = blockIdx.x;
  const int64_t groups = k / 32;
  const int lane = static_cast<int>(threadIdx.x);
  int top = -1;
  for (int64_t group = lane; group < groups && row < n; group += 32) {
    const auto* unit =
        static_cast<const uint32_t*>(units) + (row / 64 * k_blocks + group / 4) * kUnitWords;
    const int thread = gemm_thread(static_cast<int>(row % 64), 0);
    uint32_t magnitudes = 0;
    for (int t = 0; t < 4; ++t) {
      magnitudes |=
          unit[code_word(thread + t, static_cast<int>(group % 4), static_cast<int>(row % 2))];
    }
    if ((magnitudes & 0x77777777U) != 0) {
      top = max(top, exponent_of(scales[row * groups + group]));
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    top = max(top, __shfl_xor_sync(0xffffffffU, top, distance));
  }
  top = top < 0 ? 127 : top;
  for (int64_t group = lane; group < 4 * int64_t{k_blocks}; group += 32) {
    const bool there = row < n && group < groups;
    const int power = there ? exponent_of(scales[row * groups + group]) : top;
    *step_place(units, row, group, k_blocks) = static_cast<uint8_t>(top - power);
  }
  if (lane == 0) {
    row_scales[row] = row < n ? power_of(top) : 0.0F;
  }
}

// One thread for each scale.
__global__ void unpack_powers(
    void* units, const float* row_scales, int64_t n, int64_t k, int k_blocks, float* scales) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / (k / 32), group = index % (k / 32);
  if (row < n) {
    const int power = exponent_of(row_scales[row]) - *step_place(units, row, group, k_blocks);
    scales[index] = power_of(power & 255);
  }
}

/// Behind the units.
float* row_scales_of(void* units, const GemmUnits& count) {
  return reinterpret_cast<float*>(static_cast<uint8_t*>(units) +
                                  size_t{count.units()} * Fp4ToE4M3Codec::kUnitBytes);
}

struct Fp4Packing {
  static constexpr auto kPack = pack_fp4;
  static constexpr auto kUnpack = unpack_fp4;
  using Codes = uint32_t;
  static constexpr int kDepth = 2, kXBytes = 1, kColumns = 8;

  static cudaError_t pack_scales(
      const float* scales, int64_t n, int64_t k, void* units, cudaStream_t stream) {
    const GemmUnits count = gemm_units(n, k, kDepth);
    const auto rows = static_cast<unsigned>(count.row_blocks) * 64;
    return launch(pack_powers, {.blocks = dim3(rows), .threads = 32},
                  {.stream = stream, .overlap = false}, scales, n, k, count.k_blocks, units,
                  row_scales_of(units, count));
  }
  static cudaError_t unpack_scales(
      const void* packed, int64_t n, int64_t k, float* scales, cudaStream_t stream) {
    void* units = const_cast<void*>(packed);
    const GemmUnits count = gemm_units(n, k, kDepth);
    const auto blocks = static_cast<unsigned>((n * (k / 32) + 255) / 256);
    return launch(unpack_powers, {.blocks = dim3(blocks), .threads = 256},
                  {.stream = stream, .overlap = false}, units,
                  static_cast<const float*>(row_scales_of(units, count)), n, k, count.k_blocks,
                  scales);
  }
};

constexpr GemmSm90Tile kTiles[] = {gemm_tile<Fp4ToE4M3Codec, GemmTile<8, 1, 2, 5, 2>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<128, 2, 1, 6, 1>>(),
                                   gemm_tile<Fp4ToE4M3Codec, GemmTile<256, 1, 1, 5, 1, 2>>()};

constexpr GroupedSm90Tile kGroupedTiles[] = {
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<8, 1, 2, 5, 2>>(),
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<16, 1, 2, 5, 2>>(),
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<32, 1, 2, 4, 2>>(),
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<96, 2, 1, 7, 1>>(),
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<128, 2, 1, 6, 1>>(),
    grouped_tile<Fp4ToE4M3Codec, GroupedTile<256, 1, 1, 5, 1, 2>>()};

constexpr GemmSm90Family kFamily{.name = "gemm_mxfp4_fp8_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = Fp4ToE4M3Codec::kUnitBytes,
                                 .block_elements = Fp4ToE4M3Codec::kBlockElements,
                                 .depth = Fp4Packing::kDepth,
                                 .pack = pack_units<Fp4Packing>,
                                 .unpack = unpack_units<Fp4Packing>,
                                 .pack_scales = Fp4Packing::pack_scales,
                                 .unpack_scales = Fp4Packing::unpack_scales,
                                 .grouped = kGroupedTiles};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return device.hopper() && weight.code == WeightCode::kFp4E2M1 &&
         weight.scale_per == ScalePer::kGroup && weight.group_size == 32 &&
         weight.scale_dtype == DType::kF8E8M0 && problem.act == ActFormat::kFp8Token &&
         problem.n >= 1 && problem.k >= 64 && problem.k % 64 == 0;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return GemmSm90::make(kFamily, problem, device);
}

}  // namespace

const GemmEntry kGemmMxfp4Fp8Sm90{
    .name = kFamily.name, .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
