#pragma once

// Attention of one query row per sequence where sequences are few and short, for sm_90a: what
// counts is how long one result takes. A cluster of blocks serves one KV head of one sequence; its
// warps take the tiles in turn, all of them asked for before the kernel waits for its predecessor,
// and the blocks merge their warps' results through each other's shared memory. No plan is read.
//
// The kernel can also do what attention/append.cu does, for the step's tokens. Each block's warps
// share its query heads out, and those of the block with the last tile the step's key and value,
// too: what they make of them goes to the cache, and by way of shared memory into that tile's copy.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/decode.cuh"
#include "backend/cuda/kernels/attention/turn.cuh"
#include "backend/cuda/ptx/cluster.cuh"

namespace nibble::cuda {

/// Where a tile of a sequence lies, on page `page`.
template <typename Tile>
__device__ __forceinline__ int64_t
place_of(const DecodeArgs& args, int32_t kv_head, int32_t tile, int64_t page) {
  const int32_t in_page = tile % args.tiles_per_page;
  return page * args.page_bytes +
         static_cast<int64_t>(kv_head * args.tiles_per_page + in_page) * Tile::kBytes;
}

/// A warp's tiles: first, first + step, ...; at most 32.
template <typename Tile>
struct ShortRing {
  uint32_t slots;     // shared memory of this warp
  uint32_t barriers;  // one per slot
  int32_t stages;
  int32_t first;
  int32_t step;  // warps that share the tiles
  int32_t count;
  int32_t page;  // lane i's: of the tile number i
  int32_t filled = 0;

  __device__ int32_t tile(int32_t index) const { return first + index * step; }

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
      ptx::bulk_copy(slots + slot * Tile::kBytes,
                     args.pages + place_of<Tile>(args, kv_head, tile(filled), of), Tile::kBytes,
                     barrier, ptx::CacheHint::kEvictFirst);
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

/// Merges all warps' results of a cluster. Blocks share the outputs out; as many neighbouring lanes
/// as there are blocks take a piece of four, each with the warps of one block, in their order.
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
  const int blocks = 1 << args.cluster_shift;
  const int each = (pieces + blocks - 1) >> args.cluster_shift;
  const int peer = static_cast<int>(threadIdx.x) & (blocks - 1);
  const uint32_t peer_sums = ptx::peer_address(sums, static_cast<uint32_t>(peer));
  const uint32_t peer_tops = ptx::peer_address(tops, static_cast<uint32_t>(peer));
  const int begin = static_cast<int>(ptx::cluster_rank()) * each;
  for (int i = 0; i < each; i += kDecodeThreads >> args.cluster_shift) {
    const int own = i + (static_cast<int>(threadIdx.x) >> args.cluster_shift);
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
    for (int step = 1; step < blocks; step *= 2) {
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
    for (int step = 1; step < blocks; step *= 2) {
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

/// One KV head of the step's token, which a block's warps read as the product has left it.
struct FreshHead {
  int64_t row;
  int32_t kv_head;
  int32_t first_query;  // of the query heads
  int32_t queries;
  bool last;        // the block has the token's tile: key and value are its work, too
  int32_t token;    // of that tile
  uint8_t* cached;  // the tile in the cache; null: another block writes it
};

/// What a block's warps make of it.
template <typename Tile>
struct FreshToken {
  static constexpr KvCode kCode = Tile::kFormat;
  static constexpr int kDim = Tile::kHeadDim;
  static constexpr int kRow = static_cast<int>(kv_row_bytes(kCode, kDim));
  static constexpr int kLaneBytes = kRow / 32;
  static constexpr int kStaged = kRow + 16;  // codes of key or value and their parameters
  Rotation<kDim> rotation;
  uint64_t codes[2];  // a lane's kLaneBytes of key and value
  uint32_t parameters[2];

  /// Puts the query heads into `queries` [heads, kDim] bf16 in shared memory, and key and value
  /// into the cache and behind them; the warps in turn.
  __device__ void put(
      const AppendArgs& args, const FreshHead& head, int warp, int lane, uint16_t* queries) const {
    const int first = head.last ? -2 : 0;  // key, value, then queries
    uint8_t* const staged = reinterpret_cast<uint8_t*>(queries + head.queries * kDim);
    int unit = first + warp;
    HeadValues<kDim> next = {};
    if (unit < head.queries) {
      next = load(args, head, unit, lane);
    }
    while (unit < head.queries) {
      HeadValues<kDim> x = next;
      if (unit + kDecodeWarps < head.queries) {
        next = load(args, head, unit + kDecodeWarps, lane);
      }
      change(args, head, unit, lane, x);
      if (unit >= 0) {
        store_query<kDim>(x, queries + unit * kDim, lane);
      } else {
        const bool is_value = unit == -1;
        const float factor = is_value ? args.v_factor : args.k_factor;
        const HeadCodes own = code_head<kCode, kDim>(x, factor, lane);
        stage(own, lane, staged + (is_value ? kStaged : 0));
        if (head.cached != nullptr) {
          store_head<kCode, kDim>(own, head.token, lane,
                                  head_place<kCode, kDim>(head.cached, is_value));
        }
      }
      unit += kDecodeWarps;
    }
  }
  /// Key and value, as put() has left them behind `heads` queries.
  __device__ void take(const uint16_t* queries, int heads, int lane) {
    const auto* staged = reinterpret_cast<const uint8_t*>(queries + heads * kDim);
#pragma unroll
    for (int i = 0; i < 2; ++i, staged += kStaged) {
      codes[i] = load_bytes<kLaneBytes>(staged + lane * kLaneBytes);
      parameters[i] = *reinterpret_cast<const uint32_t*>(staged + kRow);
    }
  }
  /// Puts them into a copy of their tile.
  __device__ void complete(uint8_t* copy, int token, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const HeadPlace place = head_place<kCode, kDim>(copy, i == 1);
      store_bytes<kLaneBytes>(place.rows + kv_row_offset(kRow, token, lane * kLaneBytes), codes[i]);
      if (lane == 0) {
        store_parameters<kCode>(parameters[i], token, place.parameters);
      }
    }
    __syncwarp();
  }
  /// Asks for what change() reads; by one warp.
  static __device__ void prefetch_means(const AppendArgs& args, int kv_head, int lane) {
    if constexpr (kv_format(kCode).turned) {
      const int32_t at = kv_head * kDim + lane * 32;  // of 128 bytes
      for (const float* means : {args.basis.key_mean, args.basis.value_mean, args.basis.key_step,
                                 args.basis.value_step}) {
        if (means != nullptr && lane < kDim / 32) {
          ptx::prefetch(means + at);
        }
      }
    }
  }

 private:
  /// unit: a query head, or -2 for the key and -1 for the value
  static __device__ HeadValues<kDim> load(const AppendArgs& args,
                                          const FreshHead& head,
                                          int unit,
                                          int lane) {
    const int32_t place = unit >= 0    ? head.first_query + unit
                          : unit == -1 ? args.heads + args.kv_heads + head.kv_head
                                       : args.heads + head.kv_head;
    return load_head<kDim>(args.qkv + head.row * args.stride + int64_t{place} * kDim, lane);
  }
  /// Norm, rotation, and what args.basis says.
  __device__ void change(const AppendArgs& args,
                         const FreshHead& head,
                         int unit,
                         int lane,
                         HeadValues<kDim>& x) const {
    const bool is_value = unit == -1;
    const KvBasis& basis = args.basis;
    if (!is_value) {
      const float* norm = unit >= 0 ? args.q_norm : args.k_norm;
      if (norm != nullptr) {
        normalise<kDim>(x, norm, args.norm_eps, lane);
      }
      rotation.apply(x);
      if (args.shared) {
        round_row<kDim>(x, unit >= 0 ? kQueryPlaces : kKeyPlaces);
      }
    }
    if constexpr (kv_format(kCode).turned) {
      if (unit < 0) {
        const float* means = is_value ? basis.value_mean : basis.key_mean;
        subtract<kDim>(x, load_mean<kDim>(means, head.kv_head, lane));
      }
      if (is_value ? basis.turns_values : basis.turns_keys) {
        HeadTurn<kDim>::turn(x, lane);
      }
    }
    if constexpr (Tile::kStatic) {
      if (unit >= 0) {
        multiply_by_steps<kDim>(x, basis.key_step, head.kv_head, lane);
      } else {
        divide_by_steps<kDim>(x, is_value ? basis.value_step : basis.key_step, head.kv_head, lane,
                              head.cached != nullptr ? args.far_outside : nullptr);
      }
    }
  }
  static __device__ void stage(const HeadCodes& own, int lane, uint8_t* to) {
    constexpr int kBytes = lane_bytes<kCode, kDim>();
    if (lane < HeadValues<kDim>::kLanes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_bytes<kBytes>(to + half * (kRow / 2) + lane * kBytes, own.half[half]);
      }
    }
    if (lane == 0) {
      *reinterpret_cast<uint32_t*>(to + kRow) = own.parameters;
    }
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
  const int32_t cluster = static_cast<int32_t>(blockIdx.x) >> args.cluster_shift;
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
  ring.step = kDecodeWarps << args.cluster_shift;
  const auto rank = static_cast<int32_t>(ptx::cluster_rank());
  const int32_t begin_tile = oldest / Tile::kTokens;
  // Blocks in turn, then their warps, so that neighbours do not end later than others.
  ring.first = begin_tile + rank + (warp << args.cluster_shift);
  const int32_t ahead = end_tile - ring.first + ring.step - 1;
  ring.count = ahead > 0 ? ahead >> (args.cluster_shift + kDecodeWarpsLog2) : 0;
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
  FreshHead head{row, kv_head, kv_head * args.ratio + first_head, heads, false, 0, nullptr};
  if (appends) {
    const int32_t tile = end_tile - 1;
    head.last = ((tile - begin_tile) & ((1 << args.cluster_shift) - 1)) == rank;
    head.token = kv_len - 1 - tile * Tile::kTokens;
    if (head.last && first_head == 0) {
      const int64_t page =
          __ldg(args.page_table + sequence * args.page_table_stride + tile / args.tiles_per_page);
      head.cached = args.append.pages + place_of<Tile>(args, kv_head, tile, page);
    }
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
    auto* const queries = reinterpret_cast<uint16_t*>(sums);  // where warps' sums will be
    fresh.put(args.append, head, warp, lane, queries);
    __syncthreads();
    query.template load<true>(queries, heads, lane);
    fresh.take(queries, heads, lane);
    __syncthreads();
  } else {
    query.load(args.q + row * args.q_stride + column, heads, lane);
  }
  for (int32_t i = 0; i < ring.count; ++i) {
    const int32_t token = ring.tile(i) * Tile::kTokens;
    const uint32_t tile = ring.wait(i);
    if (appends && ring.tile(i) + 1 == end_tile) {
      fresh.complete(shared + (tile - ptx::shared_address(shared)), head.token, lane);
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
                   .cluster = 1U << args.cluster_shift};
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
