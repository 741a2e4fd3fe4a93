// y [m, n] (+)= x [m, k] bf16 · (codes [n, k] int4 * scales [n, k / group])ᵀ (+ bias) on Hopper:
// groups of 32 and 128, scales representable in BF16, k a multiple of the group. Weights are
// decoded in registers to BF16, rounded once, and multiplied by wgmma with sums in f32; the main
// loop is w4a16_sm90/w4a16_sm90.cuh. Sums of a split tile are added in a fixed order: results
// repeat bit for bit, but the tile, and so the order of a sum, follows from m. Source of the
// decoding: Kim, Henry, Fahim, Awadalla, "Who Says Elephants Can't Run: Bringing Large Scale MoE
// Models into Cloud Scale Production", 2022 (a code placed in the mantissa of a power of two).

#include "backend/cuda/forwarding_gemm.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/decode.h"
#include "backend/cuda/kernels/w4a16_sm90/pack.cuh"
#include "backend/cuda/kernels/w4a16_sm90/plan.h"
#include "backend/cuda/kernels/w4a16_sm90/planes.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"

namespace nibble::cuda {
namespace {

template <int kGroup>
GemmSm90Family make_family() {
  using Packing = Int4GroupPacking<Int4Codec<kGroup>>;
  return {.name = kGroup == 32 ? "gemm_w4a16_sm90 g32" : "gemm_w4a16_sm90 g128",
          .tiles = w4a16_tiles<kGroup>(),
          .unit_bytes = Int4GroupLayout<kGroup>::kPairBytes / 2,
          .block_elements = 64,
          .depth = 2,
          .clocks_per_unit_token = 2.0,
          .pack =
              [](const void* codes, int64_t n, int64_t k, void* units, cudaStream_t stream) {
                return Packing::pack(codes, {n, k}, units, stream);
              },
          .unpack =
              [](const void* units, int64_t n, int64_t k, void* codes, cudaStream_t stream) {
                return Packing::unpack(units, {n, k}, codes, stream);
              },
          .row_scales = false,
          .pack_scales =
              [](const float* scales, int64_t n, int64_t k, void* units, cudaStream_t stream) {
                return Packing::pack_scales(scales, {n, k}, units, stream);
              },
          .unpack_scales =
              [](const void* units, int64_t n, int64_t k, float* scales, cudaStream_t stream) {
                return Packing::unpack_scales(units, {n, k}, scales, stream);
              },
          .plan = plan_w4a16};
}

const GemmSm90Family& family(int group_size) {
  static const GemmSm90Family kFamilies[] = {make_family<32>(), make_family<128>()};
  return kFamilies[group_size == 32 ? 0 : 1];
}

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return device.hopper() && problem.act == ActFormat::kBf16 && weight.code == WeightCode::kInt4 &&
         weight.scale_per == ScalePer::kGroup &&
         (weight.group_size == 32 || weight.group_size == 128) &&
         weight.scale_dtype == DType::kBF16 && weight.zero_points == ZeroPoints::kNone &&
         problem.k % weight.group_size == 0 && problem.n >= 1;
}

/// Very few tokens go to the kernels of w4a16_sm90/planes.cuh, few to those of
/// w4a16_sm90/decode.cuh, more to this family's tiles.
class GemmW4A16Sm90 final : public ForwardingGemm {
 public:
  GemmW4A16Sm90(std::unique_ptr<GemmKernel> wide,
                const W4A16Planes& planes,
                const W4A16Decode& decode,
                int64_t most)
      : ForwardingGemm(std::move(wide)), planes_(planes), decode_(decode), most_(most) {}
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    return planes_.takes(args.m) ? planes_.run(args, context)
           : args.m <= most_     ? decode_.run(args, context)
                                 : kernel().run(args, context);
  }
  [[nodiscard]] int choose(int64_t m) const override {
    // Tiles have numbers from 0 on.
    return planes_.takes(m) ? -100 - static_cast<int>(m)
           : m <= most_     ? (m <= kW4A16DecodeSizes[0] ? -2 : -1)
                            : kernel().choose(m);
  }

 private:
  W4A16Planes planes_;
  W4A16Decode decode_;
  int64_t most_;  // tokens that decode_ takes
};

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(auto wide, make_w4a16_wide(problem, device));
  NIBBLE_ASSIGN_OR_RETURN(const W4A16Planes planes, W4A16Planes::make(problem, device));
  NIBBLE_ASSIGN_OR_RETURN(const W4A16Decode decode, W4A16Decode::make(problem, device));
  return std::unique_ptr<GemmKernel>(std::make_unique<GemmW4A16Sm90>(
      std::move(wide), planes, decode, problem.k % 128 == 0 ? kW4A16DecodeTokens : 0));
}

}  // namespace

Result<std::unique_ptr<GemmKernel>> make_w4a16_wide(const GemmProblem& problem,
                                                    const DeviceInfo& device) {
  return GemmSm90::make(family(problem.weight.group_size), problem, device);
}

const GemmEntry kGemmW4A16Sm90 = {"gemm_w4a16_sm90", accepts, make};

}  // namespace nibble::cuda
