// silu(gate) * up, relu and gelu of bf16 rows, rounded for the next matrix product. The token forms
// need a row's largest value, so one block owns a row, or, where rows are few and the GPU has
// clusters, one cluster of eight blocks; bf16 needs none and spreads over the whole GPU. Groups
// have a block per row, too.

#include <cooperative_groups.h>

#include "backend/cuda/kernels/rows/activated.cuh"
#include "backend/cuda/kernels/rows/turned.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kFlatThreads = 256;
constexpr int kCluster = 8;
constexpr int64_t kClusterRows = 32;  // 256 blocks; from 64 rows on a block per row is as fast

using Kind = GemmInput::Kind;

/// Behind the predecessor, which may write it.
__device__ __forceinline__ bool is_wanted(const ActivationArgs& args, int64_t row) {
  return args.wanted == nullptr || row < *args.wanted;
}

template <int kPieces, Kind kKind, ActFormat kFormat>
__global__ __launch_bounds__(kMaxRowThreads) void activation_kernel(const ActivationArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  constexpr auto kScales = scales_of(kFormat);
  const int64_t row = blockIdx.x;
  if (!is_wanted(args, row)) {
    return;
  }
  const auto load = [&](int, int64_t i) { return activated<kKind, kFormat>(args, row, i); };
  if constexpr (kScales == RowScales::kBlocks) {
    QuantizedRows out = args.out;
    if (args.each_blocks != nullptr) {
      out.blocks = args.each_blocks[args.experts[row]];
    }
    store_scaled<kPieces, kScales>(out, row, args.n, load);
  } else {
    store_scaled<kPieces, kScales>(args.out, row, args.n, load);
  }
}

/// One piece per thread, one row per cluster. Rows of kBf16Blocks have a largest magnitude in INT8
/// and one in BF16.
template <Kind kKind, ActFormat kFormat>
__global__ __launch_bounds__(kMaxRowThreads) void activation_cluster_kernel(
    const ActivationArgs args) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kWide = kFormat == ActFormat::kBf16Blocks;
  constexpr int kClasses = kWide ? 2 : 1;
  __shared__ uint32_t largest[kClasses];
  if (threadIdx.x < kClasses) {
    largest[threadIdx.x] = 0;
  }
  __syncthreads();
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t row = blockIdx.x / kCluster;
  if (!is_wanted(args, row)) {
    return;  // so does the whole cluster
  }
  const int64_t i = (int64_t{blockIdx.x % kCluster} * blockDim.x + threadIdx.x) * kPiece;
  F32x8 y = {};
  uint32_t own = 0;
  if (i < args.n) {
    y = activated<kKind, kFormat>(args, row, i);
#pragma unroll
    for (const float value : y.v) {
      own = max(own, magnitude_bits(value));
    }
  }
  uint32_t of_row[kClasses];
#pragma unroll
  for (int c = 0; c < kClasses; ++c) {
    bool counts = true;
    if constexpr (kWide) {
      const int bits = i < args.n ? args.out.blocks.bits[i / args.out.blocks.block] : 0;
      counts = bits == (c == 0 ? 8 : 16);
    }
    of_row[c] = __reduce_max_sync(kAllLanes, counts ? own : 0);
    if (threadIdx.x % 32 == 0) {
      atomicMax(&largest[c], of_row[c]);
    }
  }
  cluster.sync();
#pragma unroll
  for (int c = 0; c < kClasses; ++c) {
    of_row[c] = *cluster.map_shared_rank(&largest[c], threadIdx.x % kCluster);
    of_row[c] = __reduce_max_sync(kAllLanes, of_row[c]);
  }
  cluster.barrier_arrive();  // this block has read the others' words
  const bool first = blockIdx.x % kCluster == 0 && threadIdx.x == 0;
  if constexpr (kWide) {
    const WideRow to(args.out, row, {of_row[0], of_row[1]});
    if (first) {
      args.out.scales[row] = to.scale();
    }
    if (i < args.n) {
      to.store(i, y);
    }
    to.fill_up(args.n, blockIdx.x % kCluster * blockDim.x + threadIdx.x, kCluster * blockDim.x);
  } else {
    const RowFactor to = row_factor(__uint_as_float(of_row[0]), args.out.format);
    if (first) {
      args.out.scales[row] = to.scale;
    }
    if (i < args.n) {
      store_codes(static_cast<uint8_t*>(args.out.values) + row * args.n + i, y, to.factor,
                  args.out.format);
    }
  }
  cluster.barrier_wait();  // its own words have been read
#endif
}

template <Kind kKind>
__global__ __launch_bounds__(kFlatThreads) void activation_flat_kernel(const ActivationArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t pieces = args.n / kPiece;
  const int64_t index = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x;
  if (index >= args.rows * pieces) {
    return;
  }
  const int64_t row = index / pieces;
  if (!is_wanted(args, row)) {
    return;
  }
  const int64_t i = (index - row * pieces) * kPiece;
  auto* out = static_cast<__nv_bfloat16*>(args.out.values) + row * args.n;
  store_bf16x8(out + i, activated<kKind, ActFormat::kBf16>(args, row, i));
}

bool has_clusters() {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

/// launch(), in clusters.
template <Kind kKind, ActFormat kFormat>
cudaError_t launch_clusters(const ActivationArgs& args,
                            unsigned threads,
                            const LaunchContext& context) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.rows * kCluster));
  config.blockDim = dim3(threads);
  config.stream = context.stream;
  config.attrs = attributes;
  config.numAttrs = context.overlap ? 2 : 1;
  return cudaLaunchKernelEx(&config, activation_cluster_kernel<kKind, kFormat>, args);
}

/// To a form that has scales.
template <Kind kKind, ActFormat kFormat>
cudaError_t launch_scaled(const ActivationArgs& args, const LaunchContext& context) {
  if constexpr (scales_of(kFormat) == RowScales::kOne || kFormat == ActFormat::kBf16Blocks) {
    const int64_t slice = (args.n / kPiece + kCluster - 1) / kCluster;  // pieces of a block
    if (args.rows > 0 && args.rows <= kClusterRows && slice >= 64 && slice <= kMaxRowThreads &&
        args.out.blocks.columns == nullptr && args.each_blocks == nullptr && has_clusters()) {
      return launch_clusters<kKind, kFormat>(args, static_cast<unsigned>((slice + 31) / 32 * 32),
                                             context);
    }
  }
  // Rows in blocks of either form are of the same numbers.
  constexpr ActFormat kRows = in_blocks(kFormat) ? ActFormat::kIntBlocks : kFormat;
  static constexpr void (*kKernels[4])(ActivationArgs) = {
      activation_kernel<0, kKind, kRows>, activation_kernel<1, kKind, kRows>,
      activation_kernel<2, kKind, kRows>, activation_kernel<4, kKind, kRows>};
  return launch_rows(kKernels, args, context);
}

template <Kind kKind>
cudaError_t launch_activation(const ActivationArgs& args, const LaunchContext& context) {
  if (args.out.format == ActFormat::kBf16 && args.rows > 0) {
    const int64_t blocks = (args.rows * (args.n / kPiece) + kFlatThreads - 1) / kFlatThreads;
    if (blocks > INT32_MAX) {
      return cudaErrorInvalidValue;
    }
    const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = kFlatThreads};
    return launch(activation_flat_kernel<kKind>, grid, context, args);
  }
  switch (args.out.format) {
    case ActFormat::kFp8Group:
      return launch_scaled<kKind, ActFormat::kFp8Group>(args, context);
    case ActFormat::kIntBlocks:
      return launch_scaled<kKind, ActFormat::kIntBlocks>(args, context);
    case ActFormat::kBf16Blocks:
      return launch_scaled<kKind, ActFormat::kBf16Blocks>(args, context);
    case ActFormat::kInt8Token:
      return launch_scaled<kKind, ActFormat::kInt8Token>(args, context);
    default:
      return launch_scaled<kKind, ActFormat::kFp8Token>(args, context);
  }
}

}  // namespace

cudaError_t activation_quantize(const ActivationArgs& given, const LaunchContext& context) {
  ActivationArgs args = given;
  args.stride = args.stride != 0 ? args.stride : input_width(args.kind, args.n);
  const bool of_experts = args.each_blocks != nullptr;
  if (!can_store(args.out, args.rows, args.n) || args.stride % kPiece != 0 ||
      (of_experts && (args.experts == nullptr || args.turn > 1))) {
    return cudaErrorInvalidValue;
  }
  if (args.turn > 1) {
    return turned_activation(args, context);
  }
  switch (args.kind) {
    case Kind::kSiluMul:
      return launch_activation<Kind::kSiluMul>(args, context);
    case Kind::kRelu:
      return launch_activation<Kind::kRelu>(args, context);
    case Kind::kGeluTanh:
      return launch_activation<Kind::kGeluTanh>(args, context);
    case Kind::kClampedSwiglu:
      return launch_activation<Kind::kClampedSwiglu>(args, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
