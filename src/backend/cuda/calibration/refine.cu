// Codes and scales that are there, bettered one after the other.

#include "backend/cuda/calibration/column_square.cuh"
#include "backend/cuda/calibration/refine_kernels.h"
#include "backend/cuda/calibration/refine_rows.cuh"

namespace nibble::cuda {
namespace {

constexpr int kRefineBytes = kSquareBytes + kSquarePitch * static_cast<int>(sizeof(float));

__device__ __forceinline__ int64_t row_of_thread() {
  return int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
}

template <typename Codec>
__global__ __launch_bounds__(kColumnThreads) void sweep_kernel(const RefineBlockArgs args,
                                                               const Codec codec) {
  extern __shared__ FourFloats shared[];
  auto* square = reinterpret_cast<float*>(shared);
  float* inverses = square + kSquarePitch * kSquarePitch;
  load_square({args.sums, args.sums_stride, args.count}, square);
  for (int i = static_cast<int>(threadIdx.x); i < args.count; i += kColumnThreads) {
    inverses[i] = over(1.0F, plus(square[i * kSquarePitch + i], args.damping));
  }
  __syncthreads();
  RowSweep<Codec>{args, square, inverses, codec}.run(row_of_thread());
}

__global__ __launch_bounds__(kColumnThreads) void fit_kernel(const RefineBlockArgs args,
                                                             const StoredScale type) {
  extern __shared__ FourFloats shared[];
  auto* square = reinterpret_cast<float*>(shared);
  load_square({args.sums, args.sums_stride, args.count}, square);
  RowFit{args, square, type}.run(row_of_thread());
}

bool valid(const RefineBlockArgs& args) {
  return args.count >= 1 && args.count <= kSquarePitch && args.count % 4 == 0 &&
         args.sums_stride % 4 == 0 && args.stride % kColumnThreads == 0 && args.width >= 1 &&
         args.first % kColumnPart == 0;
}

template <typename Kernel, typename Form>
cudaError_t launch(Kernel kernel,
                   const RefineBlockArgs& args,
                   const Form& form,
                   cudaStream_t stream) {
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRefineBytes);
  if (raised != cudaSuccess) {
    return raised;
  }
  kernel<<<static_cast<unsigned>(args.stride / kColumnThreads), kColumnThreads, kRefineBytes,
           stream>>>(args, form);
  return cudaGetLastError();
}

constexpr int kWideRows = 32;   // of a block of threads
constexpr int kWideSlices = 8;  // of a group's columns, that threads of a row take

__global__ __launch_bounds__(kWideRows* kWideSlices) void steps_kernel(const WideFitArgs args) {
  const int64_t row = int64_t{blockIdx.x} * kWideRows + threadIdx.x;
  const float scale = args.scales[row];
  for (int64_t i = int64_t{blockIdx.y} * kWideSlices + threadIdx.y; i < args.width;
       i += int64_t{gridDim.y} * kWideSlices) {
    args.steps[i * args.stride + row] =
        rintf(over(args.values[(args.begin + i) * args.stride + row], scale));
  }
}

/// Sums of a slice in the order of its columns, then of the slices in their order.
__global__ __launch_bounds__(kWideRows* kWideSlices) void wide_kernel(const WideFitArgs args) {
  __shared__ double slopes[kWideSlices][kWideRows];
  __shared__ double curvatures[kWideSlices][kWideRows];
  const int64_t row = int64_t{blockIdx.x} * kWideRows + threadIdx.x;
  ScaleLoss loss;
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < args.width; i += kWideSlices) {
    const int64_t at = (args.begin + i) * args.stride + row;
    const double step = args.steps[i * args.stride + row];
    loss.slope += step * args.gradients[at];
    loss.curvature += step * (args.products[at] + static_cast<double>(args.damping) * step);
  }
  slopes[threadIdx.y][threadIdx.x] = loss.slope;
  curvatures[threadIdx.y][threadIdx.x] = loss.curvature;
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int slice = 1; slice < kWideSlices; ++slice) {
      loss.slope += slopes[slice][threadIdx.x];
      loss.curvature += curvatures[slice][threadIdx.x];
    }
    const float scale = args.scales[row];
    const float fitted = loss.better(scale, args.type);
    args.scales[row] = fitted;
    args.moved[row] = fitted == scale ? 0.0F : minus(scale, fitted);
  }
}

__global__ __launch_bounds__(kWideRows* kWideSlices) void move_kernel(const WideFitArgs args) {
  const int64_t row = int64_t{blockIdx.x} * kWideRows + threadIdx.x;
  const float moved = args.moved[row];
  if (moved == 0.0F) {
    return;
  }
  const float scale = args.scales[row];
  for (int64_t i = int64_t{blockIdx.y} * kWideSlices + threadIdx.y; i < args.k;
       i += int64_t{gridDim.y} * kWideSlices) {
    const int64_t at = i * args.stride + row;
    float gradient = fused(moved, args.products[at], args.gradients[at]);
    const int64_t inside = i - args.begin;
    if (inside >= 0 && inside < args.width) {
      const float before = args.values[at];
      const float value = times(args.steps[inside * args.stride + row], scale);
      args.values[at] = value;
      gradient = fused(minus(before, value), args.damping, gradient);
    }
    args.gradients[at] = gradient;
  }
}

constexpr unsigned kMostSlabs = 64;  // of columns, that blocks of threads take

dim3 wide_blocks(const WideFitArgs& args, int64_t columns) {
  const int64_t slabs = (columns + kWideSlices - 1) / kWideSlices;
  return {static_cast<unsigned>(args.stride / kWideRows),
          slabs < kMostSlabs ? static_cast<unsigned>(slabs) : kMostSlabs};
}

}  // namespace

cudaError_t sweep_block(const RefineBlockArgs& args, const ValueForm& form, cudaStream_t stream) {
  if (!valid(args)) {
    return cudaErrorInvalidValue;
  }
  return form.fp4 ? launch(sweep_kernel<Fp4Codec>, args, Fp4Codec{}, stream)
                  : launch(sweep_kernel<IntCodec>, args, IntCodec{form.low, form.high}, stream);
}

cudaError_t fit_block(const RefineBlockArgs& args, StoredScale type, cudaStream_t stream) {
  if (!valid(args) || args.count % args.width != 0) {
    return cudaErrorInvalidValue;
  }
  return launch(fit_kernel, args, type, stream);
}

cudaError_t take_steps(const WideFitArgs& args, cudaStream_t stream) {
  if (args.stride % kWideRows != 0) {
    return cudaErrorInvalidValue;
  }
  steps_kernel<<<wide_blocks(args, args.width), dim3(kWideRows, kWideSlices), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t fit_wide(const WideFitArgs& args, cudaStream_t stream) {
  if (args.stride % kWideRows != 0) {
    return cudaErrorInvalidValue;
  }
  wide_kernel<<<static_cast<unsigned>(args.stride / kWideRows), dim3(kWideRows, kWideSlices), 0,
                stream>>>(args);
  move_kernel<<<wide_blocks(args, args.k), dim3(kWideRows, kWideSlices), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nibble::cuda
