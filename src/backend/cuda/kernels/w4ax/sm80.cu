// y [m, n] = x [m, k] in blocks of 4 and 8 bits · (w [n, k] int4)ᵀ for GPUs with products of INT4
// (w4ax/sm80.cuh). Hopper runs them as INT8, to check them: it has kernels of its own.

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/w4ax/pack.cuh"
#include "backend/cuda/kernels/w4ax/sm80.cuh"
#include "backend/cuda/kernels/w4ax/w4ax_sm80.h"

namespace nibble::cuda {
namespace {

template <typename Form>
class W4AxSm80 final : public W4AxPacked {
 public:
  explicit W4AxSm80(const GemmProblem& problem) : W4AxPacked(problem) {}

  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem) {
    NIBBLE_RETURN_IF_ERROR(allow_shared<16>());
    NIBBLE_RETURN_IF_ERROR(allow_shared<kMostTokens>());
    return std::unique_ptr<GemmKernel>(std::make_unique<W4AxSm80>(problem));
  }

  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override {
    return kGemmCounterBytes;
  }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (!takes(args)) {
      return cudaErrorInvalidValue;
    }
    return args.m <= 16 ? run_tiles<16>(args, context) : run_tiles<kMostTokens>(args, context);
  }

 private:
  static constexpr int kMostTokens = 64;
  template <int kTokens>
  static constexpr int kShared = 2 * sm80::W4AxStage<Form, kTokens>::kBytes;

  template <int kTokens>
  static Status allow_shared() {
    return check(
        cudaFuncSetAttribute(sm80::w4ax_kernel<Form, kTokens>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kShared<kTokens>),
        "allowing a kernel its shared memory");
  }

  template <int kTokens>
  cudaError_t run_tiles(const GemmLaunch& args, const LaunchContext& context) const {
    const int64_t token_tiles = (args.m + kTokens - 1) / kTokens;
    if (args.m < 1 || token_tiles > 65535) {
      return args.m == 0 ? cudaSuccess : cudaErrorInvalidValue;
    }
    const sm80::W4AxProduct product{.args = args,
                                    .blocks = *args.blocks,
                                    .pieces = static_cast<const uint8_t*>(args.packed),
                                    .n = n(),
                                    .k = k(),
                                    .row_pieces = count().row_pieces,
                                    .k_blocks = count().k_blocks,
                                    .x_scale_stride = int_scale_stride(args.m)};
    const Grid grid{.blocks = dim3(static_cast<unsigned>((n() + 127) / 128),
                                   static_cast<unsigned>(token_tiles)),
                    .threads = sm80::kW4AxThreads,
                    .shared_bytes = kShared<kTokens>};
    return launch(sm80::w4ax_kernel<Form, kTokens>, grid, context, product);
  }
};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return is_w4ax(problem) && device.major >= 8 && device.shared_bytes >= 99 * 1024;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& /*device*/) {
  switch (problem.weight.group_size) {
    case 128:
      return W4AxSm80<W4AxForm<1>>::make(problem);
    case 64:
      return W4AxSm80<W4AxForm<2>>::make(problem);
    default:
      return W4AxSm80<W4AxForm<4>>::make(problem);
  }
}

}  // namespace

const GemmEntry kGemmW4AxSm80{.name = "gemm_w4ax_sm80", .accepts = accepts, .make = make};

}  // namespace nibble::cuda
