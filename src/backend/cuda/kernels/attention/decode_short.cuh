#pragma once

// Attention of one query row per sequence where sequences are few and short, for sm_90a: what
// counts is how long one result takes. A cluster of blocks serves one KV head of one sequence; its
// warps take the tiles in turn, all of them asked for before the kernel waits for its predecessor,
// and the blocks merge their warps' results through each other's shared memory. No plan is read.
//
// The kernel can also do what attention/append.cu does, for the step's tokens: each block rotates
// its own query heads, and the warp that has the last tile puts the step's key and value into its
// copy of the tile and into the cache.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/decode.cuh"
#include "backend/cuda/kernels/attention/turn.cuh"
#include "backend/cuda/ptx/cluster.cuh"

namespace nibble::cuda {

constexpr int kShortCluster = 8;
constexpr int kShortWarps = kShortCluster * kDecodeWarps;  // that share the tiles

/// A warp's tiles: first, first + kShortWarps, ... below `end`; at most 32.
template <typename Tile>
struct ShortRing {
  uint32_t slots;     // shared memory of this warp
  uint32_t barriers;  // one per slot
  int32_t stages;
  int32_t first;
  int32_t count;
  int32_t page;  // lane i's: of the tile number i
  int32_t filled = 0;

  __device__ int32_t tile(int32_t index) const { return first + index * kShortWarps; }
  /// Where it lies, on page `of`.
  __device__ int64_t place(const DecodeArgs& args,
                           int32_t kv_head,
                           int32_t index,
                           int64_t of) const {
    const int32_t in_page = tile(index) % args.tiles_per_page;
    return of * args.page_bytes +
           static_cast<int64_t>(kv_head * args.tiles_per_page + in_page) * Tile::kBytes;
  }

  /// Asks for the next tile, if any.
  __device__ void fill(const DecodeArgs& args, int32_t kv_head, int lane) {
    if (filled >= count) {
      return;
    }
    const int64_t of = __shfl_sync(~0U, page, filled);
    if (lane == 0) {
      const auto slot = static_cast<uint32_t>(filled % stages);
      const uint32_t barrier = barriers + 8U * slot;
      ptx::fence_before_refill();
      ptx::barrier_arrive_expect(barrier, Tile::kBytes);
      ptx::bulk_copy(slots + slot * Tile::kBytes, args.pages + place(args, kv_head, filled, of),
                     Tile::kBytes, barrier, ptx::CacheHint::kEvictFirst);
    }
    ++filled;
  }
  /// Waits for a tile; its shared memory.
  __device__ uint32_t wait(int32_t index) const {
    const auto slot = static_cast<uint32_t>(index % stages);
    ptx::barrier_wait(barriers + 8U * slot, static_cast<uint32_t>(index / stages) & 1U);
    return slots + slot * Tile::kBytes;
  }
};

__device__ __forceinline__ float4 as_float4(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

/// Merges all warps' results of a cluster. Blocks share the outputs out; eight neighbouring lanes
/// take a piece of four, each with the warps of one block, in the order of the blocks.
///   sums [warp][head][head_dim + 4], tops [warp][kColumns]: top and total, in each block
template <typename Tile, int kColumns>
__device__ __forceinline__ void merge_cluster(const DecodeArgs& args,
                                              int64_t first_head,
                                              int heads,
                                              uint32_t sums,
                                              uint32_t tops,
                                              int warp_sums,
                                              uint16_t* out) {
  constexpr int kDim = Tile::kHeadDim;
  const int pieces = heads * kDim / 4;
  const int each = (pieces + kShortCluster - 1) / kShortCluster;
  const int peer = static_cast<int>(threadIdx.x) % kShortCluster;
  const uint32_t peer_sums = ptx::peer_address(sums, static_cast<uint32_t>(peer));
  const uint32_t peer_tops = ptx::peer_address(tops, static_cast<uint32_t>(peer));
  const int begin = static_cast<int>(ptx::cluster_rank()) * each;
  for (int i = 0; i < each; i += kDecodeThreads / kShortCluster) {
    const int own = i + static_cast<int>(threadIdx.x) / kShortCluster;
    const bool valid = own < each && begin + own < pieces;
    const int piece = valid ? begin + own : 0;
    const int head = piece / (kDim / 4);
    const int d = piece % (kDim / 4) * 4;
    float2 part[kDecodeWarps];
    float4 values[kDecodeWarps];
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float4 two = as_float4(
          ptx::load_cluster16(peer_tops + static_cast<uint32_t>(w * kColumns + head / 2 * 2) * 8U));
      part[w] = head % 2 == 0 ? make_float2(two.x, two.y) : make_float2(two.z, two.w);
      values[w] = as_float4(ptx::load_cluster16(
          peer_sums + static_cast<uint32_t>(w * warp_sums + head * (kDim + 4) + d) * 4U));
    }
    float top = part[0].x;
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) {
      top = fmaxf(top, part[w].x);
    }
#pragma unroll
    for (int step = 1; step < kShortCluster; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0U, top, step));
    }
    float total = 0.0F;
    float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float weight = ptx::exp2_approx((part[w].x - top) * args.top_factor);
      total = fmaf(part[w].y, weight, total);
      add4(sum, values[w], weight);
    }
#pragma unroll
    for (int step = 1; step < kShortCluster; step *= 2) {
      total += __shfl_xor_sync(~0U, total, step);
      sum.x += __shfl_xor_sync(~0U, sum.x, step);
      sum.y += __shfl_xor_sync(~0U, sum.y, step);
      sum.z += __shfl_xor_sync(~0U, sum.z, step);
      sum.w += __shfl_xor_sync(~0U, sum.w, step);
    }
    if (valid && peer == 0) {
      total += sink_weight(args, first_head + head, top * args.top_factor);
      store_bf16x4(out + head * kDim + d, quotient4(sum, total));
    }
  }
}

/// The step's token of a sequence, as the product has left it.
template <typename Tile>
struct FreshToken {
  static constexpr int kDim = Tile::kHeadDim;
  Rotation<kDim> rotation;
  HeadValues<kDim> key;
  HeadValues<kDim> value;

  /// Rotates `heads` query heads from head `first` on into shared memory, the block's warps in
  /// turn.
  __device__ void put_queries(const AppendArgs& args,
                              int64_t row,
                              int first,
                              int heads,
                              int warp,
                              int lane,
                              uint16_t* to) const {
    const uint16_t* from = args.qkv + row * args.stride + int64_t{first} * kDim;
    for (int head = warp; head < heads; head += kDecodeWarps) {
      HeadValues<kDim> x = load_head<kDim>(from + head * kDim, lane);
      if (args.q_norm != nullptr) {
        normalise<kDim>(x, args.q_norm, args.norm_eps, lane);
      }
      rotation.apply(x);
      if (args.shared) {
        round_row<kDim>(x, kQueryPlaces);
      }
      if constexpr (kv_format(Tile::kFormat).turned) {
        if (args.basis.turns_keys) {
          HeadTurn<kDim>::turn(x, lane);
        }
      }
      if constexpr (Tile::kStatic) {
        multiply_by_steps<kDim>(x, args.basis.key_step, first / (args.heads / args.kv_heads), lane);
      }
      store_query<kDim>(x, to + head * kDim, lane);
    }
  }
  __device__ void load(const AppendArgs& args, int64_t row, int kv_head, int lane) {
    const uint16_t* from = args.qkv + row * args.stride + int64_t{args.heads + kv_head} * kDim;
    key = load_head<kDim>(from, lane);
    value = load_head<kDim>(from + int64_t{args.kv_heads} * kDim, lane);
  }
  /// Asks for what change() reads; by one warp.
  static __device__ void prefetch_means(const AppendArgs& args, int kv_head, int lane) {
    if constexpr (kv_format(Tile::kFormat).turned) {
      const int32_t at = kv_head * kDim + lane * 32;  // of 128 bytes
      for (const float* means : {args.basis.key_mean, args.basis.value_mean, args.basis.key_step,
                                 args.basis.value_step}) {
        if (means != nullptr && lane < kDim / 32) {
          ptx::prefetch(means + at);
        }
      }
    }
  }
  /// As args.basis says.
  __device__ void change(const AppendArgs& args, int kv_head, int lane) {
    const KvBasis& basis = args.basis;
    subtract<kDim>(key, load_mean<kDim>(basis.key_mean, kv_head, lane));
    subtract<kDim>(value, load_mean<kDim>(basis.value_mean, kv_head, lane));
    if (basis.turns_keys) {
      HeadTurn<kDim>::turn(key, lane);
    }
    if (basis.turns_values) {
      HeadTurn<kDim>::turn(value, lane);
    }
    if constexpr (Tile::kStatic) {
      divide_by_steps<kDim>(key, basis.key_step, kv_head, lane, args.far_outside);
      divide_by_steps<kDim>(value, basis.value_step, kv_head, lane, args.far_outside);
    }
  }
  /// Puts key and value of the tile's token `token` into two copies of the tile.
  __device__ void put(
      const AppendArgs& args, int kv_head, int token, int lane, uint8_t* copy, uint8_t* cached) {
    constexpr KvCode kCode = Tile::kFormat;
    if (args.k_norm != nullptr) {
      normalise<kDim>(key, args.k_norm, args.norm_eps, lane);
    }
    rotation.apply(key);
    if (args.shared) {
      round_row<kDim>(key, kKeyPlaces);
    }
    if constexpr (kv_format(kCode).turned) {
      change(args, kv_head, lane);
    }
    store_head<kCode, kDim>(
        key, args.k_factor, token, lane,
        {head_place<kCode, kDim>(copy, false), head_place<kCode, kDim>(cached, false)});
    store_head<kCode, kDim>(
        value, args.v_factor, token, lane,
        {head_place<kCode, kDim>(copy, true), head_place<kCode, kDim>(cached, true)});
    __syncwarp();
  }
};

template <typename Tile, int kColumns>
__global__ __launch_bounds__(kDecodeThreads,
                             2) void decode_short_kernel(const __grid_constant__ DecodeArgs args) {
#if __CUDA_ARCH__ >= 900
  constexpr int kDim = Tile::kHeadDim;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint8_t* const rest = shared + kDecodeWarps * args.stages * Tile::kBytes;
  auto* const barriers = reinterpret_cast<uint64_t*>(rest);  // [warp][4]
  auto* const tops = reinterpret_cast<float2*>(rest + 256);  // [warp][kColumns]
  auto* const sums = reinterpret_cast<float*>(tops + kDecodeWarps * kColumns);
  const int warp_sums = min(args.ratio, kColumns) * (kDim + 4);

  const bool appends = args.append.qkv != nullptr;
  FreshToken<Tile> fresh;
  if (appends) {
    fresh.rotation.load(args.append, 0, lane);
  }
  const int32_t items = args.kv_heads * args.groups;
  const int32_t cluster = static_cast<int32_t>(blockIdx.x) / kShortCluster;
  const int32_t sequence = cluster / items;
  const int32_t item = cluster % items;
  const int32_t row = __ldg(args.q_begin + sequence);
  const int32_t kv_len = __ldg(args.kv_len + sequence);
  if (__ldg(args.q_begin + sequence + 1) != row + 1 || kv_len == 0) {
    ptx::wait_for_predecessor();  // a grid that has ended tells its successor that all before have
    return;
  }
  if (appends && args.append.inv_freq_stride != 0) {  // what all rows share has been asked for
    fresh.rotation.load(args.append, row, lane);
  }
  const int32_t kv_head = item / args.groups;
  const int32_t first_head = item % args.groups * kColumns;
  const int heads = min(args.ratio - first_head, kColumns);
  const int32_t oldest = args.window > 0 ? max(0, kv_len - args.window) : 0;
  const int32_t end_tile = (kv_len + Tile::kTokens - 1) / Tile::kTokens;

  ShortRing<Tile> ring;
  ring.slots =
      ptx::shared_address(shared) + static_cast<uint32_t>(warp * args.stages * Tile::kBytes);
  ring.barriers = ptx::shared_address(barriers + warp * 4);
  ring.stages = args.stages;
  ring.first = oldest / Tile::kTokens + static_cast<int32_t>(ptx::cluster_rank()) +
               kShortCluster * warp;  // so that neighbours do not end later than others
  ring.count = max(0, (end_tile - ring.first + kShortWarps - 1) / kShortWarps);
  ring.page = lane < ring.count ? __ldg(args.page_table + sequence * args.page_table_stride +
                                        ring.tile(lane) / args.tiles_per_page)
                                : 0;
  if (lane == 0) {
    for (int i = 0; i < args.stages; ++i) {
      ptx::barrier_init(ptx::shared_address(barriers + warp * 4 + i), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncwarp();
  // The last tile holds the step's token, which the predecessor writes, unless we do.
  const int32_t early_end = appends ? end_tile : end_tile - 1;
  while (ring.filled < min(args.stages, ring.count) && ring.tile(ring.filled) < early_end) {
    ring.fill(args, kv_head, lane);
  }
  if (appends) {
    fresh.prefetch_means(args.append, kv_head, lane);
    fresh.rotation.set(args.append, kv_len - 1);
  }
  const LaneOffsets offsets = lane_offsets<Tile>(lane);
  DecodeState<Tile, kColumns> state;
  state.clear();
  ptx::wait_for_predecessor();

  while (ring.filled < min(args.stages, ring.count)) {
    ring.fill(args, kv_head, lane);
  }
  const int64_t column = int64_t{kv_head * args.ratio + first_head} * kDim;
  DecodeQuery<Tile, kColumns> query;
  if (appends) {
    if (ring.count > 0 && ring.tile(ring.count - 1) + 1 == end_tile) {
      fresh.load(args.append, row, kv_head, lane);
    }
    auto* const queries = reinterpret_cast<uint16_t*>(sums);  // where warp 0's sums will be
    fresh.put_queries(args.append, row, kv_head * args.ratio + first_head, heads, warp, lane,
                      queries);
    __syncthreads();
    query.template load<true>(queries, heads, lane);
    __syncthreads();
  } else {
    query.load(args.q + row * args.q_stride + column, heads, lane);
  }
  for (int32_t i = 0; i < ring.count; ++i) {
    const int32_t token = ring.tile(i) * Tile::kTokens;
    const uint32_t tile = ring.wait(i);
    if (appends && ring.tile(i) + 1 == end_tile) {
      uint8_t* const copy = shared + (tile - ptx::shared_address(shared));
      const int64_t page = __shfl_sync(~0U, ring.page, i);
      uint8_t* const cached = args.append.pages + ring.place(args, kv_head, i, page);
      fresh.put(args.append, kv_head, kv_len - 1 - token, lane, copy,
                first_head == 0 ? cached : copy);
    }
    add_tile_in_form<Tile, kColumns>(args, tile, oldest - token, kv_len - token, query, offsets,
                                     lane, state);
    __syncwarp();  // all lanes have read the tile: its slot takes the next one
    ring.fill(args, kv_head, lane);
  }
  ptx::allow_successor();
  store_state<Tile, kColumns>(state, heads, args.value_factor, lane, sums + warp * warp_sums,
                              tops + warp * kColumns);
  ptx::cluster_sync();
  merge_cluster<Tile, kColumns>(args, column / kDim, heads, ptx::shared_address(sums),
                                ptx::shared_address(tops), warp_sums,
                                args.out + row * args.out_stride + column);
  ptx::cluster_sync();  // nobody leaves while others read
#endif
}

template <KvCode kCode, int kDim>
cudaError_t launch_decode_short_kernel(const DecodeArgs& args,
                                       const DecodeGrid& grid,
                                       const LaunchContext& context) {
  const auto kernel = decode_short_kernel<KvTile<kCode, kDim>, 8>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes);
  if (status != cudaSuccess) {
    return status;
  }
  const Grid where{.blocks = dim3(static_cast<unsigned>(grid.short_blocks)),
                   .threads = kDecodeThreads,
                   .shared_bytes = static_cast<size_t>(grid.shared_bytes),
                   .cluster = kShortCluster};
  return launch(kernel, where, context, args);
}

/// launch_decode(), or the kernel above where grid.short_blocks says so.
template <KvCode kCode>
cudaError_t launch_decode_either(const DecodeArgs& args,
                                 const DecodeGrid& grid,
                                 int head_dim,
                                 const LaunchContext& context) {
  if constexpr (!kv_has_residual(kCode)) {
    if (grid.short_blocks > 0) {
      return head_dim == 64 ? launch_decode_short_kernel<kCode, 64>(args, grid, context)
                            : launch_decode_short_kernel<kCode, 128>(args, grid, context);
    }
  }
  return launch_decode<kCode>(args, grid, head_dim, context);
}

}  // namespace nibble::cuda
