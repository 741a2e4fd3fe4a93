#pragma once

// The host's side of gemm_sm80/mma.cuh: packing, choice of tiles and splits, launches.

#include <algorithm>
#include <memory>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/gemm_sm80/mma.cuh"

namespace nibble::cuda::sm80 {

inline constexpr int kBlocksPerSm = 2;  // that splits of k aim at
inline constexpr int kPackThreads = 256;
inline constexpr int64_t kMaxK = int64_t{1} << 17;  // 2^17 products of 128 * 127 fit in an s32

/// Canonical codes and their packed words, one thread per packed word.
struct PackArgs {
  uint32_t* codes = nullptr;   // [n, k]
  uint32_t* packed = nullptr;  // [words]
  int64_t n = 0;
  int64_t k = 0;
  int64_t words = 0;
};

/// body(code's number among the canonical ones, its bits' place in the packed word), for the
/// elements of packed word `index`; none of the rows that only fill the last tile.
template <typename Codec, typename Body>
__device__ __forceinline__ void for_each_element(const PackArgs& p,
                                                 int64_t index,
                                                 const Body& body) {
  const auto word = static_cast<int>(index % 4);
  const auto lane = static_cast<int>(index / 4 % 32);
  const auto chunk = static_cast<int>(index / 128 % Codec::kChunks);
  const int64_t warp = index / (128 * Codec::kChunks) % 4;
  const int64_t block = index / (512 * Codec::kChunks);
  const int64_t steps = p.k / kStep;
  for (int e = 0; e < 32 / Codec::kCodeBits; ++e) {
    const Source source = Codec::source(lane, chunk, word, e);
    const int64_t row = block / steps * kTileRows + warp * 32 + source.row;
    if (row < p.n) {
      body(row * p.k + block % steps * kStep + source.column, e * Codec::kCodeBits);
    }
  }
}

template <typename Codec>
__global__ void pack_kernel(const PackArgs p) {
  constexpr int64_t kPerWord = 32 / Codec::kCodeBits;
  constexpr uint32_t kMask = (1U << Codec::kCodeBits) - 1;
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= p.words) {
    return;
  }
  uint32_t packed = 0;
  for_each_element<Codec>(p, index, [&](int64_t code, int place) {
    const int64_t shift = code % kPerWord * Codec::kCodeBits;
    packed |= ((p.codes[code / kPerWord] >> shift) & kMask) << place;
  });
  p.packed[index] = packed ^ Codec::kFlip;
}

template <typename Codec>
__global__ void unpack_kernel(const PackArgs p) {
  constexpr int64_t kPerWord = 32 / Codec::kCodeBits;
  constexpr uint32_t kMask = (1U << Codec::kCodeBits) - 1;
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= p.words) {
    return;
  }
  const uint32_t packed = p.packed[index] ^ Codec::kFlip;
  for_each_element<Codec>(p, index, [&](int64_t code, int place) {
    const int64_t shift = code % kPerWord * Codec::kCodeBits;
    atomicOr(p.codes + code / kPerWord, ((packed >> place) & kMask) << shift);
  });
}

/// scales [n, groups] f32 and grouped [n / 128][groups][128], one thread per scale; zero points
/// and minimums likewise.
template <typename Scale, bool kPack>
__global__ void group_scales_kernel(float* scales, Scale* grouped, int64_t n, int64_t groups) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= n * groups) {
    return;
  }
  const int64_t row = index / groups;
  const int64_t at = (row / kTileRows * groups + index % groups) * kTileRows + row % kTileRows;
  if constexpr (kPack) {
    grouped[at] = Scale(scales[index]);  // to the nearest, ties to even
  } else {
    scales[index] = number_of(grouped[at]);
  }
}

inline Grid flat_grid(int64_t threads) {
  return {.blocks = dim3(static_cast<unsigned>((threads + kPackThreads - 1) / kPackThreads)),
          .threads = kPackThreads};
}

/// A GemmKernel of one codec.
template <typename Codec>
class GemmMma final : public GemmKernel {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
    auto kernel = std::make_unique<GemmMma>(problem, device);
    NIBBLE_RETURN_IF_ERROR(kernel->template allow_shared<8>());
    NIBBLE_RETURN_IF_ERROR(kernel->template allow_shared<16>());
    NIBBLE_RETURN_IF_ERROR(kernel->template allow_shared<64>());
    return std::unique_ptr<GemmKernel>(std::move(kernel));
  }

  GemmMma(const GemmProblem& problem, const DeviceInfo& device)
      : n_(problem.n), k_(problem.k), blocks_(kBlocksPerSm * device.sms) {}

  [[nodiscard]] size_t packed_bytes() const override { return code_bytes() + scale_bytes(); }

  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    const LaunchContext context{.stream = stream, .overlap = false};
    auto* base = static_cast<uint8_t*>(packed);
    cudaError_t error = cudaMemsetAsync(base + code_bytes(), 0, scale_bytes(), stream);
    if (error == cudaSuccess) {
      const PackArgs args = pack_args(const_cast<void*>(codes), packed);
      error = launch(pack_kernel<Codec>, flat_grid(args.words), context, args);
    }
    if (error != cudaSuccess || scale_bytes() == 0) {
      return error;
    }
    if constexpr (Codec::kGroupsPerStep > 0) {
      return move_groups<true>(const_cast<float*>(scales), base, context);
    }
    return cudaMemcpyAsync(base + code_bytes(), scales, static_cast<size_t>(n_) * 4,
                           cudaMemcpyDeviceToDevice, stream);
  }

  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override {
    const LaunchContext context{.stream = stream, .overlap = false};
    auto* base = static_cast<uint8_t*>(const_cast<void*>(packed));
    cudaError_t error =
        cudaMemsetAsync(codes, 0, static_cast<size_t>(n_ * k_ / 8) * Codec::kCodeBits, stream);
    if (error == cudaSuccess) {
      const PackArgs args = pack_args(codes, base);
      error = launch(unpack_kernel<Codec>, flat_grid(args.words), context, args);
    }
    if (error != cudaSuccess || scale_bytes() == 0) {
      return error;
    }
    if constexpr (Codec::kGroupsPerStep > 0) {
      return move_groups<false>(scales, base, context);
    }
    return cudaMemcpyAsync(scales, base + code_bytes(), static_cast<size_t>(n_) * 4,
                           cudaMemcpyDeviceToDevice, stream);
  }

  /// Split tiles are at most as many as blocks wanted; a counter for each, and all partial sums.
  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override {
    return static_cast<size_t>(blocks_) * (4 + 64 * kThreads * 4);
  }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    return args.m <= 8    ? run_tiles<8>(args, context)
           : args.m <= 16 ? run_tiles<16>(args, context)
                          : run_tiles<64>(args, context);
  }

  cudaError_t run_grouped(const GroupedLaunch& args, const LaunchContext& context) const override {
    return args.tile_rows <= 8    ? run_grouped_tiles<8>(args, context)
           : args.tile_rows <= 16 ? run_grouped_tiles<16>(args, context)
                                  : run_grouped_tiles<64>(args, context);
  }

 private:
  using Scale = typename Codec::GroupScale;
  static constexpr bool kHasOffsets = Codec::kOffsets != Offsets::kNone;

  [[nodiscard]] int64_t row_tiles() const { return (n_ + kTileRows - 1) / kTileRows; }
  [[nodiscard]] int64_t groups() const { return groups_of<Codec>(k_ / kStep); }
  [[nodiscard]] size_t code_bytes() const {
    return static_cast<size_t>(row_tiles() * kTileRows * k_ / 8) * Codec::kCodeBits;
  }
  /// Of scales alone, or of zero points or minimums.
  [[nodiscard]] size_t group_bytes() const {
    return static_cast<size_t>(row_tiles() * kTileRows * groups()) * sizeof(Scale);
  }
  [[nodiscard]] size_t scale_bytes() const {
    const auto rows = static_cast<size_t>(row_tiles() * kTileRows);
    if (Codec::kGroupsPerStep > 0) {
      return group_bytes() * (kHasOffsets ? 2 : 1);
    }
    return Codec::kRowScales ? rows * 4 : 0;
  }
  [[nodiscard]] PackArgs pack_args(void* codes, void* packed) const {
    return {.codes = static_cast<uint32_t*>(codes),
            .packed = static_cast<uint32_t*>(packed),
            .n = n_,
            .k = k_,
            .words = static_cast<int64_t>(code_bytes() / 4)};
  }

  /// Scales, and zero points or minimums behind them, to their packed places or back.
  template <bool kPack>
  cudaError_t move_groups(float* scales, uint8_t* base, const LaunchContext& context) const {
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < (kHasOffsets ? 2 : 1) && error == cudaSuccess; ++i) {
      error = launch(
          group_scales_kernel<Scale, kPack>, flat_grid(n_ * groups()), context,
          scales + i * n_ * groups(),
          reinterpret_cast<Scale*>(base + code_bytes() + static_cast<size_t>(i) * group_bytes()),
          n_, groups());
    }
    return error;
  }

  template <int kTokens>
  static constexpr size_t kSharedBytes = size_t{kStages} * Stage<Codec, kTokens>::kBytes;

  template <int kTokens>
  Status allow_shared() {
    constexpr auto kBytes = static_cast<int>(kSharedBytes<kTokens>);
    constexpr auto kLimit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t dense = cudaFuncSetAttribute(gemm_kernel<Codec, kTokens>, kLimit, kBytes);
    return check(dense == cudaSuccess
                     ? cudaFuncSetAttribute(grouped_kernel<Codec, kTokens>, kLimit, kBytes)
                     : dense,
                 "allowing a kernel its shared memory");
  }

  template <int kTokens>
  cudaError_t run_grouped_tiles(const GroupedLaunch& args, const LaunchContext& context) const {
    if (args.max_tiles < 1 || args.max_tiles > 65535 || args.result == GemmResult::kAddF32) {
      return cudaErrorInvalidValue;
    }
    const int64_t steps = k_ / kStep;
    const int64_t splits = std::clamp<int64_t>(blocks_ / (row_tiles() * args.max_tiles), 1,
                                               std::max<int64_t>(1, steps / kStages));
    auto* workspace = static_cast<uint32_t*>(args.workspace);
    const GemmLaunch all{.x = args.x,
                         .x_scales = args.x_scales,
                         .bias = args.bias,
                         .y = args.y,
                         .y_stride = n_,
                         .result = args.result};
    const GroupedProduct grouped{
        .product = {.args = all,
                    .n = n_,
                    .steps = static_cast<int32_t>(steps),
                    .splits = static_cast<int32_t>(splits),
                    .arrived = workspace,
                    .partial = reinterpret_cast<int32_t*>(workspace + blocks_)},
        .packed = static_cast<const uint8_t*>(args.packed),
        .expert_bytes = args.expert_bytes,
        .tiles = args.tiles,
        .code_bytes = static_cast<int64_t>(code_bytes()),
        .offset_bytes = kHasOffsets ? static_cast<int64_t>(group_bytes()) : 0,
        .x_row_bytes = steps * 64 * Codec::kPlanes,
        .y_row_bytes = n_ * (args.result == GemmResult::kBf16 ? 2 : 4),
        .x_row_scales = Codec::kTokenGroups ? groups() : 1};
    const Grid grid{
        .blocks = dim3(static_cast<unsigned>(row_tiles()), static_cast<unsigned>(args.max_tiles),
                       static_cast<unsigned>(splits)),
        .threads = kThreads,
        .shared_bytes = kSharedBytes<kTokens>};
    return launch(grouped_kernel<Codec, kTokens>, grid, context, grouped);
  }

  template <int kTokens>
  cudaError_t run_tiles(const GemmLaunch& args, const LaunchContext& context) const {
    const int64_t token_tiles = (args.m + kTokens - 1) / kTokens;
    if (args.m < 1 || token_tiles > 65535) {
      return args.m == 0 ? cudaSuccess : cudaErrorInvalidValue;
    }
    const int64_t tiles = row_tiles() * token_tiles;
    const int64_t steps = k_ / kStep;
    // Shorter runs than the ring is deep would mostly wait for their first step.
    const int64_t splits =
        std::clamp<int64_t>(blocks_ / tiles, 1, std::max<int64_t>(1, steps / kStages));
    const auto* packed = static_cast<const uint8_t*>(args.packed);
    auto* workspace = static_cast<uint32_t*>(args.workspace);
    const Product product{.args = args,
                          .codes = packed,
                          .scales = packed + code_bytes(),
                          .offsets = packed + code_bytes() + (kHasOffsets ? group_bytes() : 0),
                          .n = n_,
                          .steps = static_cast<int32_t>(steps),
                          .splits = static_cast<int32_t>(splits),
                          .arrived = workspace,
                          .partial = reinterpret_cast<int32_t*>(workspace + blocks_)};
    const Grid grid{
        .blocks = dim3(static_cast<unsigned>(row_tiles()), static_cast<unsigned>(token_tiles),
                       static_cast<unsigned>(splits)),
        .threads = kThreads,
        .shared_bytes = kSharedBytes<kTokens>};
    return launch(gemm_kernel<Codec, kTokens>, grid, context, product);
  }

  int64_t n_, k_;
  int64_t blocks_;
};

/// What all codecs ask of a problem and a device.
inline bool fits(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.n >= 1 && problem.k >= kStep && problem.k % kStep == 0 && problem.k <= kMaxK &&
         problem.weight.zero_points == ZeroPoints::kNone && device.major >= 8 &&
         device.shared_bytes >= 99 * 1024;
}

/// Whether the code that the GPU runs, this build's newest that is no newer than the GPU, has the
/// instructions for FP8: code for sm_80 runs on sm_89, too, but lacks them.
inline bool runs_fp8(const DeviceInfo& device) {
  int newest = 0;
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture <= device.major * 100 + device.minor * 10) {
      newest = std::max(newest, architecture);
    }
  }
  return newest >= 890;
}

}  // namespace nibble::cuda::sm80
