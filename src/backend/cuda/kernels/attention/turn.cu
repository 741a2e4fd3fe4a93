// Turns the heads of attention's results back where the cache holds turned ones: one warp per head
// of a row.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/turn.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;

template <int kDim>
__global__ __launch_bounds__(32 * kWarps) void turn_back_kernel(uint16_t* out,
                                                                int64_t stride,
                                                                int32_t heads,
                                                                int64_t count) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (index >= count) {
    return;
  }
  uint16_t* head = out + index / heads * stride + index % heads * kDim;
  HeadValues<kDim> x = load_head<kDim>(head, lane);
  HeadTurn<kDim>::turn_back(x, lane);
  store_query<kDim>(x, head, lane);
}

}  // namespace

cudaError_t turn_back_heads(const AttentionLaunch& args, const LaunchContext& context) {
  const int64_t count = int64_t{args.step.rows} * args.shape.heads;
  const Grid grid{dim3(static_cast<unsigned>((count + kWarps - 1) / kWarps)), 32 * kWarps, 0};
  auto* out = static_cast<uint16_t*>(args.out);
  const auto run = [&](auto kernel) {
    return launch(kernel, grid, context, out, args.out_stride, args.shape.heads, count);
  };
  switch (args.shape.kv.head_dim) {
    case 64:
      return run(turn_back_kernel<64>);
    case 128:
      return run(turn_back_kernel<128>);
    case 256:
      return run(turn_back_kernel<256>);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
