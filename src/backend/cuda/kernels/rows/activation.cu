// silu(gate) * up, relu and gelu of bf16 rows, rounded for the next matrix product. The token forms
// need a row's largest value, so one block owns a row, or, where rows are few and the GPU has
// clusters, one cluster of eight blocks, as rows in blocks of 4 and 8 bits do; bf16 needs none and
// spreads over the whole GPU. Groups of 128 have a block per row.

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

/// A row's blocks, without what only products read; its own where rows are not all alike.
__device__ __forceinline__ IntBlocks blocks_of(const ActivationArgs& args, int64_t row) {
  const bool alike = args.each_blocks == nullptr;
  const IntBlocks* own = alike ? nullptr : args.each_blocks + args.experts[row];
  IntBlocks blocks;
  blocks.block = alike ? args.out.blocks.block : own->block;
  blocks.scales = alike ? args.out.blocks.scales : own->scales;
  blocks.clip = alike ? args.out.blocks.clip : own->clip;
  blocks.bits = alike ? args.out.blocks.bits : own->bits;
  blocks.columns = alike ? args.out.blocks.columns : own->columns;
  blocks.wide = alike ? args.out.blocks.wide : own->wide;
  return blocks;
}

template <int kPieces, Kind kKind, ActFormat kFormat>
__global__ __launch_bounds__(kMaxRowThreads) void activation_kernel(const ActivationArgs args) {
  constexpr auto kScales = scales_of(kFormat);
  using Bits = BitsOf<kPieces, kScales>;
  const int64_t row = blockIdx.x;
  const auto load = [&](int, int64_t i) { return activated<kKind, kFormat>(args, row, i); };
  const auto store = [&](const QuantizedRows& out, const Bits& bits) {
    store_scaled<kPieces, kScales>(out, bits, row, args.n, load);
  };
  const auto wait = [&] {
    ptx::allow_successor();
    ptx::wait_for_predecessor();
    return is_wanted(args, row);
  };
  if constexpr (kScales == RowScales::kBlocks) {
    if (args.each_blocks != nullptr) {
      if (wait()) {
        const QuantizedRows out{args.out.format, args.out.values, args.out.scales,
                                blocks_of(args, row)};
        store(out, Bits(out.blocks, args.n));
      }
      return;
    }
  }
  const Bits bits(args.out.blocks, args.n);
  if (wait()) {
    store(args.out, bits);
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
      const int bits = i < args.n ? args.out.blocks.bits[block_of(args.out.blocks, i)] : 0;
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

/// The largest of a cluster's words, of blocks of 4 bits and of 8.
struct ClassLargest {
  uint32_t four, eight;
};
template <typename Cluster>  // cg::cluster_group, which older GPUs have not
__device__ __forceinline__ ClassLargest
max_of_classes(uint32_t own, bool eight, uint32_t (&shared)[2], const Cluster& cluster) {
  const uint32_t four_bits = __reduce_max_sync(kAllLanes, eight ? 0 : own);
  const uint32_t eight_bits = __reduce_max_sync(kAllLanes, eight ? own : 0);
  if (threadIdx.x % 32 < 2) {
    atomicMax(&shared[threadIdx.x % 32], threadIdx.x % 32 == 0 ? four_bits : eight_bits);
  }
  cluster.sync();
  const uint32_t* const peer = cluster.map_shared_rank(&shared[0], threadIdx.x % kCluster);
  const ClassLargest all = {__reduce_max_sync(kAllLanes, peer[0]),
                            __reduce_max_sync(kAllLanes, peer[1])};
  cluster.barrier_arrive();  // this block has read the others' words
  return all;
}

/// One piece per thread, one row per cluster, in blocks of 4 and 8 bits.
template <Kind kKind>
__global__ __launch_bounds__(kMaxRowThreads) void activation_blocks_kernel(
    const ActivationArgs args) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint32_t largest[2];
  if (threadIdx.x < 2) {
    largest[threadIdx.x] = 0;
  }
  __syncthreads();
  const int64_t rank = blockIdx.x % kCluster;
  const int64_t i = (rank * blockDim.x + threadIdx.x) * kPiece;
  const bool known = args.each_blocks == nullptr;
  bool eight = known && i < args.n && is_eight(args.out.blocks, i);
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t row = blockIdx.x / kCluster;
  if (!is_wanted(args, row)) {
    return;  // so does the whole cluster
  }
  const IntBlocks blocks = blocks_of(args, row);
  eight = known ? eight : i < args.n && is_eight(blocks, i);
  F32x8 y = {};
  if (i < args.n) {
    y = blocks.columns == nullptr
            ? activated<kKind, ActFormat::kIntBlocks>(args, row, i)
            : activated_columns<kKind, ActFormat::kIntBlocks>(args, row, blocks.columns + i);
  }
  float* const scales = args.out.scales + row;
  uint8_t* const codes = static_cast<uint8_t*>(args.out.values) + row * args.n + i;
  if (blocks.scales == BlockScales::kEach) {
    const int64_t stride = int_scale_stride(args.rows);
    const BlockFactor to =
        block_factor(max_of_channels(largest_bits(y), blocks), eight ? 8 : 4, blocks.clip);
    if (i < args.n) {
      if ((i & (blocks.block - 1)) == 0) {
        scales[block_of(blocks, i) * stride] = to.scale;
      }
      store_block_codes(codes, y, to);
    }
    if (rank == 0) {
      clear_scales_behind(blocks, args.n, stride, scales);
    }
    return;
  }
  const ClassLargest all = max_of_classes(largest_bits(y), eight, largest, cluster);
  const ClassFactor to = class_factor(all.four, all.eight, blocks.clip);
  if (rank == 0 && threadIdx.x == 0) {
    *scales = to.eight.scale;
  }
  if (i < args.n) {
    to.store_codes(codes, y, eight);
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

/// Threads of a block in clusters; 0 where a block per row is better, or there are none.
unsigned cluster_threads(const ActivationArgs& args) {
  const int64_t slice = (args.n / kPiece + kCluster - 1) / kCluster;  // pieces of a block
  const bool fits = args.rows > 0 && args.rows <= kClusterRows && slice >= 64 &&
                    slice <= kMaxRowThreads && has_clusters();
  return fits ? static_cast<unsigned>((slice + 31) / 32 * 32) : 0;
}

cudaError_t launch_clusters(void (*kernel)(ActivationArgs),
                            const ActivationArgs& args,
                            unsigned threads,
                            const LaunchContext& context) {
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows * kCluster)),
                  .threads = threads,
                  .cluster = kCluster};
  return launch(kernel, grid, context, args);
}

/// To a form that has scales.
template <Kind kKind, ActFormat kFormat>
cudaError_t launch_scaled(const ActivationArgs& args, const LaunchContext& context) {
  if (const unsigned threads = cluster_threads(args); threads > 0) {
    if constexpr (kFormat == ActFormat::kBf16Blocks) {
      if (args.out.blocks.columns == nullptr && args.each_blocks == nullptr) {
        return launch_clusters(activation_cluster_kernel<kKind, kFormat>, args, threads, context);
      }
    } else if constexpr (scales_of(kFormat) == RowScales::kOne) {
      return launch_clusters(activation_cluster_kernel<kKind, kFormat>, args, threads, context);
    } else if constexpr (scales_of(kFormat) == RowScales::kBlocks) {
      return launch_clusters(activation_blocks_kernel<kKind>, args, threads, context);
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
