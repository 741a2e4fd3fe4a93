#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "bench/cuda/schedules/act_rows.h"

// norm_kernel and store_row of backend/cuda/kernels/rows for rows of one kind, whose codes are
// stored in one of two ways: nothing else differs.
namespace nibble::cuda {
namespace {

template <ActStore kStore>
__device__ __forceinline__ void store_eight(void* row, int64_t i, F32x8 x, const BlockFactor& to) {
#pragma unroll
  for (float& value : x.v) {
    value = fminf(fmaxf(__fmul_rn(value, to.factor), -to.top), to.top);
  }
  const uint32_t first = int8x4_bits(x.v, 1.0F), second = int8x4_bits(x.v + 4, 1.0F);
  auto* codes = static_cast<uint8_t*>(row);
  if constexpr (kStore == ActStore::kNibbles) {
    *reinterpret_cast<uint32_t*>(codes + i / 2) = join_nibbles(first, second);
  } else {
    *reinterpret_cast<uint2*>(codes + i) = make_uint2(first, second);
  }
}

template <int kPieces, ActStore kStore>
__global__ __launch_bounds__(kMaxRowThreads) void act_rows(const ActRows args) {
  constexpr bool kEarly = kPieces <= 2;  // weights fit in registers beside the row
  F32x8 weight[kPieces] = {};
  if constexpr (kEarly) {
    for_each_piece<kPieces>(args.n,
                            [&](int p, int64_t i) { weight[p] = load_f32x8(args.weight + i); });
  }
  ptx::allow_successor();
  ptx::wait_for_predecessor();

  const int64_t row = blockIdx.x;
  F32x8 kept[kPieces];
  float sum = 0.0F;
  for_each_piece<kPieces>(args.n, [&](int p, int64_t i) {
    kept[p] = load_f32x8(args.x + row * args.n + i);
#pragma unroll
    for (const float value : kept[p].v) {
      sum = fmaf(value, value, sum);
    }
  });
  __shared__ float sums[32];
  const float mean = sum_of_block(sum, sums) / static_cast<float>(args.n);
  const float factor = 1.0F / sqrtf(mean + ActRows::kEps);
  uint32_t largest = 0;
  for_each_piece<kPieces>(args.n, [&](int p, int64_t i) {
    const F32x8 w = kEarly ? weight[p] : load_f32x8(args.weight + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      kept[p].v[j] = kept[p].v[j] * factor * w.v[j];
      largest = max(largest, magnitude_bits(kept[p].v[j]));
    }
  });
  __shared__ uint32_t maxima[32];
  const BlockFactor to = block_factor(max_of_block(largest, maxima), 4, ActRows::kClip);
  if (threadIdx.x == 0) {
    args.scales[row] = to.scale;
  }
  const int64_t row_bytes = kStore == ActStore::kNibbles ? args.n / 2 : args.n;
  void* codes = static_cast<uint8_t*>(args.codes) + row * row_bytes;
  for_each_piece<kPieces>(args.n,
                          [&](int p, int64_t i) { store_eight<kStore>(codes, i, kept[p], to); });
}

template <ActStore kStore>
cudaError_t launch_rows_of(const ActRows& args, const LaunchContext& context) {
  const RowShape shape = row_shape(args.n);
  const auto kernel = shape.pieces == 1   ? act_rows<1, kStore>
                      : shape.pieces == 2 ? act_rows<2, kStore>
                                          : act_rows<4, kStore>;
  return launch(kernel,
                {.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = shape.threads},
                context, args);
}

}  // namespace

cudaError_t write_act_rows(const ActRows& args, const LaunchContext& context) {
  if (args.rows < 1 || args.rows > INT32_MAX || !row_width_ok(args.n) || args.n > ActRows::kMostN) {
    return cudaErrorInvalidValue;
  }
  return args.store == ActStore::kNibbles ? launch_rows_of<ActStore::kNibbles>(args, context)
                                          : launch_rows_of<ActStore::kBytes>(args, context);
}

}  // namespace nibble::cuda
