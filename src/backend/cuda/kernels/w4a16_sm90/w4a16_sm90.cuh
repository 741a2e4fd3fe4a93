#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"
#include "backend/cuda/kernels/w4a16_sm90/codecs.cuh"
#include "backend/cuda/kernels/w4a16_sm90/store.cuh"
#include "backend/cuda/ptx/cluster.cuh"

// The main loop of gemm_sm90/gemm_sm90.cuh for INT4 weights in groups: a block is a warp that
// copies and kGroups warpgroups that decode weights to BF16 in registers and multiply. Eight
// weights take five integer and four floating-point operations. Few tokens are the work of
// w4a16_sm90/decode.cuh.
namespace nibble::cuda {

/// kBlocks x 64 rows for each of kGroups warpgroups, kTokens tokens, 128 of K in each of kStages
/// stages. kResident blocks fit a multiprocessor, kLaunched of one launch run on it. kCluster
/// blocks share the tokens: each copies some of them for all.
template <int kTokens_,
          int kBlocks_,
          int kGroups_,
          int kStages_,
          int kResident_,
          int kLaunched_,
          int kCluster_ = 1>
struct W4A16Tile {
  static constexpr int kTokens = kTokens_, kBlocks = kBlocks_, kGroups = kGroups_;
  static constexpr int kStages = kStages_, kResident = kResident_, kLaunched = kLaunched_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kDepth = 2;  // K blocks of 64
  static constexpr int kRowBlocks = kGroups * kBlocks;
  static constexpr int kSums = kBlocks * kTokens / 2;  // of a thread
  // Where sums need them, the copying warp is a warpgroup whose registers the others take.
  static constexpr bool kTakesRegisters = kResident == 1;
  // Registers of a thread: what the block was launched with, 168, 128 or 96 each, is all there is.
  static constexpr int kTaken = kGroups == 2 ? 232 : kGroups == 3 ? 152 : 104;
  static constexpr int kLeft = kGroups == 4 ? 56 : 40;
  static constexpr int kThreads = kGroups * 128 + (kTakesRegisters ? 128 : 32);
  // Whether clusters of blocks may share a tile's steps.
  static constexpr bool kShares = kCluster == 1;
};

template <typename Codec, typename Tile>
struct W4A16Loop {
  using Layout = typename Codec::Layout;
  static constexpr int kTokens = Tile::kTokens, kBlocks = Tile::kBlocks, kStages = Tile::kStages;
  static constexpr int kSums = kTokens / 2;  // of a thread and row block
  static constexpr int kAhead = 2;           // stages

  // A stage: pairs of units of the row blocks, then two tiles of x.
  static constexpr int kWeightBytes = Tile::kRowBlocks * Layout::kPairBytes;
  static constexpr int kX = (kWeightBytes + 1023) / 1024 * 1024;
  static constexpr int kXBytes = kTokens * 128;
  static constexpr int kStageBytes = kX + 2 * kXBytes;
  static constexpr int kBarriers = kStages * kStageBytes;  // full, then empty
  static constexpr int kFlags = kBarriers + 16 * kStages;
  static constexpr int kStaged = (kFlags + 4 * Tile::kGroups * Tile::kCluster + 127) / 128 * 128;
  static constexpr int kBytes = kStaged + Tile::kGroups * kStagedBytes;
  static_assert(Tile::kRowBlocks * kTokens * 256 <= kBarriers);  // sums fit
  static_assert(kBytes <= 232448);                               // of a block

  // A stage of the ring: its offset from the base, its full barrier and the parity of its phase.
  struct Place {
    uint32_t offset, barrier, parity;
    __device__ __forceinline__ explicit Place(uint32_t base)
        : offset(0), barrier(base + kBarriers), parity(0) {}
    __device__ __forceinline__ void advance(uint32_t base) {
      offset += kStageBytes;
      barrier += 8;
      if (offset == kStages * kStageBytes) {
        offset = 0;
        barrier = base + kBarriers;
        parity ^= 1;
      }
    }
  };

  // The same in all threads of a warp, said so that the compiler keeps what depends on it in
  // uniform registers, from which products take their descriptors.
  static __device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(0xffffffffU, value, 0);
  }

  // Number of this block's cluster, and of the first of its row blocks.
  static __device__ __forceinline__ int cluster_index() { return blockIdx.x / Tile::kCluster; }
  static __device__ __forceinline__ int first_row_block(const GemmPart& part) {
    return (part.row_tile * Tile::kCluster + blockIdx.x % Tile::kCluster) * Tile::kRowBlocks;
  }

  // --- the copying warp, one thread of it ---

  // A step of this block's rows, those that exist: sums of others are not stored.
  static __device__ __forceinline__ void copy_weights(
      const GemmSm90Args& args, const GemmPart& part, int step, uint32_t stage, uint32_t barrier) {
    const int first = first_row_block(part);
    const int bytes = max(0, min(Tile::kRowBlocks, args.row_blocks - first)) * Layout::kPairBytes;
    ptx::barrier_arrive_expect(barrier, bytes + 2 * kXBytes);
    if (bytes > 0) {
      const int64_t pair = static_cast<int64_t>(step) * args.row_blocks + first;
      ptx::bulk_copy(stage, args.weights + pair * Layout::kPairBytes, bytes, barrier);
    }
  }

  // A tile of x; in a cluster this block's share of it, to all.
  static __device__ __forceinline__ void copy_x(
      const CUtensorMap& x, uint32_t to, int column, int token, uint32_t barrier) {
    if constexpr (Tile::kCluster == 1) {
      ptx::tensor_copy(to, x, column, token, barrier);
    } else {
      const int rank = blockIdx.x % Tile::kCluster;
      ptx::tensor_copy_to_all(to + rank * (kXBytes / Tile::kCluster), x, column,
                              token + rank * (kTokens / Tile::kCluster), barrier,
                              (1 << Tile::kCluster) - 1);
    }
  }

  // The first weights do not wait for the predecessor; more of them would only delay activations.
  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const GemmSm90Args& args,
                                                   uint32_t base) {
    GemmParts parts(args.schedule, cluster_index());
    GemmPart part;
    Place place(base);
    int columns[kAhead], tokens[kAhead];
    const auto copy_both = [&](uint32_t offset, int column, int token, uint32_t barrier) {
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        copy_x(x, base + offset + kX + d * kXBytes, column + d * 64, token, barrier);
      }
    };
    const auto follow = [&](int count) {  // activations of the first stages
      if constexpr (Tile::kCluster > 1) {
        ptx::cluster_wait();  // all have their barriers
      }
      ptx::wait_for_predecessor();
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (s < count) {
          copy_both(s * kStageBytes, columns[s], tokens[s], base + kBarriers + 8 * s);
        }
      }
    };
    int count = 0;
    while (parts.next(part)) {
      for (int step = part.begin; step < part.end; ++step, ++count) {
        if (count == kAhead) {
          follow(count);
        }
        if (count >= kStages) {
          ptx::barrier_wait_to_refill(place.barrier + 8 * kStages, place.parity ^ 1);
        }
        copy_weights(args, part, step, base + place.offset, place.barrier);
        const int column = step * 128, token = part.token_tile * kTokens;
        if (count < kAhead) {
#pragma unroll
          for (int s = 0; s < kAhead; ++s) {
            columns[s] = s == count ? column : columns[s];
            tokens[s] = s == count ? token : tokens[s];
          }
        } else {
          copy_both(place.offset, column, token, place.barrier);
        }
        place.advance(base);
      }
    }
    if (count <= kAhead) {
      follow(count);
    }
  }

  // --- the multiplying warpgroups ---

  // A thread's codes of a unit and, for its two rows, the scales of each group.
  static constexpr int kScales = Codec::kScales;
  static constexpr float kShrink = Codec::kShrink;  // of weights, until all are summed
  struct Fetched {
    uint4 codes;
    uint32_t scales[kScales];
  };
  using Terms = typename Codec::Terms;

  // Codes of one unit as this thread's fragments, times the scales of its two rows and kShrink.
  static __device__ __forceinline__ void decode(const uint4& unit,
                                                const Terms& terms,
                                                uint32_t (&a)[4][4]) {
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Codec::decode(words[k], terms, kScales == 2 ? k / 2 : 0, a[k]);
      ptx::pin(a[k]);
    }
  }

  // Where this thread finds the codes (and scales) of unit u of the stage at `place`.
  struct Reader {
    uint32_t codes, scales;  // of the warpgroup's first row block in the first stage
    __device__ __forceinline__ Reader(uint32_t base, int group, int thread)
        : codes(base + group * kBlocks * Layout::kPairBytes + thread / 32 * Layout::kSliceBytes +
                thread % 32 * 16),
          scales(base + group * kBlocks * Layout::kPairBytes + thread / 32 * Layout::kSliceBytes +
                 thread % 32 / 4 * 4) {}
    // Unit u of the stage, of kActive row blocks; where two have one group, the second keeps its
    // scales.
    template <int kActive>
    __device__ __forceinline__ void fetch(const Place& place, int u, Fetched& unit) const {
      const int block = u % kActive * Layout::kPairBytes, d = u / kActive;
      const uint32_t at = scales + place.offset + block + Layout::scales(d);
      if (d == 0 || !Layout::kShared) {
#pragma unroll
        for (int g = 0; g < kScales; ++g) {
          unit.scales[g] = ptx::load_shared4(at + g * Layout::kGroupBytes);
        }
      }
      unit.codes = ptx::load_shared16(codes + place.offset + block + Layout::codes(d));
    }
  };

  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&sums)[kCount / 2],
                                                  const uint32_t (&a)[4][4],
                                                  uint64_t x) {
    ptx::mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::mma_registers<ptx::MmaType::kBf16, kCount>(sums, a[k], x + 2 * k);
    }
    ptx::mma_commit();
  }

  // Adds `steps` stages of the ring from `place` on to the sums of the first kActive row blocks and
  // kCount tokens.
  template <int kActive = kBlocks, int kCount = kTokens>
  static __device__ __forceinline__ void accumulate(float (&sums)[kBlocks][kCount / 2],
                                                    Place& place,
                                                    int steps,
                                                    const Reader& reader,
                                                    uint32_t base) {
    constexpr int kUnits = 2 * kActive;
    // Whether the second unit of a step has the terms of the first.
    constexpr bool kSame = Layout::kShared && kActive == 1;
    uint32_t a[2][4][4];
    Fetched fetched[2];                          // units of even and odd numbers
    uint32_t before = 0;                         // the barrier of the stage before, or none
    const auto release = [](uint32_t barrier) {  // all lanes have read its stage
      if constexpr (Tile::kCluster == 1) {
        ptx::warp_arrive(barrier);
      } else {
        ptx::warp_arrive_at_all<Tile::kCluster>(barrier);  // all fill this block's stages
      }
    };
    const uint64_t x = ptx::swizzled_descriptor(base + kX);
    ptx::barrier_wait(place.barrier, place.parity);
    reader.template fetch<kActive>(place, 0, fetched[0]);
    reader.template fetch<kActive>(place, 1, fetched[1]);
    Terms terms(fetched[0].scales);
    decode(fetched[0].codes, terms, a[0]);
    while (true) {
      // Units are decoded while the one before is multiplied.
      const uint64_t here = x + (place.offset >> 4);
      const uint32_t empty = place.barrier + 8 * kStages;
#pragma unroll
      for (int u = 0; u + 1 < kUnits; ++u) {
        multiply<kCount>(sums[u % kActive], a[u & 1], here + u / kActive * (kXBytes >> 4));
        if (u + 2 < kUnits) {
          reader.template fetch<kActive>(place, u + 2, fetched[u & 1]);
        }
        ptx::mma_wait<1>();
        if (u == 0 && before != 0) {
          release(before);
        }
        if constexpr (!kSame) {
          terms = Terms(fetched[(u + 1) & 1].scales);
        }
        decode(fetched[(u + 1) & 1].codes, terms, a[(u + 1) & 1]);
      }
      multiply<kCount>(sums[(kUnits - 1) % kActive], a[1], here + (kXBytes >> 4));
      before = empty;
      place.advance(base);
      if (--steps == 0) {
        break;
      }
      ptx::barrier_wait(place.barrier, place.parity);
      reader.template fetch<kActive>(place, 0, fetched[0]);
      reader.template fetch<kActive>(place, 1, fetched[1]);
      ptx::mma_wait<1>();
      terms = Terms(fetched[0].scales);
      decode(fetched[0].codes, terms, a[0]);
    }
    ptx::mma_wait<0>();
    release(before);
#pragma unroll
    for (int b = 0; b < kActive; ++b) {
      ptx::pin(sums[b]);
    }
  }

  // What accumulate() summed up, of weights as they are.
  template <int kRows, int kEach>
  static __device__ __forceinline__ void restore(float (&sums)[kRows][kEach]) {
#pragma unroll
    for (int b = 0; b < kRows; ++b) {
      ptx::multiply_in_place(sums[b], 1.0F / kShrink);
    }
  }

  static __device__ __forceinline__ void multiply_parts(const GemmSm90Args& args,
                                                        int group,
                                                        uint32_t base,
                                                        volatile uint32_t* flags) {
    const int thread = static_cast<int>(threadIdx.x & 127);
    if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();  // all have their barriers
    }
    ptx::wait_for_predecessor();
    GemmParts parts(args.schedule, cluster_index());
    GemmPart part;
    Place place(base);
    const Reader reader(base, group, thread);
    while (parts.next(part)) {
      float sums[kBlocks][kSums] = {};
      accumulate(sums, place, uniform(part.end - part.begin), reader, base);
      restore(sums);
      const int block = first_row_block(part) + group * kBlocks;
      const int token = part.token_tile * kTokens;
      bool stored = false;
      if constexpr (Tile::kShares) {
        if (args.schedule.cluster > 1) {
          store_shared_sums<Tile::kGroups>(sums, args, block, token, group, thread, base);
          stored = true;
        }
      }
      const int rank = blockIdx.x % Tile::kCluster;
      if (!stored && (part.split < 0 || add_parts<Tile::kGroups * Tile::kCluster>(
                                            sums, args, part, cluster_index(),
                                            rank * Tile::kGroups + group, thread, flags))) {
        store_whole(sums, args, block, token, group, thread, base + kStaged + group * kStagedBytes);
      }
    }
  }
};

/// y of the tiles that args.schedule gives to this block. x [m, k] bf16 in boxes of 64 x kTokens.
template <int kGroupSize, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gemm_w4a16_sm90(const __grid_constant__ CUtensorMap x,
                    const __grid_constant__ GemmSm90Args args) {
  using Loop = W4A16Loop<Int4Codec<kGroupSize>, Tile>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  auto* flags = reinterpret_cast<volatile uint32_t*>(shared + Loop::kFlags);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 128 * Tile::kGroups) {
    ptx::prefetch_tensor_map(x);
    ptx::init_ring<Tile::kStages>(base + Loop::kBarriers,
                                  4 * Tile::kGroups * Tile::kCluster * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  ptx::announce_barriers<Tile::kCluster>();
  ptx::allow_successor();
  if (warp >= 4 * Tile::kGroups) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<Tile::kLeft>();
    }
    if (threadIdx.x == 128 * Tile::kGroups) {
      Loop::fill_ring(x, args, base);
    } else if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<Tile::kTaken>();
    }
    Loop::multiply_parts(args, warp >> 2, base, flags);
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_sync();  // the others may still arrive at this block's barriers
  }
}

}  // namespace nibble::cuda
