// y [m, n] (+)= x [m, k] bf16 · (codes * scales)ᵀ (+ bias) on Hopper for MXFP4 and INT4 in groups:
// single matrices and all experts of a layer in one launch, where gate and up may leave through
// their activation. Weights are decoded in registers to BF16 and multiplied by wgmma with sums in
// f32 (experts_sm90/loop.cuh). Source of MXFP4: OCP Microscaling Formats (MX) Specification 1.0.

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/pack.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/tensor_map.h"
#include "base/math.h"

namespace nibble::cuda {

template <>
std::span<const ExpertsSm90Tile> experts_sm90_tiles<Fp4Codec>();
template <>
std::span<const ExpertsSm90Tile> experts_sm90_tiles<Int4Codec<32>>();
template <>
std::span<const ExpertsSm90Tile> experts_sm90_tiles<Int4Codec<128>>();

namespace {

constexpr size_t kAlignment = 128;  // of an expert's weights
constexpr int32_t kFew = 16;        // rows of the largest tile of experts_sm90/few.cuh

template <typename Codec>
class ExpertsSm90 final : public GemmKernel {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorMaps maps, TensorMaps::find());
    for (const ExpertsSm90Tile& tile : experts_sm90_tiles<Codec>()) {
      NIBBLE_RETURN_IF_ERROR(check(cudaFuncSetAttribute(reinterpret_cast<const void*>(tile.kernel),
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(tile.shared_bytes)),
                                   "gemm_experts_sm90"));
    }
    return std::unique_ptr<GemmKernel>(std::make_unique<ExpertsSm90>(problem, device, maps));
  }

  ExpertsSm90(const GemmProblem& problem, const DeviceInfo& device, const TensorMaps& maps)
      : sizes_{.n = problem.n,
               .k = problem.k,
               .width = problem.rows == WeightRows::kGateUp ? problem.n / 2 : 0,
               .along_k = true},
        sms_(device.sms),
        maps_(maps) {}

  [[nodiscard]] size_t packed_bytes() const override {
    const auto pairs = static_cast<size_t>(row_blocks() * this->pairs());
    return (pairs * Codec::Layout::kPairBytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    const cudaError_t error = Packing::pack(codes, sizes_, packed, stream);
    return error == cudaSuccess ? Packing::pack_scales(scales, sizes_, packed, stream) : error;
  }
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override {
    const cudaError_t error = Packing::unpack(packed, sizes_, codes, stream);
    return error == cudaSuccess ? Packing::unpack_scales(packed, sizes_, scales, stream) : error;
  }

  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override { return 0; }

  /// Index of the tile.
  [[nodiscard]] int choose(int64_t m) const override {
    const std::span tiles = experts_sm90_tiles<Codec>();
    const auto fits = [m](const ExpertsSm90Tile& tile) { return m <= tile.tokens; };
    const auto tile = std::ranges::find_if(tiles, fits);
    return static_cast<int>(std::min<std::ptrdiff_t>(tile - tiles.begin(), std::ssize(tiles) - 1));
  }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (args.m < 1 || args.m > INT32_MAX / 2) {
      return args.m == 0 ? cudaSuccess : cudaErrorInvalidValue;
    }
    ExpertsSm90Args own = arguments(args.packed, args.bias, args.y, args.result);
    own.m = static_cast<int>(args.m);
    own.y_stride = args.y_stride;
    return start(choose(args.m), args.x, args.m, own, context);
  }

  [[nodiscard]] TileRows grouped_rows(int64_t mean, int64_t most) const override {
    // Tiles that hold what nearly all experts have, where rows are dealt out by chance.
    constexpr int32_t kMeans[] = {3, 8, 18, 46, 74, 102, 144};
    const std::span tiles = experts_sm90_tiles<Codec>();
    const auto index = std::ranges::lower_bound(kMeans, mean) - std::begin(kMeans);
    const ExpertsSm90Tile& tile = tiles[static_cast<size_t>(index)];
    const int32_t rows = tile.tokens;
    // Where more of them make up a tile of wgmma, that is another launch. Up to kFew rows a second
    // tile costs no more than that launch.
    return rows > kFew || most <= kFew ? TileRows{rows, tile.step} : TileRows{64, 32, rows};
  }

  [[nodiscard]] bool takes_one_row() const override { return true; }
  [[nodiscard]] bool activates() const override {
    return sizes_.width > 0 && sizes_.width % 8 == 0;
  }

  cudaError_t run_grouped(const GroupedLaunch& args, const LaunchContext& context) const override {
    if (args.slots == 0) {
      return cudaSuccess;
    }
    const bool activated = args.activation != GemmInput::Kind::kPlain;
    const std::span tiles = experts_sm90_tiles<Codec>();
    if (args.slots > INT32_MAX / 2 || args.tile_rows > tiles.back().tokens ||
        (activated && (!activates() || args.result != GemmResult::kBf16))) {
      return cudaErrorInvalidValue;
    }
    ExpertsSm90Args own = arguments(args.packed, args.bias, args.y, args.result);
    own.expert_bytes = args.expert_bytes;
    own.tiles = args.tiles;
    const bool one = args.rows == GroupedRows::kOneForAll;
    own.x_step = one ? 0 : 1;
    own.tile_count = args.tile_count;
    own.y_stride = activated ? sizes_.width : sizes_.n;
    own.activation = args.activation;
    own.limit = args.limit;
    own.beside = args.beside;
    return start(choose(args.tile_rows), args.x, one ? 1 : args.slots, own, context);
  }

 private:
  using Packing = Int4GroupPacking<Codec>;

  [[nodiscard]] int64_t row_blocks() const { return ceil_div(sizes_.n, 64); }
  [[nodiscard]] int64_t pairs() const { return ceil_div(sizes_.k, 128); }

  [[nodiscard]] ExpertsSm90Args arguments(const void* packed,
                                          const float* bias,
                                          void* y,
                                          GemmResult result) const {
    return {.weights = static_cast<const uint8_t*>(packed),
            .bias = bias,
            .y = y,
            .n = static_cast<int>(sizes_.n),
            .row_blocks = static_cast<int>(row_blocks()),
            .pairs = static_cast<int>(pairs()),
            .width = static_cast<int>(sizes_.width),
            .result = result};
  }

  cudaError_t start(int index,
                    const void* x,
                    int64_t rows,
                    const ExpertsSm90Args& args,
                    const LaunchContext& context) const {
    const ExpertsSm90Tile& tile = experts_sm90_tiles<Codec>()[static_cast<size_t>(index)];
    CUtensorMap map;
    if (!maps_.map_bf16(x, rows, sizes_.k, tile.box, tile.panels, map)) {
      return cudaErrorInvalidValue;
    }
    return launch(tile.kernel,
                  {.blocks = dim3(static_cast<unsigned>(sms_ / tile.cluster * tile.cluster)),
                   .threads = tile.threads,
                   .shared_bytes = tile.shared_bytes,
                   .cluster = static_cast<unsigned>(tile.cluster)},
                  context, map, args);
  }

  Int4GroupSizes sizes_;
  int sms_;
  TensorMaps maps_;
};

bool accepts_groups(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  const bool rows = problem.rows == WeightRows::kPlain || problem.n % 2 == 0;
  return device.hopper() && problem.act == ActFormat::kBf16 && rows && problem.n >= 1 &&
         weight.scale_per == ScalePer::kGroup && weight.zero_points == ZeroPoints::kNone &&
         problem.k % weight.group_size == 0 && problem.k % 64 == 0;
}

bool accepts_mxfp4(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return accepts_groups(problem, device) && weight.code == WeightCode::kFp4E2M1 &&
         weight.group_size == 32 && weight.scale_dtype == DType::kF8E8M0;
}

bool accepts_int4(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return accepts_groups(problem, device) && weight.code == WeightCode::kInt4 &&
         (weight.group_size == 32 || weight.group_size == 128) &&
         weight.scale_dtype == DType::kBF16;
}

Result<std::unique_ptr<GemmKernel>> make_int4(const GemmProblem& problem,
                                              const DeviceInfo& device) {
  return problem.weight.group_size == 32 ? ExpertsSm90<Int4Codec<32>>::make(problem, device)
                                         : ExpertsSm90<Int4Codec<128>>::make(problem, device);
}

}  // namespace

const GemmEntry kGemmMxfp4Sm90 = {"gemm_mxfp4_sm90", accepts_mxfp4, ExpertsSm90<Fp4Codec>::make,
                                  true};
const GemmEntry kExpertsW4A16Sm90 = {"experts_w4a16_sm90", accepts_int4, make_int4, true};

}  // namespace nibble::cuda
