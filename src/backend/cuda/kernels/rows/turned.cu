// Activations of bf16 rows that are multiplied by Hadamard matrices, rounded for the next matrix
// product. A block owns a row, which lies in shared memory meanwhile: sums of numbers up to 128
// apart are made within a thread and a warp on the way there, those further apart in place. Their
// order is that of turn_blocks() (quant/hadamard.h), so that CPU and GPU agree.

#include <cmath>

#include "backend/cuda/kernels/rows/activated.cuh"
#include "backend/cuda/kernels/rows/turned.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

using Kind = GemmInput::Kind;

constexpr int kWarpNumbers = 32 * kPiece;
constexpr size_t kUsualShared = 48 << 10;  // what a block may have without being asked
constexpr size_t kOwnShared = 256;         // of store_row()

/// Sums and differences of two numbers; never one instruction with a product.
__device__ __forceinline__ void add_pair(float& low, float& high) {
  const float sum = __fadd_rn(low, high);
  high = __fsub_rn(low, high);
  low = sum;
}

/// The distances below a warp's numbers, of which each lane has eight neighbours.
__device__ __forceinline__ void turn_within_warp(F32x8& y, int64_t turn) {
#pragma unroll
  for (int distance = 1; distance < kPiece; distance *= 2) {
    if (distance < turn) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if ((j & distance) == 0) {
          add_pair(y.v[j], y.v[j + distance]);
        }
      }
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    if (lanes * kPiece < turn) {
      const bool upper = (threadIdx.x & lanes) != 0;
#pragma unroll
      for (float& own : y.v) {
        const float other = __shfl_xor_sync(kAllLanes, own, lanes);
        own = upper ? __fsub_rn(other, own) : __fadd_rn(own, other);
      }
    }
  }
}

/// kCount distances from `distance` on, of a row in shared memory.
template <int kCount>
__device__ __forceinline__ void turn_far(float* x, int64_t n, int64_t distance) {
  constexpr int kNumbers = 1 << kCount;
  __syncthreads();
  for (int64_t item = threadIdx.x; item < n / kNumbers; item += blockDim.x) {
    const int64_t low = item & (distance - 1);
    float* first = x + (item - low) * kNumbers + low;
    float v[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      v[i] = first[i * distance];
    }
#pragma unroll
    for (int apart = 1; apart < kNumbers; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        if ((i & apart) == 0) {
          add_pair(v[i], v[i + apart]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      first[i * distance] = v[i];
    }
  }
}

template <Kind kKind, ActFormat kFormat>
__device__ __forceinline__ void turn_row(const ActivationArgs& args, int64_t row, float* x) {
  const int64_t stride = int64_t{blockDim.x} * kPiece;
  const int64_t lane = threadIdx.x % 32;
  for (int64_t begin = (threadIdx.x / 32) * kWarpNumbers; begin < args.n; begin += stride) {
    const int64_t i = begin + lane * kPiece;
    F32x8 y = {};
    if (i < args.n) {
      y = activated<kKind, kFormat>(args, row, i);
    }
    turn_within_warp(y, args.turn);
    if (i < args.n) {
      *reinterpret_cast<F32x8*>(x + i) = y;
    }
  }
  int64_t distance = kWarpNumbers;
  for (; 8 * distance <= args.turn; distance *= 8) {
    turn_far<3>(x, args.n, distance);
  }
  if (4 * distance == args.turn) {
    turn_far<2>(x, args.n, distance);
  } else if (2 * distance == args.turn) {
    turn_far<1>(x, args.n, distance);
  }
  __syncthreads();
}

template <Kind kKind, ActFormat kFormat>
__global__ __launch_bounds__(kMaxRowThreads) void turned_kernel(const ActivationArgs args,
                                                                float factor) {
  extern __shared__ float4 memory[];
  auto* x = reinterpret_cast<float*>(memory);
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  turn_row<kKind, kFormat>(args, row, x);
  const auto load = [&](int, int64_t i) {
    F32x8 y = *reinterpret_cast<const F32x8*>(x + i);
#pragma unroll
    for (float& value : y.v) {
      value = __fmul_rn(value, factor);
    }
    return y;
  };
  if constexpr (kFormat == ActFormat::kBf16) {
    auto* out = static_cast<__nv_bfloat16*>(args.out.values) + row * args.n;
    for_each_piece<0>(args.n, [&](int p, int64_t i) { store_bf16x8(out + i, load(p, i)); });
  } else {
    using Bits = BitsOf<0, scales_of(kFormat)>;
    store_scaled<0, scales_of(kFormat)>(args.out, Bits(args.out.blocks, args.n), row, args.n, load);
  }
}

template <Kind kKind, ActFormat kFormat>
cudaError_t launch_turned(const ActivationArgs& args, const LaunchContext& context) {
  const auto bytes = static_cast<size_t>(args.n) * sizeof(float);
  if (bytes > kUsualShared) {
    const cudaError_t raised =
        cudaFuncSetAttribute(turned_kernel<kKind, kFormat>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (raised != cudaSuccess) {
      return raised;
    }
  }
  const int64_t warps = (args.n + kWarpNumbers - 1) / kWarpNumbers;
  const auto threads = static_cast<unsigned>(32 * (warps < 32 ? warps : 32));
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(args.turn)));
  const Grid grid{
      .blocks = dim3(static_cast<unsigned>(args.rows)), .threads = threads, .shared_bytes = bytes};
  return launch(turned_kernel<kKind, kFormat>, grid, context, args, factor);
}

template <Kind kKind>
cudaError_t launch_form(const ActivationArgs& args, const LaunchContext& context) {
  switch (args.out.format) {
    case ActFormat::kInt8Token:
      return launch_turned<kKind, ActFormat::kInt8Token>(args, context);
    case ActFormat::kFp8Token:
      return launch_turned<kKind, ActFormat::kFp8Token>(args, context);
    case ActFormat::kFp8Group:
      return launch_turned<kKind, ActFormat::kFp8Group>(args, context);
    case ActFormat::kIntBlocks:
    case ActFormat::kBf16Blocks:
      return launch_turned<kKind, ActFormat::kIntBlocks>(args, context);
    default:
      return launch_turned<kKind, ActFormat::kBf16>(args, context);
  }
}

}  // namespace

int64_t most_turned() {
  int device = 0;
  int bytes = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                            device) == cudaSuccess;
  return known ? (bytes - static_cast<int64_t>(kOwnShared)) / static_cast<int64_t>(sizeof(float))
               : 0;
}

cudaError_t turned_activation(const ActivationArgs& args, const LaunchContext& context) {
  const bool power = (args.turn & (args.turn - 1)) == 0;
  if (!power || args.n % args.turn != 0 || args.n > most_turned()) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  switch (args.kind) {
    case Kind::kSiluMul:
      return launch_form<Kind::kSiluMul>(args, context);
    case Kind::kRelu:
      return launch_form<Kind::kRelu>(args, context);
    case Kind::kGeluTanh:
      return launch_form<Kind::kGeluTanh>(args, context);
    case Kind::kClampedSwiglu:
      return launch_form<Kind::kClampedSwiglu>(args, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
