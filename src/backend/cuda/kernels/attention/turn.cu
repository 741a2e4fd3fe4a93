// Multiplies attention's results by the steps of values where the cache has codes alone, turns them
// back where it holds turned heads, and adds the means that were taken off values: one warp per
// head of a row.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/turn.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;

struct TurnBackArgs {
  uint16_t* out;
  int64_t stride;
  int32_t heads;
  int32_t ratio;  // query heads of a KV head
  int64_t count;  // of heads, in all rows
  KvBasis basis;
};

template <int kDim>
__global__ __launch_bounds__(32 * kWarps) void turn_back_kernel(const TurnBackArgs args) {
  ptx::allow_successor();
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto head = static_cast<int32_t>(index % args.heads);
  const HeadValues<kDim> mean = load_mean<kDim>(args.basis.value_mean, head / args.ratio, lane);
  ptx::wait_for_predecessor();
  if (index >= args.count) {
    return;
  }
  uint16_t* at = args.out + index / args.heads * args.stride + int64_t{head} * kDim;
  HeadValues<kDim> x = load_head<kDim>(at, lane);
  multiply_by_steps<kDim>(x, args.basis.value_step, head / args.ratio, lane);
  if (args.basis.turns_values) {
    HeadTurn<kDim>::turn_back(x, lane);
  }
  if (args.basis.value_mean != nullptr) {
    constexpr int kEach = HeadValues<kDim>::kEach;
#pragma unroll
    for (int i = 0; i < 2 * kEach; ++i) {
      x.v[i / kEach][i % kEach] += mean.v[i / kEach][i % kEach];
    }
  }
  store_query<kDim>(x, at, lane);
}

}  // namespace

cudaError_t turn_back_heads(const AttentionLaunch& args, const LaunchContext& context) {
  const int64_t count = int64_t{args.step.rows} * args.shape.heads;
  const Grid grid{dim3(static_cast<unsigned>((count + kWarps - 1) / kWarps)), 32 * kWarps, 0};
  const TurnBackArgs out{.out = static_cast<uint16_t*>(args.out),
                         .stride = args.out_stride,
                         .heads = args.shape.heads,
                         .ratio = args.shape.heads / args.shape.kv.kv_heads,
                         .count = count,
                         .basis = args.basis};
  const auto run = [&](auto kernel) { return launch(kernel, grid, context, out); };
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
