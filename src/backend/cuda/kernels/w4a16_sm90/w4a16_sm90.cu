// y [m, n] (+)= x [m, k] bf16 · (codes [n, k] int4 * scales [n, k / group])ᵀ (+ bias) on Hopper:
// groups of 32 and 128, scales representable in BF16, k a multiple of the group. Weights are
// decoded in registers to BF16, rounded once, and multiplied by wgmma with sums in f32; the main
// loop is w4a16_sm90/w4a16_sm90.cuh. Sums of a split tile are added in a fixed order: results
// repeat bit for bit, but the tile, and so the order of a sum, follows from m. Source of the
// decoding: Kim, Henry, Fahim, Awadalla, "Who Says Elephants Can't Run: Bringing Large Scale MoE
// Models into Cloud Scale Production", 2022 (a code placed in the mantissa of a power of two).

#include <cuda_bf16.h>

#include "backend/cuda/forwarding_gemm.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/decode.h"
#include "backend/cuda/kernels/w4a16_sm90/layout.cuh"
#include "backend/cuda/kernels/w4a16_sm90/plan.h"
#include "backend/cuda/kernels/w4a16_sm90/planes.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"
#include "backend/cuda/launch.h"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

constexpr int kPackThreads = 256;

/// A matrix of codes or scales with the sizes of its packed form.
struct PackArgs {
  void* packed = nullptr;
  void* plain = nullptr;  // codes, or scales [n, groups]
  int64_t n = 0, k = 0;
  int64_t row_bytes = 0;  // of canonical codes
  int64_t k_blocks = 0;   // packed units of a row block, even
  int64_t row_blocks = 0;
};

template <int kGroup>
__device__ uint8_t* unit_pair(const PackArgs& args, int64_t block, int64_t k_block) {
  const int64_t pair = k_block / 2 * args.row_blocks + block;
  return static_cast<uint8_t*>(args.packed) + pair * Int4GroupLayout<kGroup>::kPairBytes;
}

/// One thread for a packed word; codes beyond n or k are -8 with scales of 0.
template <int kGroup>
__global__ void pack_codes(PackArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t unit = index / 512;
  const int64_t block = unit / args.k_blocks, k_block = unit % args.k_blocks;
  if (block * 64 >= args.n) {
    return;
  }
  const int word = static_cast<int>(index % 512), thread = word / 4, step = word % 4;
  const int lane = thread % 32;
  const auto* codes = static_cast<const uint8_t*>(args.plain);
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t row = block * 64 + thread / 32 * 16 + lane / 4 * 2 + i % 2;
    const int64_t k = k_block * 64 + step * 16 + lane % 4 * 2 + i / 2 * 8;
    const uint32_t two = row < args.n && k < args.k ? codes[row * args.row_bytes + k / 2] : 0U;
    packed |= (two & 15U) << (4 * i) | (two >> 4) << (4 * i + 16);
  }
  using Layout = Int4GroupLayout<kGroup>;
  auto* words =
      reinterpret_cast<uint32_t*>(unit_pair<kGroup>(args, block, k_block) +
                                  thread / 32 * Layout::kSliceBytes + Layout::codes(k_block % 2));
  words[lane * 4 + step] = packed;
}

/// One thread for a byte of canonical codes, padding of rows included.
template <int kGroup>
__global__ void unpack_codes(PackArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / args.row_bytes, k = index % args.row_bytes * 2;
  if (row >= args.n) {
    return;
  }
  uint32_t two = 0;
  if (k < args.k) {
    using Layout = Int4GroupLayout<kGroup>;
    const int lane = static_cast<int>(row % 16 / 2 * 4 + k % 8 / 2);
    const int i = static_cast<int>(row % 2 + k % 16 / 8 * 2);
    const auto* words = reinterpret_cast<const uint32_t*>(
        unit_pair<kGroup>(args, row / 64, k / 64) + row % 64 / 16 * Layout::kSliceBytes +
        Layout::codes(k / 64 % 2));
    const uint32_t word = words[lane * 4 + k % 64 / 16] >> (4 * i);
    two = (word & 15U) | (word >> 16 & 15U) << 4;
  }
  static_cast<uint8_t*>(args.plain)[index] = static_cast<uint8_t>(two);
}

/// Place of the scale of this row and group.
template <int kGroup>
__device__ __nv_bfloat16* scale_place(const PackArgs& args, int64_t row, int64_t group) {
  const int64_t k_block = group * kGroup / 64;
  const int64_t within = kGroup < 64 ? group % (64 / kGroup) : 0;
  using Layout = Int4GroupLayout<kGroup>;
  return reinterpret_cast<__nv_bfloat16*>(
             unit_pair<kGroup>(args, row / 64, k_block) + row % 64 / 16 * Layout::kSliceBytes +
             Layout::scales(k_block % 2) + within * Layout::kGroupBytes) +
         row % 16;  // [lane / 4][2]
}

/// One thread for a scale, the zeros of padding included.
template <int kGroup>
__global__ void pack_scales(PackArgs args) {
  const int64_t packed_groups = args.k_blocks * 64 / kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / packed_groups, group = index % packed_groups;
  if (row >= (args.n + 63) / 64 * 64) {
    return;
  }
  const int64_t groups = args.k / kGroup;
  const bool there = row < args.n && group < groups;
  const float scale = there ? static_cast<const float*>(args.plain)[row * groups + group] : 0.0F;
  *scale_place<kGroup>(args, row, group) = __float2bfloat16_rn(scale);
}

template <int kGroup>
__global__ void unpack_scales(PackArgs args) {
  const int64_t groups = args.k / kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / groups, group = index % groups;
  if (row < args.n) {
    static_cast<float*>(args.plain)[index] =
        __bfloat162float(*scale_place<kGroup>(args, row, group));
  }
}

PackArgs pack_args(void* packed, void* plain, int64_t n, int64_t k) {
  return {.packed = packed,
          .plain = plain,
          .n = n,
          .k = k,
          .row_bytes = QuantTensor::code_row_bytes(WeightCode::kInt4, k),
          .k_blocks = (k + 127) / 128 * 2,
          .row_blocks = (n + 63) / 64};
}

cudaError_t run(void (*kernel)(PackArgs),
                int64_t threads,
                const PackArgs& args,
                cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((threads + kPackThreads - 1) / kPackThreads);
  return launch(kernel, {.blocks = dim3(blocks), .threads = kPackThreads},
                {.stream = stream, .overlap = false}, args);
}

template <int kGroup>
GemmSm90Family make_family() {
  return {.name = kGroup == 32 ? "gemm_w4a16_sm90 g32" : "gemm_w4a16_sm90 g128",
          .tiles = w4a16_tiles<kGroup>(),
          .unit_bytes = Int4GroupLayout<kGroup>::kPairBytes / 2,
          .block_elements = 64,
          .depth = 2,
          .clocks_per_unit_token = 2.0,
          .pack =
              [](const void* codes, int64_t n, int64_t k, void* units, cudaStream_t stream) {
                const PackArgs args = pack_args(units, const_cast<void*>(codes), n, k);
                return run(pack_codes<kGroup>, (n + 63) / 64 * args.k_blocks * 512, args, stream);
              },
          .unpack =
              [](const void* units, int64_t n, int64_t k, void* codes, cudaStream_t stream) {
                const PackArgs args = pack_args(const_cast<void*>(units), codes, n, k);
                return run(unpack_codes<kGroup>, n * args.row_bytes, args, stream);
              },
          .pack_scales =
              [](const float* scales, int64_t n, int64_t k, void* units, cudaStream_t stream) {
                const PackArgs args = pack_args(units, const_cast<float*>(scales), n, k);
                return run(pack_scales<kGroup>, (n + 63) / 64 * args.k_blocks * 4096 / kGroup, args,
                           stream);
              },
          .unpack_scales =
              [](const void* units, int64_t n, int64_t k, float* scales, cudaStream_t stream) {
                return run(unpack_scales<kGroup>, n * k / kGroup,
                           pack_args(const_cast<void*>(units), scales, n, k), stream);
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
