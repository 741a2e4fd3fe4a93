// Rounding of weights to the values of their codes: each to the nearest, or column by column.

#include "backend/cuda/calibration/column_rows.cuh"
#include "backend/cuda/calibration/column_square.cuh"
#include "backend/cuda/calibration/kernels.h"
#include "quant/code_traits.h"

namespace nibble::cuda {
namespace {

constexpr int kPart = kColumnPart;
constexpr int kElementThreads = 256;

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

template <typename Codec>
__global__ __launch_bounds__(kColumnThreads) void column_kernel(const ColumnBlockArgs args,
                                                                const Codec codec) {
  extern __shared__ float4 shared[];
  auto* factor = reinterpret_cast<float*>(shared);  // [kColumnBlock, kColumnBlock]
  const auto count = static_cast<int>(args.count);
  load_square({args.factor, args.factor_stride, count}, factor);
  const int64_t row = int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  for (int begin = 0; begin < count; begin += kPart) {
    float sums[kPart];
    float w[kPart];
    float scales[kPart];
    load_part({args.sums + row, args.stride, begin, count}, 0.0F, sums);
    load_part({args.w + row, args.stride, begin, count}, 0.0F, w);
    add_lines({args.errors + row, args.stride, 0, begin}, factor, begin, sums);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      scales[i] = begin + i < count
                      ? args.scales[args.order[begin + i] / args.width * args.stride + row]
                      : 1.0F;
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (begin + i < count) {
        const float* line = factor + (begin + i) * kSquarePitch + begin;
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
  const cudaError_t raised = cudaFuncSetAttribute(
      column_kernel<Codec>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSquareBytes);
  if (raised != cudaSuccess) {
    return raised;
  }
  column_kernel<Codec><<<static_cast<unsigned>(args.stride / kColumnThreads), kColumnThreads,
                         kSquareBytes, stream>>>(args, codec);
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
  if (args.count < 1 || args.count > kColumnBlock || args.stride % kColumnThreads != 0) {
    return cudaErrorInvalidValue;
  }
  return args.form.fp4 ? launch_columns(args, Fp4Codec{}, stream)
                       : launch_columns(args, IntCodec{args.form.low, args.form.high}, stream);
}

}  // namespace nibble::cuda
