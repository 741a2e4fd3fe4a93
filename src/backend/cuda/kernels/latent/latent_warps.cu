// Latent attention over rows of 512 + 64 bf16 numbers by products of single warps (mma.sync), for
// GPUs before Hopper: items of 16 queries, tiles of 32 tokens, two of which are in shared memory.
//
// Of a tile's scores each of four warps makes those of 8 tokens, of the sums those of 128 numbers.

#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kQueries = 16;
constexpr int kTokens = 32;
constexpr int kBlocks = kLatentValues / 4 / 8;     // products of 8 numbers of a warp
constexpr uint32_t kTileBytes = 2 * kLatentPiece;  // of 32 tokens
constexpr uint32_t kQueryBytes = kQueries / 8 * kLatentGroup;
constexpr uint32_t kWeightRow = kTokens * 2 + 16;  // bytes, so that rows meet other banks
constexpr uint32_t kWeightsAt = 2 * kTileBytes + kQueryBytes;
constexpr uint32_t kSharedBytes = kWeightsAt + kQueries * kWeightRow;

/// Address of 16-byte chunk `chunk` of row `row` of a group of 8.
__device__ __forceinline__ uint32_t chunk_of(uint32_t group, int row, int chunk) {
  return group + static_cast<uint32_t>(chunk / 8 * 1024 + row * 128 + ((chunk % 8) ^ row) * 16);
}

struct WarpShared {
  uint32_t memory;  // two tiles, queries, weights
  float* of_warps;  // [2][4][kQueries]: tops, totals

  [[nodiscard]] __device__ uint32_t tile(int32_t index) const {
    return memory + static_cast<uint32_t>(index % 2) * kTileBytes;
  }
  [[nodiscard]] __device__ uint32_t queries() const { return memory + 2 * kTileBytes; }
  [[nodiscard]] __device__ uint32_t weights() const { return memory + kWeightsAt; }
};

/// Asks for a tile's rows; those past the end are zeros.
__device__ __forceinline__ void fetch_tile(const LatentArgs& args,
                                           const LatentSegment& segment,
                                           int32_t tile,
                                           uint32_t to) {
  constexpr int kChunks = static_cast<int>(kLatentPiece / 16);
  const int32_t* const table = args.page_table + segment.sequence * args.page_table_stride;
  if (tile < segment.end_tile) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const int32_t number = tile * 2 + piece;  // of the sequence's pieces of 16 tokens
      const bool there = number * 16 < segment.kv_len;
      const int32_t page = there ? __ldg(table + number / args.pieces_per_page) : 0;
      const uint8_t* const from = args.pages + page * args.page_bytes +
                                  number % args.pieces_per_page * int64_t{kLatentPiece};
#pragma unroll 3
      for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += kThreads) {
        constexpr int kGroupChunks = kChunks / 2;
        const int32_t token = number * 16 + i / kGroupChunks * 8 + i % 64 / 8;
        ptx::copy_async16(to + static_cast<uint32_t>(piece * kChunks + i) * 16,
                          there ? from + i * 16 : args.pages, token < segment.kv_len ? 16 : 0);
      }
    }
  }
  ptx::copy_commit();
}

/// Scores of 16 queries and the warp's 8 tokens.
__device__ __forceinline__ void multiply(uint32_t queries,
                                         uint32_t rows,
                                         int lane,
                                         float (&scores)[4]) {
  float halves[2][4] = {};  // two chains
#pragma unroll 6
  for (int step = 0; step < kLatentDim / 32; ++step) {
    uint32_t tokens[4];
    ptx::load_matrix4(tokens, chunk_of(rows, lane % 8, 4 * step + lane / 8));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4];
      ptx::load_matrix4(a, chunk_of(queries + static_cast<uint32_t>(lane / 8 % 2) * kLatentGroup,
                                    lane % 8, 4 * step + 2 * half + lane / 16));
      const uint32_t b[2] = {tokens[2 * half], tokens[2 * half + 1]};
      ptx::warp_mma_bf16(halves[half], a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i] = halves[0][i] + halves[1][i];
  }
}

/// What the warps have of the lane's two queries, put together.
template <typename Join>
__device__ __forceinline__ void join_warps(float (&values)[2],
                                           float* of_warps,
                                           int thread,
                                           const Join& join) {
  const int row = thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    values[r] = join(values[r], __shfl_xor_sync(~0U, values[r], 1));
    values[r] = join(values[r], __shfl_xor_sync(~0U, values[r], 2));
    if (thread % 4 == 0) {
      of_warps[thread / 32 * kQueries + row + 8 * r] = values[r];
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float* const from = of_warps + row + 8 * r;
    values[r] = join(join(from[0], from[kQueries]), join(from[2 * kQueries], from[3 * kQueries]));
  }
}

/// Softmax state of the lane's queries, lane / 4 and 8 more. Totals are of this lane's tokens.
struct WarpRows {
  float top[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.0F, 0.0F};
};

/// Scores become weights in shared memory; sums so far are scaled to the new tops.
__device__ __forceinline__ void weigh(const LatentArgs& args,
                                      const WarpShared& shared,
                                      const float (&scores)[4],
                                      WarpRows& rows,
                                      float (&sums)[kBlocks][4]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  float top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(rows.top[r], fmaxf(scores[2 * r], scores[2 * r + 1]));
  }
  join_warps(top, shared.of_warps, thread, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = top[r] == -INFINITY ? 0.0F : top[r] * args.score_factor;
    const float keep = ptx::exp2_approx(fmaf(rows.top[r], args.score_factor, -shift));
    rows.top[r] = top[r];
    const float first = ptx::exp2_approx(fmaf(scores[2 * r], args.score_factor, -shift));
    const float second = ptx::exp2_approx(fmaf(scores[2 * r + 1], args.score_factor, -shift));
    rows.total[r] = fmaf(rows.total[r], keep, first + second);
    ptx::store_shared4(shared.weights() + static_cast<uint32_t>(lane / 4 + 8 * r) * kWeightRow +
                           static_cast<uint32_t>(thread / 32 * 16 + lane % 4 * 4),
                       ptx::pack_bf16(first, second));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      sums[block][2 * r] *= keep;
      sums[block][2 * r + 1] *= keep;
    }
  }
}

/// Adds a tile to the sums of the warp's 128 numbers.
__device__ __forceinline__ void add_tile(uint32_t weights,
                                         uint32_t tile,
                                         int thread,
                                         float (&sums)[kBlocks][4]) {
  const int lane = thread % 32;
#pragma unroll
  for (int step = 0; step < kTokens / 16; ++step) {
    uint32_t a[4];
    ptx::load_matrix4(a, weights + static_cast<uint32_t>(lane % 16) * kWeightRow +
                             static_cast<uint32_t>(step * 32 + lane / 16 * 16));
    const uint32_t group = tile + static_cast<uint32_t>(2 * step + lane / 8 % 2) * kLatentGroup;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t b[4];
      ptx::load_matrix4_transposed(
          b, chunk_of(group, lane % 8, thread / 32 * kBlocks + block + lane / 16));
      const uint32_t first[2] = {b[0], b[1]};
      const uint32_t second[2] = {b[2], b[3]};
      ptx::warp_mma_bf16(sums[block], a, first);
      ptx::warp_mma_bf16(sums[block + 1], a, second);
    }
  }
}

/// Gives the warp's sums out.
__device__ __forceinline__ void give(const LatentArgs& args,
                                     const LatentSegment& segment,
                                     const float (&sums)[kBlocks][4],
                                     const float (&totals)[2]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int dim = thread / 32 * (kLatentValues / 4) + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = lane / 4 + 8 * r;
    if (query >= segment.queries(args)) {
      continue;
    }
    if (segment.slot < 0) {
      const float factor = 1.0F / totals[r];
      uint16_t* const out = segment.result(args, query) + dim;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        *reinterpret_cast<uint32_t*>(out + 8 * block) =
            ptx::pack_bf16(sums[block][2 * r] * factor, sums[block][2 * r + 1] * factor);
      }
    } else {
      const int64_t row = int64_t{segment.slot} * args.columns + query;
      float* const out = args.partial_sums + row * kLatentValues + dim;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        *reinterpret_cast<float2*>(out + 8 * block) =
            make_float2(sums[block][2 * r], sums[block][2 * r + 1]);
      }
    }
  }
}

/// Work: LatentLine, or LatentBlock with a grid of (items of kPrefillRows rows, blocks of rows).
template <typename Work>
__global__ __launch_bounds__(kThreads,
                             1) void warp_latent_kernel(const __grid_constant__ LatentArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ float of_warps[2 * 4 * kQueries];
  const WarpShared shared{ptx::shared_address(memory), of_warps};
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  for (Work work(args); work.more(); work.next(args)) {
    const LatentSegment segment = work.segment();
    const int32_t seen[2] = {segment.seen(args, lane / 4), segment.seen(args, lane / 4 + 8)};
    WarpRows rows;
    float sums[kBlocks][4] = {};
    fetch_queries<kQueries>(args, segment, shared.queries(), thread);
    fetch_tile(args, segment, segment.first_tile, shared.tile(segment.first_tile));
    for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile) {
      fetch_tile(args, segment, tile + 1, shared.tile(tile + 1));
      ptx::copy_wait<1>();
      __syncthreads();
      float scores[4];
      multiply(shared.queries(),
               shared.tile(tile) + static_cast<uint32_t>(thread / 32) * kLatentGroup, lane, scores);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t token = tile * kTokens + thread / 32 * 8 + lane % 4 * 2 + e % 2;
        scores[e] = token < seen[e / 2] ? scores[e] : -INFINITY;
      }
      weigh(args, shared, scores, rows, sums);
      __syncthreads();
      add_tile(shared.weights(), shared.tile(tile), thread, sums);
      __syncthreads();  // the tile, weights and tops have been read
    }
    join_warps(rows.total, shared.of_warps + 4 * kQueries, thread,
               [](float a, float b) { return a + b; });
    if (segment.slot >= 0 && thread < 32 && lane % 4 == 0) {
      float2* const tops = args.partial_tops + int64_t{segment.slot} * args.columns;
      tops[lane / 4] = make_float2(rows.top[0], rows.total[0]);
      tops[lane / 4 + 8] = make_float2(rows.top[1], rows.total[1]);
    }
    give(args, segment, sums, rows.total);
    ptx::copy_wait<0>();
    __syncthreads();  // totals have been read
  }
}

template <typename Work>
cudaError_t launch_warps(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  const cudaError_t status =
      cudaFuncSetAttribute(warp_latent_kernel<Work>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(kSharedBytes));
  return status != cudaSuccess
             ? status
             : launch(warp_latent_kernel<Work>, {grid, kThreads, kSharedBytes}, context, args);
}

}  // namespace

cudaError_t decode_latent_warps(const LatentLaunch& launch, const LaunchContext& context) {
  const LineForm form = latent_line(launch.shape);
  const LatentArgs args = latent_args(launch, form);
  const cudaError_t status =
      launch_warps<LatentLine>(dim3(static_cast<unsigned>(form.blocks)), args, context);
  return status != cudaSuccess ? status : merge_latent(args, context);
}

cudaError_t prefill_latent_warps(const LatentLaunch& launch, const LaunchContext& context) {
  const LatentArgs args = latent_args(launch, latent_line(launch.shape));
  const int64_t blocks = prefill_blocks(launch.step.sequences, launch.step.rows);
  const int32_t items = (kPrefillRows * args.heads + kQueries - 1) / kQueries;
  return launch_warps<LatentBlock>(
      dim3(static_cast<unsigned>(items), static_cast<unsigned>(blocks)), args, context);
}

}  // namespace nibble::cuda
