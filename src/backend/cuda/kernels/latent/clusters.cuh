#pragma once

// Latent attention by clusters of blocks (sm_90a), for items of many queries: the blocks of a
// cluster have a share of the line together, each a part of every segment's tiles, and merge what
// they have summed of a segment through each other's shared memory, where tiles lay. So parts that
// go out to memory and back are fewer by as many.

#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {

/// The segments of a cluster's share of the line, and of each the tiles that are this block's. It
/// may have none of a short one, of which blocks have tiles in turns.
class LatentClusterLine : public LatentShare<kClusterBlocks> {
 public:
  __device__ explicit LatentClusterLine(const LatentArgs& args)
      : LatentShare(args), rank_(static_cast<int32_t>(ptx::cluster_rank())) {}

  [[nodiscard]] __device__ LatentSegment segment() const {
    LatentSegment part = LatentShare::segment();
    const int32_t first = part.first_tile;
    const int32_t tiles = part.end_tile - first;
    const int32_t turn = (rank_ + part.sequence) % kBlocks;
    part.first_tile = first + tiles * turn / kBlocks;
    part.end_tile = first + tiles * (turn + 1) / kBlocks;
    return part;
  }

 private:
  int32_t rank_;
};

/// What blocks of a cluster have of each other in their shared memory.
struct ClusterExchange {
  uint32_t sums;      // [other blocks][2 warpgroups][chunks][128 threads] of four sums
  uint32_t tops;      // [blocks][32]: tops and totals of queries g and g + 8 of a warp
  uint32_t barriers;  // tops are there; sums are there; a segment has ended

  [[nodiscard]] __device__ uint32_t tops_there() const { return barriers; }
  [[nodiscard]] __device__ uint32_t sums_there() const { return barriers + 8; }
  /// The block has merged its sums of a segment: the ring is free, and so are tops and sums for
  /// the next one. The fetching warp arrives, too, when it has waited for the segment before.
  [[nodiscard]] __device__ uint32_t segment_ended() const { return barriers + 16; }
};

constexpr uint32_t kExchangeBarriers = 3;
constexpr uint32_t kExchangeTops = 32;     // of a block, 16 bytes each
constexpr uint32_t kSummingThreads = 256;  // of two warpgroups
constexpr int kSumChunks = 32;             // of four of a thread's 128 sums

/// Chunks that a block has when segments are merged: rank * kOwn..+kOwn - 1.
template <int kBlocks>
struct OwnChunks {
  static constexpr int kOwn = kSumChunks / kBlocks;
  static constexpr uint32_t kGroupBytes = kOwn * 128 * 16;  // of a warpgroup
  static constexpr uint32_t kBlockBytes = 2 * kGroupBytes;
  static constexpr uint32_t kBytes = (kBlocks - 1) * kBlockBytes;  // what a block is sent
  /// Whether block `self` has the chunk.
  static __device__ __forceinline__ bool has(int chunk, uint32_t self) {
    return kBlocks == 1 || static_cast<uint32_t>(chunk / kOwn) == self;
  }
};

/// By one thread, before the cluster meets.
__device__ __forceinline__ void init_exchange(const ClusterExchange& exchange) {
  ptx::barrier_init(exchange.tops_there(), 1);
  ptx::barrier_init(exchange.sums_there(), 1);
  ptx::barrier_init(exchange.segment_ended(), kSummingThreads + ptx::kWarpArrivals);
}

/// Tops and totals of two queries become those of all blocks' tiles of segment `number`; `keep`:
/// what the block's own sums are to be multiplied by. By the 128 threads that make weights, when
/// this block has read its last tile, when other blocks' sums may come to where tiles lay.
template <int kBlocks>
__device__ __forceinline__ void exchange_tops(const ClusterExchange& exchange,
                                              uint32_t number,
                                              float unit,
                                              float (&top)[2],
                                              float (&total)[2],
                                              float (&keep)[2]) {
  if (number > 0) {  // a block without tiles of this segment may still be at the one before
    ptx::barrier_wait(exchange.segment_ended(), (number - 1) % 2);
  }
  const auto thread = threadIdx.x % 128;
  const uint32_t place = (thread / 32 * 8 + thread % 32 / 4) * 16;
  if (thread == 0) {  // before the block says anything of this segment
    ptx::barrier_arrive_expect(exchange.tops_there(), kBlocks * kExchangeTops * 16);
    ptx::barrier_arrive_expect(exchange.sums_there(), OwnChunks<kBlocks>::kBytes);
  }
  if (thread % 4 == 0) {
    const uint32_t own = exchange.tops + ptx::cluster_rank() * kExchangeTops * 16 + place;
    const uint4 value = make_uint4(__float_as_uint(top[0]), __float_as_uint(total[0]),
                                   __float_as_uint(top[1]), __float_as_uint(total[1]));
#pragma unroll
    for (uint32_t rank = 0; rank < kBlocks; ++rank) {
      ptx::store_async16(ptx::peer_address(own, rank), value,
                         ptx::peer_address(exchange.tops_there(), rank));
    }
  }
  ptx::barrier_wait(exchange.tops_there(), number % 2);
  uint4 of[kBlocks];
#pragma unroll
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    of[rank] = ptx::load_shared16(exchange.tops + rank * kExchangeTops * 16 + place);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float own = top[r];
#pragma unroll
    for (const uint4& block : of) {
      top[r] = fmaxf(top[r], __uint_as_float(r == 0 ? block.x : block.z));
    }
    // A query may have seen nothing in the segment.
    const float shift = top[r] == -INFINITY ? 0.0F : top[r] * unit;
    total[r] = 0.0F;
#pragma unroll
    for (const uint4& block : of) {
      const float weight =
          ptx::exp2_approx(fmaf(__uint_as_float(r == 0 ? block.x : block.z), unit, -shift));
      total[r] = fmaf(__uint_as_float(r == 0 ? block.y : block.w), weight, total[r]);
    }
    keep[r] = ptx::exp2_approx(fmaf(own, unit, -shift));
  }
}

/// A thread's 128 sums of segment `number`, in whichever rows of an array: those that are this
/// block's become the sums of all blocks, in the order of their ranks. By two warpgroups, `half`
/// says which.
template <int kBlocks, int kRows, int kWidth>
__device__ __forceinline__ void merge_sums(const ClusterExchange& exchange,
                                           uint32_t number,
                                           int half,
                                           float (&sums)[kRows][kWidth]) {
  using Own = OwnChunks<kBlocks>;
  static_assert(kRows * kWidth == 4 * kSumChunks && kWidth % 4 == 0);
  constexpr uint32_t kChunkBytes = 128 * 16;
  const auto sum = [&](int chunk, int i) -> float& {
    return sums[chunk * 4 / kWidth][chunk * 4 % kWidth + i];
  };
  const uint32_t self = ptx::cluster_rank();
  const uint32_t place =
      exchange.sums + static_cast<uint32_t>(half) * Own::kGroupBytes + threadIdx.x % 128 * 16;
#pragma unroll
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    if (rank == self) {
      continue;
    }
    const uint32_t slot = self < rank ? self : self - 1;
    const uint32_t to = ptx::peer_address(place + slot * Own::kBlockBytes, rank);
    const uint32_t there = ptx::peer_address(exchange.sums_there(), rank);
#pragma unroll
    for (int i = 0; i < Own::kOwn; ++i) {
      const int chunk = static_cast<int>(rank) * Own::kOwn + i;
      ptx::store_async16(to + static_cast<uint32_t>(i) * kChunkBytes,
                         make_uint4(__float_as_uint(sum(chunk, 0)), __float_as_uint(sum(chunk, 1)),
                                    __float_as_uint(sum(chunk, 2)), __float_as_uint(sum(chunk, 3))),
                         there);
    }
  }
  ptx::barrier_wait(exchange.sums_there(), number % 2);
#pragma unroll
  for (uint32_t owner = 0; owner < kBlocks; ++owner) {
    if (owner != self) {
      continue;
    }
#pragma unroll
    for (int i = 0; i < Own::kOwn; ++i) {
      const int chunk = static_cast<int>(owner) * Own::kOwn + i;
      float merged[4] = {};
#pragma unroll
      for (uint32_t rank = 0; rank < kBlocks; ++rank) {
        if (rank == owner) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            merged[j] += sum(chunk, j);
          }
          continue;
        }
        const uint32_t slot = rank < owner ? rank : rank - 1;
        const uint4 part = ptx::load_shared16(place + slot * Own::kBlockBytes +
                                              static_cast<uint32_t>(i) * kChunkBytes);
        merged[0] += __uint_as_float(part.x), merged[1] += __uint_as_float(part.y);
        merged[2] += __uint_as_float(part.z), merged[3] += __uint_as_float(part.w);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum(chunk, j) = merged[j];
      }
    }
  }
  ptx::warp_arrive(exchange.segment_ended());
}

}  // namespace nibble::cuda
