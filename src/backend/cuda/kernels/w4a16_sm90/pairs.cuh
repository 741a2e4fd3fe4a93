#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.cuh"

// The product of w4a16_sm90/w4a16_sm90.cuh where blocks share tiles and none waits for another's
// sums: what a block multiplies for others, or two blocks for a row block that they have in common,
// comes first in its share of the steps, and these sums travel while it multiplies the rest. The
// sums of two blocks, a cluster, travel to each other's shared memory, those of more through global
// memory; there a block waits for others that wait for nothing, and a grid is no larger than the
// GPU.
namespace nibble::cuda {

/// Blocks of kGroups x kBlocks x 64 rows in two ways. Four row blocks: two blocks have seven; each
/// has three for all steps, and both the one between them, the first block up to the step `turn`,
/// the second from there on. Two row blocks: these two; the first two blocks have one each of their
/// own for `turn` steps and the other's for `lent` fewer or equal ones, further blocks both for
/// `lent`.
template <int kTokens_, int kBlocks_, int kGroups_, int kStages_>
struct W4A16PairTile : W4A16Tile<kTokens_, kBlocks_, kGroups_, kStages_, 1, 1> {
  using Base = W4A16Tile<kTokens_, kBlocks_, kGroups_, kStages_, 1, 1>;
  static constexpr bool kLends = Base::kRowBlocks == 2;  // to the other block, or shares with it
  static constexpr int kPairRowBlocks = kLends ? 2 : 2 * Base::kRowBlocks - 1;
  static constexpr int kOwn = kLends ? 1 : Base::kRowBlocks - 1;      // row blocks of all its steps
  static constexpr int kReceived = kLends ? kTokens_ : kTokens_ / 2;  // tokens x 64 rows
  static constexpr int kMostParts = kLends ? 4 : 2;                   // blocks of a tile
  static_assert(Base::kRowBlocks == 2 || Base::kRowBlocks == 4);
};

/// What one block multiplies: its first kOwn row blocks for `steps` steps, and a last one for the
/// first `short_steps` of them.
struct PairShare {
  int rank = 0;                // among the tile's blocks
  int row = 0, short_row = 0;  // row blocks
  int token_tile = 0;
  int steps = 0, short_steps = 0;
  int first = 0, end = 0, back = 0;  // steps go from `first` to `end`, then on from `back`

  template <typename Tile>
  static __device__ __forceinline__ PairShare of(const GemmSchedule& schedule) {
    const int parts = Tile::kLends ? schedule.parts : 2;
    const int tile = static_cast<int>(blockIdx.x) / parts;
    const int row = tile / schedule.token_tiles * Tile::kPairRowBlocks;
    PairShare share;
    share.rank = static_cast<int>(blockIdx.x) - tile * parts;
    share.token_tile = tile % schedule.token_tiles;
    if (share.rank < 2) {
      share.row = row + share.rank * (Tile::kPairRowBlocks - Tile::kOwn);
      share.short_row = Tile::kLends ? row + 1 - share.rank : row + Tile::kOwn;
      share.steps = Tile::kLends ? schedule.turn : schedule.steps;
      share.short_steps = Tile::kLends || share.rank == 1 ? schedule.lent : schedule.turn;
      share.first = share.rank == 0 ? 0 : schedule.turn;
      share.end = Tile::kLends ? schedule.turn + schedule.lent : schedule.steps;
      share.back = Tile::kLends ? schedule.lent : 0;
    } else {
      share.row = row;
      share.short_row = row + 1;
      share.first = schedule.turn + (share.rank - 1) * schedule.lent;
      share.steps = share.short_steps = min(schedule.lent, schedule.steps - share.first);
      share.end = schedule.steps;
    }
    return share;
  }
  __device__ __forceinline__ int step(int i) const {
    return first + i < end ? first + i : back + first + i - end;
  }
};

template <int kGroupSize, typename Tile>
struct W4A16Pairs {
  using Loop = W4A16Loop<Int4Codec<kGroupSize>, Tile>;
  using Layout = Int4GroupLayout<kGroupSize>;
  using Place = typename Loop::Place;
  static constexpr int kTokens = Tile::kTokens, kBlocks = Tile::kBlocks, kStages = Tile::kStages;
  static constexpr int kGroups = Tile::kGroups;
  static constexpr int kSums = kTokens / 2;
  // Warpgroups that have none of the block's own rows, and end early.
  static constexpr int kEarly = kGroups - (Tile::kOwn + kBlocks - 1) / kBlocks;

  // Behind the ring and its barriers: the other block's sums, and a barrier that counts them.
  static constexpr int kReceivedBytes = 64 * Tile::kReceived * 4;
  static constexpr int kReceived = (Loop::kBytes + 127) / 128 * 128;
  static constexpr int kArrived = kReceived + kReceivedBytes;
  static constexpr int kBytes = kArrived + 8;
  static_assert(kBytes <= 232448);  // of a block

  // --- the copying warp, one thread of it ---

  // Weights of the block's step number i.
  static __device__ __forceinline__ void copy_weights(
      const GemmSm90Args& args, const PairShare& share, int i, uint32_t stage, uint32_t barrier) {
    const int own = max(0, min(Tile::kOwn, args.row_blocks - share.row)) * Layout::kPairBytes;
    const int last = i < share.short_steps && share.short_row < args.row_blocks ? 1 : 0;
    ptx::barrier_arrive_expect(barrier, own + last * Layout::kPairBytes + 2 * Loop::kXBytes);
    const int64_t pair = static_cast<int64_t>(share.step(i)) * args.row_blocks;
    if (own > 0) {
      ptx::bulk_copy(stage, args.weights + (pair + share.row) * Layout::kPairBytes, own, barrier);
    }
    if (last != 0) {
      ptx::bulk_copy(stage + Tile::kOwn * Layout::kPairBytes,
                     args.weights + (pair + share.short_row) * Layout::kPairBytes,
                     Layout::kPairBytes, barrier);
    }
  }

  static __device__ __forceinline__ void start_ring(const GemmSm90Args& args,
                                                    const PairShare& share,
                                                    uint32_t base) {
    for (int i = 0; i < min(Loop::kAhead, share.steps); ++i) {
      copy_weights(args, share, i, base + i * Loop::kStageBytes, base + Loop::kBarriers + 8 * i);
    }
  }

  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const GemmSm90Args& args,
                                                   const PairShare& share,
                                                   uint32_t base) {
    ptx::wait_for_predecessor();
    Place place(base);
    for (int i = 0; i < share.steps; ++i) {
      const uint32_t stage = base + place.offset, empty = place.barrier + 8 * kStages;
      if (i >= kStages) {
        ptx::barrier_wait_to_refill(empty, place.parity ^ 1);
      }
      if (i >= Loop::kAhead) {
        copy_weights(args, share, i, stage, place.barrier);
      }
      if (kEarly > 0 && i >= share.short_steps) {  // for those who no longer read
        ptx::barrier_arrive(empty, kEarly * 4 * ptx::kWarpArrivals);
      }
      const int column = share.step(i) * 128;
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        ptx::tensor_copy(stage + Loop::kX + d * Loop::kXBytes, x, column + d * 64,
                         share.token_tile * kTokens, place.barrier);
      }
      place.advance(base);
    }
  }

  // --- the multiplying warpgroups ---

  // 16-byte word w of this thread's, of what the other block sends.
  static __device__ __forceinline__ uint32_t received(uint32_t base, int w, int thread) {
    return base + kReceived + (w * 128 + thread) * 16;
  }

  // To the cluster's other block.
  template <int kCount>
  static __device__ __forceinline__ void send(const float (&sums)[kCount],
                                              uint32_t base,
                                              int thread) {
    const uint32_t other = ptx::cluster_rank() ^ 1;
    const uint32_t to = ptx::peer_address(received(base, 0, thread), other);
    const uint32_t barrier = ptx::peer_address(base + kArrived, other);
#pragma unroll
    for (int w = 0; w < kCount / 4; ++w) {
      ptx::store_async16(to + w * 2048, sum_word(sums + 4 * w), barrier);
    }
  }

  static constexpr int kWords = kSums / 4;  // of 16 bytes, of a row block

  // Where in memory a block leaves sums of the tile's row block `row`.
  static __device__ __forceinline__ float4* part(const GemmSm90Args& args,
                                                 int row,
                                                 int rank,
                                                 int thread) {
    const int parts = args.schedule.parts, tile = static_cast<int>(blockIdx.x) / parts;
    return static_cast<float4*>(args.parts) + ((tile * 2 + row) * parts + rank) * (kWords * 128) +
           thread;
  }
  static __device__ __forceinline__ uint32_t* counter(const GemmSm90Args& args, int row) {
    return args.counters + static_cast<int>(blockIdx.x) / args.schedule.parts * 2 + row;
  }

  static __device__ __forceinline__ void leave_part(const float (&sums)[kSums],
                                                    const GemmSm90Args& args,
                                                    int row,
                                                    int rank,
                                                    int group,
                                                    int thread) {
    float4* to = part(args, row, rank, thread);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* four = sums + 4 * w;
      __stcg(to + w * 128, float4{four[0], four[1], four[2], four[3]});
    }
    sync_group(group);
    if (thread == 0) {
      ptx::add_release(counter(args, row), 1);
    }
  }

  // Brings the sums of the block's own row block that others left in memory, added in the order of
  // the blocks, to where a cluster's other block would have sent them.
  static __device__ __forceinline__ void fetch_parts(
      const GemmSm90Args& args, int rank, int group, int thread, uint32_t base) {
    constexpr int kOthers = Tile::kMostParts - 1;
    constexpr int kChunk = kWords % 8 == 0 ? 8 : 4;  // words read at once
    const int others = args.schedule.parts - 1;
    if (thread == 0) {
      uint32_t* arrivals = counter(args, rank);
      while (ptx::load_acquire(arrivals) != static_cast<uint32_t>(others)) {
      }
      *arrivals = 0;
    }
    sync_group(group);
#pragma unroll
    for (int first = 0; first < kWords; first += kChunk) {
      float4 words[kOthers][kChunk];
#pragma unroll
      for (int p = 0; p < kOthers; ++p) {
        const float4* from = part(args, rank, p < rank ? p : p + 1, thread);
#pragma unroll
        for (int w = 0; w < kChunk; ++w) {
          words[p][w] =
              p < others ? __ldcg(from + (first + w) * 128) : float4{0.0F, 0.0F, 0.0F, 0.0F};
        }
      }
#pragma unroll
      for (int w = 0; w < kChunk; ++w) {
        float4 total = words[0][w];
#pragma unroll
        for (int p = 1; p < kOthers; ++p) {
          total.x += words[p][w].x;
          total.y += words[p][w].y;
          total.z += words[p][w].z;
          total.w += words[p][w].w;
        }
        ptx::store_shared16(received(base, first + w, thread),
                            uint4{__float_as_uint(total.x), __float_as_uint(total.y),
                                  __float_as_uint(total.z), __float_as_uint(total.w)});
      }
    }
    ptx::barrier_arrive(base + kArrived);
  }

  template <int kCount>
  static __device__ __forceinline__ void add_received(float (&sums)[kCount],
                                                      uint32_t base,
                                                      int thread) {
    ptx::barrier_wait(base + kArrived, 0);
#pragma unroll
    for (int w = 0; w < kCount / 4; ++w) {
      add_word(sums + 4 * w, ptx::load_shared16(received(base, w, thread)));
    }
  }

  static __device__ __forceinline__ void copy(const float (&from)[kSums], float (&to)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      to[i] = from[i];
    }
  }

  // Sums of the row block that both have: each stores a half of the tokens.
  static __device__ __forceinline__ void store_halves(const float (&sums)[kSums],
                                                      const GemmSm90Args& args,
                                                      const PairShare& share,
                                                      int group,
                                                      int thread,
                                                      uint32_t base) {
    const bool upper = ptx::cluster_rank() == 1;
    float all[1][kSums], kept[1][kSums / 2], sent[kSums / 2];
    copy(sums, all[0]);
    Loop::restore(all);
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      kept[0][i] = upper ? all[0][kSums / 2 + i] : all[0][i];
      sent[i] = upper ? all[0][i] : all[0][kSums / 2 + i];
    }
    send(sent, base, thread);
    add_received(kept[0], base, thread);
    store_whole(kept, args, share.short_row, share.token_tile * kTokens + (upper ? kTokens / 2 : 0),
                group, thread, base + Loop::kStaged + group * kStagedBytes);
  }

  // Barriers, this block's and in a cluster the other's, are there: said, then awaited.
  static __device__ __forceinline__ bool in_cluster(const GemmSm90Args& args) {
    return !Tile::kLends || args.schedule.parts == 2;
  }
  static __device__ __forceinline__ void announce_barriers(const GemmSm90Args& args) {
    if (in_cluster(args)) {
      ptx::cluster_arrive_relaxed();
    } else {
      __syncthreads();
    }
  }
  static __device__ __forceinline__ void await_barriers(const GemmSm90Args& args) {
    if (in_cluster(args)) {
      ptx::cluster_wait();
    }
  }

  static __device__ __forceinline__ void multiply(const GemmSm90Args& args,
                                                  const PairShare& share,
                                                  int group,
                                                  uint32_t base) {
    const int thread = static_cast<int>(threadIdx.x & 127);
    await_barriers(args);
    ptx::wait_for_predecessor();
    Place place(base);
    const typename Loop::Reader reader(base, group, thread);
    const int token = share.token_tile * kTokens;
    const uint32_t room = base + Loop::kStaged + group * kStagedBytes;
    const bool own = share.rank < 2 && (group + 1) * kBlocks <= Tile::kOwn;
    float sums[kBlocks][kSums] = {};
    Loop::accumulate(sums, place, Loop::uniform(own ? share.steps : share.short_steps), reader,
                     base);
    if (own) {
      Loop::restore(sums);
      if constexpr (Tile::kLends) {
        add_received(sums[0], base, thread);
      }
      store_whole(sums, args, share.row + group * kBlocks, token, group, thread, room);
    } else if constexpr (Tile::kLends) {
      Loop::restore(sums);
      if (args.schedule.parts == 2) {
        send(sums[0], base, thread);
      } else {
        leave_part(sums[0], args, share.rank < 2 ? 1 - share.rank : group, share.rank, group,
                   thread);
        if (share.rank < 2) {
          fetch_parts(args, share.rank, group, thread, base);
        }
      }
    } else {
      store_halves(sums[kBlocks - 1], args, share, group, thread, base);
      if constexpr (kBlocks == 2) {  // the other row block is the block's own
        Loop::template accumulate<1>(sums, place, Loop::uniform(share.steps - share.short_steps),
                                     reader, base);
        float rest[1][kSums];
        copy(sums[0], rest[0]);
        Loop::restore(rest);
        store_whole(rest, args, share.row + group * kBlocks, token, group, thread, room);
      }
    }
  }
};

/// y of the tiles that args.schedule gives to this pair of blocks, a cluster. x as for
/// gemm_w4a16_sm90.
template <int kGroupSize, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_w4a16_pairs_sm90(const __grid_constant__ CUtensorMap x,
                          const __grid_constant__ GemmSm90Args args) {
  using Pairs = W4A16Pairs<kGroupSize, Tile>;
  using Loop = typename Pairs::Loop;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = Loop::uniform(static_cast<int>(threadIdx.x >> 5));
  const PairShare share = PairShare::of<Tile>(args.schedule);
  if (threadIdx.x == 128 * Tile::kGroups) {
    ptx::prefetch_tensor_map(x);
    ptx::init_ring<Tile::kStages>(base + Loop::kBarriers, 4 * Tile::kGroups * ptx::kWarpArrivals);
    ptx::barrier_init(base + Pairs::kArrived, Pairs::in_cluster(args) ? 1 : 128);
    ptx::barrier_init_fence();
    if (Pairs::in_cluster(args)) {
      ptx::barrier_arrive_expect(base + Pairs::kArrived, Pairs::kReceivedBytes);
    }
  }
  Pairs::announce_barriers(args);
  ptx::allow_successor();
  if (warp >= 4 * Tile::kGroups) {
    ptx::registers_release<Tile::kLeft>();
    if (threadIdx.x == 128 * Tile::kGroups) {
      Pairs::start_ring(args, share, base);
    }
    Pairs::await_barriers(args);
    if (threadIdx.x == 128 * Tile::kGroups) {
      Pairs::fill_ring(x, args, share, base);
    }
  } else {
    ptx::registers_take<Tile::kTaken>();
    Pairs::multiply(args, share, warp >> 2, base);
  }
}

}  // namespace nibble::cuda
