// Rounding of weights to the values of their codes: each to the nearest, or column by column.

#include "backend/cuda/calibration/kernels.h"
#include "quant/code_traits.h"

namespace nibble::cuda {
namespace {

constexpr int kRowThreads = 64;  // rows of a block
constexpr int kPart = 32;        // columns whose sums a thread has in registers
constexpr int kElementThreads = 256;

/// The value of the nearest code. Every operation is rounded by itself, as on the CPU.
struct IntCodec {
  float low;
  float high;

  __device__ __forceinline__ float value(float x, float scale, float zero) const {
    const float shifted = __fadd_rn(__fdiv_rn(x, scale), zero);
    const float code = rintf(fminf(fmaxf(shifted, low), high));
    return __fmul_rn(__fsub_rn(code, zero), scale);
  }
};

/// E2M1: steps of 0.5 below 2, of 1 below 4, of 2 up to 6; ties to the even code.
struct Fp4Codec {
  __device__ __forceinline__ float value(float x, float scale, float /*zero*/) const {
    const float steps = __fdiv_rn(x, scale);
    const float size = fminf(fabsf(steps), 6.0F);
    const float step = size < 2.0F ? 0.5F : size < 4.0F ? 1.0F : 2.0F;
    const float rounded = __fmul_rn(rintf(__fdiv_rn(size, step)), step);
    return __fmul_rn(copysignf(rounded, steps), scale);
  }
};

template <typename Codec>
__global__ __launch_bounds__(kElementThreads) void nearest_kernel(const NearestArgs args,
                                                                  const Codec codec) {
  const int64_t i = int64_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (i >= args.rows * args.k) {
    return;
  }
  const int64_t row = i / args.k;
  const int64_t group = (i - row * args.k) / (args.k / args.groups);
  const int64_t at = row * args.groups + group;
  args.values[i] =
      codec.value(args.w[i], args.scales[at], args.zeros == nullptr ? 0.0F : args.zeros[at]);
}

/// The square of the factor, with zeros where it ends.
__device__ __forceinline__ void load_factor(const ColumnBlockArgs& args, float* factor) {
  for (int i = static_cast<int>(threadIdx.x); i < kColumnBlock * kColumnBlock; i += kRowThreads) {
    const int64_t row = i / kColumnBlock;
    const int64_t column = i % kColumnBlock;
    const bool inside = row < args.count && column < args.count && row <= column;
    factor[i] = inside ? args.factor[row * args.factor_stride + column] : 0.0F;
  }
  __syncthreads();
}

/// Sums of kPart columns with what the errors of the block's earlier ones add.
__device__ __forceinline__ void gather_sums(const ColumnBlockArgs& args,
                                            const float* factor,
                                            int64_t begin,
                                            int64_t row,
                                            float (&sums)[kPart]) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    sums[i] = begin + i < args.count ? args.sums[(begin + i) * args.stride + row] : 0.0F;
  }
  for (int64_t t = 0; t < begin; ++t) {
    const float error = args.errors[t * args.stride + row];
    const auto* line = reinterpret_cast<const float4*>(factor + t * kColumnBlock + begin);
#pragma unroll
    for (int i = 0; i < kPart / 4; ++i) {
      const float4 r = line[i];
      sums[4 * i] = __fmaf_rn(error, r.x, sums[4 * i]);
      sums[4 * i + 1] = __fmaf_rn(error, r.y, sums[4 * i + 1]);
      sums[4 * i + 2] = __fmaf_rn(error, r.z, sums[4 * i + 2]);
      sums[4 * i + 3] = __fmaf_rn(error, r.w, sums[4 * i + 3]);
    }
  }
}

template <typename Codec>
__global__ __launch_bounds__(kRowThreads) void column_kernel(const ColumnBlockArgs args,
                                                             const Codec codec) {
  extern __shared__ float4 shared[];
  auto* factor = reinterpret_cast<float*>(shared);  // [kColumnBlock, kColumnBlock]
  load_factor(args, factor);
  const int64_t row = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  for (int64_t begin = 0; begin < args.count; begin += kPart) {
    float sums[kPart];
    float w[kPart];
    float scales[kPart];
    gather_sums(args, factor, begin, row, sums);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const bool inside = begin + i < args.count;
      w[i] = inside ? args.w[(begin + i) * args.stride + row] : 0.0F;
      scales[i] =
          inside ? args.scales[args.order[begin + i] / args.width * args.stride + row] : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (begin + i < args.count) {
        const float* line = factor + (begin + i) * kColumnBlock + begin;
        const float zero = args.zeros == nullptr
                               ? 0.0F
                               : args.zeros[args.order[begin + i] / args.width * args.stride + row];
        const float target = __fadd_rn(w[i], __fdiv_rn(sums[i], line[i]));
        const float value = codec.value(target, scales[i], zero);
        const float error = __fsub_rn(w[i], value);
        args.w[(begin + i) * args.stride + row] = value;
        args.errors[(begin + i) * args.stride + row] = error;
#pragma unroll
        for (int next = i + 1; next < kPart; ++next) {
          sums[next] = __fmaf_rn(error, line[next], sums[next]);
        }
      }
    }
  }
}

template <typename Codec>
cudaError_t launch_columns(const ColumnBlockArgs& args, const Codec& codec, cudaStream_t stream) {
  constexpr int kSharedBytes = kColumnBlock * kColumnBlock * sizeof(float);
  const cudaError_t raised = cudaFuncSetAttribute(
      column_kernel<Codec>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (raised != cudaSuccess) {
    return raised;
  }
  column_kernel<Codec>
      <<<static_cast<unsigned>(args.stride / kRowThreads), kRowThreads, kSharedBytes, stream>>>(
          args, codec);
  return cudaGetLastError();
}

}  // namespace

ValueForm value_form(const WeightFormat& format) {
  const CodeTraits& traits = code_traits(format.code);
  return {.fp4 = format.code == WeightCode::kFp4E2M1,
          .low = static_cast<float>(traits.low),
          .high = static_cast<float>(traits.high)};
}

cudaError_t nearest_values(const NearestArgs& args, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((args.rows * args.k + kElementThreads - 1) / kElementThreads);
  if (args.form.fp4) {
    nearest_kernel<<<blocks, kElementThreads, 0, stream>>>(args, Fp4Codec{});
  } else {
    nearest_kernel<<<blocks, kElementThreads, 0, stream>>>(args,
                                                           IntCodec{args.form.low, args.form.high});
  }
  return cudaGetLastError();
}

cudaError_t round_column_block(const ColumnBlockArgs& args, cudaStream_t stream) {
  if (args.count < 1 || args.count > kColumnBlock || args.stride % kRowThreads != 0) {
    return cudaErrorInvalidValue;
  }
  return args.form.fp4 ? launch_columns(args, Fp4Codec{}, stream)
                       : launch_columns(args, IntCodec{args.form.low, args.form.high}, stream);
}

}  // namespace nibble::cuda
