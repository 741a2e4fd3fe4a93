// y [m, n] = x [m, k] · (w [n, k] int4)ᵀ with one scale for each channel, where the channels of x
// are in INT8, with one scale for each token, but for blocks of them that are in BF16. Method and
// layouts: gemm_sm80/mma.cuh, but that K has the order of wide_order(), and steps of 64 channels
// in INT8 come before those in BF16, to whose sums theirs are turned in place.

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"
#include "backend/cuda/kernels/w4a8_bf16.h"
#include "backend/cuda/memory.h"
#include "base/check.h"

namespace nibble::cuda {
namespace sm80 {
namespace {

using Int8 = CodecW4A8;
using Bf16 = CodecW4A16Channel;

/// Of a ring whose steps are of either kind.
template <int kTokens>
struct WideStage : Stage<Bf16, kTokens> {
  using S = Stage<Int8, kTokens>;
  static_assert(S::kCodeBytes == WideStage::kCodeBytes && S::kX == WideStage::kX &&
                S::kBytes <= WideStage::kBytes);
};

struct WideProduct {
  Product product;
  int32_t int8_steps = 0;
  int64_t x_row_bytes = 0;
};

/// Starts the copies of one step's activations; tokens past the end are zeros.
template <int kTokens>
__device__ __forceinline__ void copy_wide(const WideProduct& p, int step, uint32_t stage) {
  const bool int8 = step < p.int8_steps;
  const int pieces = kTokens * (int8 ? 4 : 8);
  const int64_t column = 64 * (int64_t{step} + max(step - p.int8_steps, 0));  // bytes
  const auto* x = static_cast<const uint8_t*>(p.product.args.x);
  const int64_t first = int64_t{blockIdx.y} * kTokens;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
    const int plane = i / (kTokens * 4);
    const int64_t token = first + i / 4 % kTokens;
    const bool valid = token < p.product.args.m;
    const uint8_t* source =
        x + (valid ? token : first) * p.x_row_bytes + column + plane * 64 + i % 4 * 16;
    ptx::copy_async16(stage + WideStage<kTokens>::kX + static_cast<unsigned>(i) * 16, source,
                      valid ? 16 : 0);
  }
}

/// What sums of INT8, 16 times too large, are in F32.
template <int kTokens>
__device__ __forceinline__ void turn(const GemmLaunch& args,
                                     const Sums<int32_t, kTokens>& exact,
                                     Sums<float, kTokens>& sums) {
  const int64_t first = int64_t{blockIdx.y} * kTokens + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = first + 8 * j + i;
      factors[i] = __fmul_rn(__ldcg(args.x_scales + min(token, args.m - 1)), Int8::kCodeUnit);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums.v[half][j][i] = __fmul_rn(static_cast<float>(exact.v[half][j][i]), factors[i % 2]);
      }
    }
  }
}

template <int kTokens>
__global__ __launch_bounds__(kThreads) void wide_kernel(const WideProduct wide) {
  using S = WideStage<kTokens>;
  extern __shared__ __align__(16) uint8_t ring[];
  const Product& p = wide.product;
  const uint32_t shared = ptx::shared_address(ring);
  const auto begin = static_cast<int>(int64_t{p.steps} * blockIdx.z / gridDim.z);
  const auto end = static_cast<int>(int64_t{p.steps} * (blockIdx.z + 1) / gridDim.z);
  const auto offset_of = [&](int step) {
    return static_cast<uint32_t>((step - begin) % kStages) * S::kBytes;
  };
  for (int step = begin; step < min(begin + kStages - 1, end); ++step) {
    copy_weights<Bf16, kTokens>(p, step, shared + offset_of(step));
  }
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  for (int step = begin; step < begin + kStages - 1; ++step) {
    if (step < end) {
      copy_wide<kTokens>(wide, step, shared + offset_of(step));
    }
    ptx::copy_commit();  // one group per step, an empty one past the end
  }
  const auto receive = [&](int step) {
    ptx::copy_wait<kStages - 2>();
    __syncthreads();  // the step has arrived for all, and all have left the stage before it
    const int next = step + kStages - 1;
    if (next < end) {
      copy_weights<Bf16, kTokens>(p, next, shared + offset_of(next));
      copy_wide<kTokens>(wide, next, shared + offset_of(next));
    }
    ptx::copy_commit();
    return ring + offset_of(step);
  };
  int step = begin;
  Sums<int32_t, kTokens> exact = {};
  for (; step < min(wide.int8_steps, end); ++step) {
    multiply<Int8, kTokens>(receive(step), exact);
  }
  Sums<float, kTokens> sums;
  turn<kTokens>(p.args, exact, sums);
  for (; step < end; ++step) {
    multiply<Bf16, kTokens>(receive(step), sums);
  }
  if (p.splits == 1 || reduce_splits<float, kTokens>(p, sums)) {
    store<Bf16, kTokens>(p, sums);
  }
}

/// Where packed words have their codes from.
struct WidePacking {
  PackArgs args;
  const int32_t* runs = nullptr;  // WideOrder::runs
  int64_t int8_steps = 0, steps = 0;

  /// body(codes' number, their bits' place) for the elements of a packed word that are in the
  /// matrix; what flips the word.
  template <typename Codec, typename Body>
  __device__ __forceinline__ uint32_t visit(int64_t index, int64_t step, const Body& body) const {
    const auto word = static_cast<int>(index % 4), lane = static_cast<int>(index / 4 % 32);
    const auto chunk = static_cast<int>(index / 128 % Codec::kChunks);
    const int64_t row0 = index / (512 * Codec::kChunks) / steps * kTileRows +
                         index / (128 * Codec::kChunks) % 4 * 32;
    for (int e = 0; e < 8; ++e) {
      const Source source = Codec::source(lane, chunk, word, e);
      const int64_t row = row0 + source.row;
      const int run = runs[step * 2 + source.column / 32];
      if (row < args.n && run >= 0) {
        body(row * args.k + int64_t{run} * 32 + source.column % 32, 4 * e);
      }
    }
    return Codec::kFlip;
  }
  /// The same for a word of any step.
  template <typename Body>
  __device__ __forceinline__ uint32_t for_each(int64_t index, const Body& body) const {
    static_assert(Int8::kChunks == Bf16::kChunks);
    const int64_t step = index / (512 * Int8::kChunks) % steps;
    return step < int8_steps ? visit<Int8>(index, step, body) : visit<Bf16>(index, step, body);
  }
};

__global__ void pack_wide(const WidePacking p) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= p.args.words) {
    return;
  }
  uint32_t packed = 0x88888888U;  // weights of 0
  const uint32_t flip = p.for_each(index, [&](int64_t code, int place) {
    const uint32_t bits = (p.args.codes[code / 8] >> (code % 8 * 4)) & 15U;
    packed = (packed & ~(15U << place)) | bits << place;
  });
  p.args.packed[index] = packed ^ flip;
}

__global__ void unpack_wide(const WidePacking p) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= p.args.words) {
    return;
  }
  const int64_t step = index / (512 * Int8::kChunks) % p.steps;
  const uint32_t packed = p.args.packed[index] ^ (step < p.int8_steps ? Int8::kFlip : Bf16::kFlip);
  p.for_each(index, [&](int64_t code, int place) {
    atomicOr(p.args.codes + code / 8, ((packed >> place) & 15U) << (code % 8 * 4));
  });
}

class WideMma final : public GemmKernel {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
    CHECK(problem.blocks != nullptr);
    const WideOrder order = wide_order(*problem.blocks);
    auto kernel = std::make_unique<WideMma>(problem, order, device);
    const size_t bytes = order.runs.size() * sizeof(int32_t);
    NIBBLE_ASSIGN_OR_RETURN(kernel->runs_, allocate_device(bytes, "the order of channels"));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(kernel->runs_.as<void>(), order.runs.data(), bytes));
    NIBBLE_RETURN_IF_ERROR(allow_shared<8>());
    NIBBLE_RETURN_IF_ERROR(allow_shared<16>());
    NIBBLE_RETURN_IF_ERROR(allow_shared<64>());
    return std::unique_ptr<GemmKernel>(std::move(kernel));
  }

  WideMma(const GemmProblem& problem, const WideOrder& order, const DeviceInfo& device)
      : n_(problem.n),
        k_(problem.k),
        blocks_(kBlocksPerSm * device.sms),
        rows_(order.rows(nullptr)),
        int8_steps_(2 * rows_.int8_blocks),
        steps_(int8_steps_ + rows_.bf16_blocks) {}

  [[nodiscard]] size_t packed_bytes() const override {
    return code_bytes() + static_cast<size_t>(row_tiles() * kTileRows) * sizeof(float);
  }

  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    auto* base = static_cast<uint8_t*>(packed);
    const WidePacking packing = packing_of(const_cast<void*>(codes), packed);
    cudaError_t error =
        cudaMemsetAsync(base + code_bytes(), 0, packed_bytes() - code_bytes(), stream);
    if (error == cudaSuccess) {
      error = launch(pack_wide, flat_grid(packing.args.words), {.stream = stream, .overlap = false},
                     packing);
    }
    return error == cudaSuccess ? cudaMemcpyAsync(base + code_bytes(), scales, scale_bytes(),
                                                  cudaMemcpyDeviceToDevice, stream)
                                : error;
  }

  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override {
    const WidePacking packing = packing_of(codes, const_cast<void*>(packed));
    cudaError_t error = cudaMemsetAsync(codes, 0, static_cast<size_t>(n_ * k_ / 2), stream);
    if (error == cudaSuccess) {
      error = launch(unpack_wide, flat_grid(packing.args.words),
                     {.stream = stream, .overlap = false}, packing);
    }
    return error == cudaSuccess
               ? cudaMemcpyAsync(scales, static_cast<const uint8_t*>(packed) + code_bytes(),
                                 scale_bytes(), cudaMemcpyDeviceToDevice, stream)
               : error;
  }

  /// As that of GemmMma.
  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override {
    return static_cast<size_t>(blocks_) * (4 + 64 * kThreads * 4);
  }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (args.blocks == nullptr || args.blocks->scales != BlockScales::kWide ||
        args.blocks->wide.int8_blocks != rows_.int8_blocks ||
        args.blocks->wide.bf16_blocks != rows_.bf16_blocks) {
      return cudaErrorInvalidValue;
    }
    return args.m <= 8    ? run_tiles<8>(args, context)
           : args.m <= 16 ? run_tiles<16>(args, context)
                          : run_tiles<64>(args, context);
  }

 private:
  template <int kTokens>
  static Status allow_shared() {
    constexpr int kBytes = kStages * WideStage<kTokens>::kBytes;
    return check(cudaFuncSetAttribute(wide_kernel<kTokens>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                 "allowing a kernel its shared memory");
  }
  [[nodiscard]] int64_t row_tiles() const { return (n_ + kTileRows - 1) / kTileRows; }
  [[nodiscard]] size_t code_bytes() const {
    return static_cast<size_t>(row_tiles() * kTileRows * steps_ * kStep / 2);
  }
  [[nodiscard]] size_t scale_bytes() const { return static_cast<size_t>(n_) * sizeof(float); }
  [[nodiscard]] WidePacking packing_of(void* codes, void* packed) const {
    return {.args = {.codes = static_cast<uint32_t*>(codes),
                     .packed = static_cast<uint32_t*>(packed),
                     .n = n_,
                     .k = k_,
                     .words = static_cast<int64_t>(code_bytes() / 4)},
            .runs = runs_.as<int32_t>(),
            .int8_steps = int8_steps_,
            .steps = steps_};
  }

  template <int kTokens>
  cudaError_t run_tiles(const GemmLaunch& args, const LaunchContext& context) const {
    const int64_t token_tiles = (args.m + kTokens - 1) / kTokens;
    if (args.m < 1 || token_tiles > 65535) {
      return args.m == 0 ? cudaSuccess : cudaErrorInvalidValue;
    }
    const int64_t splits = std::clamp<int64_t>(blocks_ / (row_tiles() * token_tiles), 1,
                                               std::max<int64_t>(1, steps_ / kStages));
    const auto* packed = static_cast<const uint8_t*>(args.packed);
    auto* workspace = static_cast<uint32_t*>(args.workspace);
    const WideProduct product{
        .product = {.args = args,
                    .codes = packed,
                    .scales = packed + code_bytes(),
                    .n = n_,
                    .steps = static_cast<int32_t>(steps_),
                    .splits = static_cast<int32_t>(splits),
                    .arrived = workspace,
                    .partial = reinterpret_cast<int32_t*>(workspace + blocks_)},
        .int8_steps = static_cast<int32_t>(int8_steps_),
        .x_row_bytes = rows_.row_bytes()};
    const Grid grid{
        .blocks = dim3(static_cast<unsigned>(row_tiles()), static_cast<unsigned>(token_tiles),
                       static_cast<unsigned>(splits)),
        .threads = kThreads,
        .shared_bytes = size_t{kStages} * WideStage<kTokens>::kBytes};
    return launch(wide_kernel<kTokens>, grid, context, product);
  }

  int64_t n_, k_;
  int64_t blocks_;
  WideRows rows_;
  int64_t int8_steps_, steps_;  // of 64 channels
  DeviceBuffer runs_;
};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return is_w4a8_bf16(problem) && device.major >= 8 && device.shared_bytes >= 99 * 1024;
}

}  // namespace
}  // namespace sm80

const GemmEntry kGemmW4A8Bf16Sm80 = {"gemm_w4a8_bf16_sm80", sm80::accepts, sm80::WideMma::make};

}  // namespace nibble::cuda
