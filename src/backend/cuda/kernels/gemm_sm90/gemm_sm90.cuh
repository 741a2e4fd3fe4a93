#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/share.cuh"
#include "backend/cuda/kernels/gemm_sm90/store.cuh"
#include "backend/cuda/kernels/gemm_sm90/tile.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

// Main loop of the Hopper matrix products: yᵀ = w · xᵀ, so that the weights are the operand of 64
// rows that wgmma takes from registers and tokens are its columns, in tiles from 8 up.
//
// A block is a warp that copies and two warpgroups that multiply. Weights are packed so that one
// unit, 64 rows x 128 bytes of x along K, is contiguous in memory and each thread's fragments of it
// are whole 16-byte words; the copy engine brings units and swizzled tiles of x into a ring of
// shared memory. Weights never change, so the first ring is filled before the kernel waits for its
// predecessor.
namespace nibble::cuda {

// Number of this block's cluster.
template <typename Tile>
__device__ __forceinline__ int cluster_index() {
  return static_cast<int>(blockIdx.x) / Tile::kCluster;
}

// The next part of this block: of a cluster's tile, its own rows.
template <typename Tile>
__device__ __forceinline__ bool next_part(GemmParts& parts, GemmPart& part) {
  const bool more = parts.next(part);
  if constexpr (Tile::kCluster > 1) {
    part.row_tile = part.row_tile * Tile::kCluster + static_cast<int>(blockIdx.x) % Tile::kCluster;
  }
  return more;
}

// --- the copying warp, one thread of it ---

// Units of one step of the tile's block b of rows; beyond the end, those of the last block, whose
// sums are not stored again.
template <typename Codec, typename Tile>
__device__ __forceinline__ const uint8_t* units_of(const GemmSm90Args& args,
                                                   const GemmPart& part,
                                                   int step,
                                                   int b) {
  const int block = min(part.row_tile * Tile::kRowBlocks + b, args.row_blocks - 1);
  const int k_block = step * Tile::kDepth;
  if constexpr (InTwoParts<Codec>) {
    static_assert(Codec::Int8::kUnitBytes == 2 * Codec::Bf16::kUnitBytes);
    const int64_t halves = static_cast<int64_t>(block) * (args.k_blocks + args.int8_blocks) +
                           k_block + min(k_block, args.int8_blocks);
    return args.weights + halves * Codec::Bf16::kUnitBytes;
  } else {
    return args.weights +
           (static_cast<int64_t>(block) * args.k_blocks + k_block) * Codec::kUnitBytes;
  }
}

// Calls f<codec>() with the codec of this step's units.
template <typename Codec, typename Tile, typename F>
__device__ __forceinline__ void with_codec(const GemmSm90Args& args, int step, const F& f) {
  if constexpr (!InTwoParts<Codec>) {
    f.template operator()<Codec>();
  } else if (step * Tile::kDepth < args.int8_blocks) {
    f.template operator()<typename Codec::Int8>();
  } else {
    f.template operator()<typename Codec::Bf16>();
  }
}

// Announces the copies of a step and begins with its weights.
template <typename Codec, typename Tile>
__device__ void copy_weights(
    const GemmSm90Args& args, const GemmPart& part, int step, uint32_t stage, uint32_t barrier) {
  // What is read once leaves the L2 cache to activations and results.
  const ptx::CacheHint hint =
      args.schedule.token_tiles == 1 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal;
  with_codec<Codec, Tile>(args, step, [&]<typename Units>() {
    constexpr int kBytes = Tile::kDepth * Units::kUnitBytes;
    ptx::barrier_arrive_expect(barrier, GemmShared<Units, Tile>::kCopiedBytes);
#pragma unroll
    for (int b = 0; b < Tile::kRowBlocks; ++b) {
      ptx::bulk_copy(stage + b * kBytes, units_of<Codec, Tile>(args, part, step, b), kBytes,
                     barrier, hint);
    }
  });
}

template <typename Codec, typename Tile>
__device__ void copy_x(
    const CUtensorMap& x, const GemmPart& part, int step, uint32_t stage, uint32_t barrier) {
  using Shared = GemmShared<Codec, Tile>;
#pragma unroll
  for (int d = 0; d < Tile::kDepth; ++d) {
    const uint32_t to = stage + Shared::kWeightBytes + d * Shared::kXBytes;
    const int column = (step * Tile::kDepth + d) * Codec::kBlockElements;
    const int token = part.token_tile * Tile::kTokens;
    if constexpr (Tile::kCluster == 1) {
      ptx::tensor_copy(to, x, column, token, barrier);
    } else {  // this block's share, to all
      const int rank = static_cast<int>(blockIdx.x) % Tile::kCluster;
      ptx::tensor_copy_to_all(to + rank * (Shared::kXBytes / Tile::kCluster), x, column,
                              token + rank * (Tile::kTokens / Tile::kCluster), barrier,
                              (1 << Tile::kCluster) - 1);
    }
  }
}

template <typename Codec, typename Tile>
__device__ void fill_ring(const CUtensorMap& x, const GemmSm90Args& args, uint32_t base) {
  using Shared = GemmShared<Codec, Tile>;
  const uint32_t full = base + Shared::kBarriers;
  const uint32_t empty = full + 8 * Tile::kStages;
  ptx::prefetch_tensor_map(x);
  GemmPart part;
  {  // Weights of the first ring, then, when the predecessor has ended, its activations.
    GemmParts parts(args.schedule, cluster_index<Tile>());
    int count = 0;
    while (count < Tile::kStages && next_part<Tile>(parts, part)) {
      for (int step = part.begin; step < part.end && count < Tile::kStages; ++step, ++count) {
        copy_weights<Codec, Tile>(args, part, step, base + count * Shared::kStageBytes,
                                  full + 8 * count);
      }
    }
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_wait();  // all have their barriers
  }
  ptx::wait_for_predecessor();
  GemmParts parts(args.schedule, cluster_index<Tile>());
  RingPlace<Tile::kStages> place;
  int count = 0;
  while (next_part<Tile>(parts, part)) {
    for (int step = part.begin; step < part.end; ++step, ++count) {
      const uint32_t stage = base + place.stage * Shared::kStageBytes;
      const uint32_t barrier = full + 8 * place.stage;
      if (count >= Tile::kStages) {
        ptx::barrier_wait_to_refill(empty + 8 * place.stage, place.parity ^ 1);
        copy_weights<Codec, Tile>(args, part, step, stage, barrier);
      }
      copy_x<Codec, Tile>(x, part, step, stage, barrier);
      place.advance();
    }
  }
}

// --- the multiplying warpgroups ---

// Products of one unit, as one group. x: low word of the descriptor.
template <typename Codec, int kTokens>
__device__ __forceinline__ void multiply(ptx::MmaSum<Codec::kType> (&sums)[kTokens / 2],
                                         const uint32_t (&a)[4][4],
                                         uint32_t x) {
  ptx::mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    ptx::mma_registers<Codec::kType, kTokens>(sums, a[k], ptx::with_swizzle(x + 2 * k));
  }
  ptx::mma_commit();
}

// Sums of one part, of the tile's first kCount tokens: `steps` stages of the ring from `place` on.
template <typename Codec, typename Tile, int kCount = Tile::kTokens>
__device__ __forceinline__ void accumulate(
    ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][kCount / 2],
    RingPlace<Tile::kStages>& place,
    int steps,
    int group,
    int thread,
    uint32_t base) {
  using Shared = GemmShared<Codec, Tile>;
  constexpr int kUnits = Tile::kUnits;
  const uint32_t full = base + Shared::kBarriers;
  const uint32_t empty = full + 8 * Tile::kStages;
  const uint32_t x0 = ptx::descriptor_address(base + Shared::kWeightBytes);
  uint32_t x = 0;  // of the stage's tile
  typename Codec::Fetched fetched[kUnits];
  uint32_t a[2][4][4];
  // Waits for the next stage and fetches its units: block u % kBlocks of rows, K block u / kBlocks.
  const auto fetch = [&] {
    ptx::barrier_wait(full + 8 * place.stage, place.parity);
    x = x0 + place.stage * (Shared::kStageBytes / 16);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit =
          (group * Tile::kBlocks + u % Tile::kBlocks) * Tile::kDepth + u / Tile::kBlocks;
      fetched[u] =
          Codec::fetch(base + place.stage * Shared::kStageBytes + unit * Codec::kUnitBytes, thread);
    }
  };
  const auto expand = [&](int u, uint32_t(&to)[4][4]) {
    Codec::expand(fetched[u], to);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::pin(to[k]);
    }
  };
  int before = -1;  // the stage that the products now under way leave behind
  const auto release = [&] {
    if (before < 0) {
      return;
    }
    // All lanes have what they read: products have taken it.
    if constexpr (Tile::kCluster == 1) {
      ptx::warp_arrive(empty + 8 * before);
    } else {
      ptx::warp_arrive_at_all<Tile::kCluster>(empty + 8 * before);  // all fill this block's stages
    }
  };

  fetch();
  expand(0, a[0]);
  bool more = true;
  while (more) {
#pragma unroll
    for (int i = 0; i < 2 && more; ++i) {  // a stage of one unit, or a unit
      const int u = i % kUnits;
      multiply<Codec, kCount>(sums[u % Tile::kBlocks], a[i],
                              x + u / Tile::kBlocks * (Shared::kXBytes / 16));
      const bool last = u == kUnits - 1;
      if (!last) {
        ptx::mma_wait<1>();
        release();
      } else {
        more = --steps > 0;
        const int stage = place.stage;
        place.advance();
        if (more) {
          fetch();
        }
        ptx::mma_wait<1>();
        if (kUnits == 1) {
          release();
        }
        before = stage;
      }
      if (!last || more) {
        expand((u + 1) % kUnits, a[1 - i]);
      }
    }
  }
  ptx::mma_wait<0>();
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    ptx::pin(sums[b]);
  }
  release();
}

// The same in all threads of a warp, so that the compiler keeps what depends on it in uniform
// registers, from which products take their descriptors.
__device__ __forceinline__ bool uniform(bool value) {
  return __shfl_sync(0xffffffffU, value ? 1 : 0, 0) != 0;
}

// Sums of both parts: those of INT8 are turned in place into what those of BF16 are added to.
template <typename Codec, typename Tile>
__device__ __forceinline__ void accumulate_both(float (&sums)[Tile::kBlocks][Tile::kTokens / 2],
                                                const GemmSm90Args& args,
                                                const GemmPart& part,
                                                RingPlace<Tile::kStages>& place,
                                                int group,
                                                int thread,
                                                uint32_t base) {
  using Int8 = typename Codec::Int8;
  using Bf16 = typename Codec::Bf16;
  using Shared = GemmShared<Codec, Tile>;
  static_assert(GemmShared<Int8, Tile>::kStageBytes == Shared::kStageBytes &&
                GemmShared<Bf16, Tile>::kStageBytes == Shared::kStageBytes);
  const int all = part.end - part.begin;
  const int first = min(max(args.int8_blocks / Tile::kDepth - part.begin, 0), all);
  const int int8_steps = __shfl_sync(0xffffffffU, first, 0);  // to uniform registers
  const int bf16_steps = __shfl_sync(0xffffffffU, all - first, 0);
  const TokenTerms<Tile::kTokens> tokens = load_token_terms<Int8, Tile>(args, part, thread);
  int32_t exact[Tile::kBlocks][Tile::kTokens / 2];
  clear(exact);
  if (int8_steps > 0) {
    accumulate<Int8, Tile>(exact, place, int8_steps, group, thread, base);
  }
  const uint32_t scales = base + Shared::kScales + group * Shared::kScaleBytes;
  share_terms(tokens, group, thread, scales);
#pragma unroll
  for (int octet = 0; octet < Tile::kTokens / 8; ++octet) {
    constexpr float kUnit = Int8::kScale / Codec::kScale;
    const float2 both = terms_of(tokens, octet, thread, scales);
    const float factors[2] = {__fmul_rn(both.x, kUnit), __fmul_rn(both.y, kUnit)};
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto sum = static_cast<float>(exact[b][4 * octet + i]);
        sums[b][4 * octet + i] = __fmul_rn(sum, factors[i % 2]);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    ptx::pin(sums[b]);  // in front of the products' fence
  }
  if (bf16_steps > 0) {
    accumulate<Bf16, Tile>(sums, place, bf16_steps, group, thread, base);
  }
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void multiply_parts(const GemmSm90Args& args,
                                               int group,
                                               uint32_t base,
                                               volatile uint32_t* flags) {
  const int thread = static_cast<int>(threadIdx.x & 127);
  GemmParts parts(args.schedule, cluster_index<Tile>());
  GemmPart part;
  RingPlace<Tile::kStages> place;
  bool more = uniform(next_part<Tile>(parts, part));
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_wait();  // all have their barriers
  }
  ChannelTerms<Tile::kBlocks> terms = load_terms<Codec, Tile>(args, part, group, thread);
  ptx::wait_for_predecessor();
  while (more) {
    ptx::MmaSum<Codec::kType> sums[Tile::kBlocks][Tile::kTokens / 2];
    const TokenTerms<Tile::kTokens> tokens = load_token_terms<Codec, Tile>(args, part, thread);
    if constexpr (InTwoParts<Codec>) {
      accumulate_both<Codec, Tile>(sums, args, part, place, group, thread, base);
    } else {
      clear(sums);
      const int steps = __shfl_sync(0xffffffffU, part.end - part.begin, 0);  // to uniform registers
      accumulate<Codec, Tile>(sums, place, steps, group, thread, base);
    }
    bool stored = false;
    if constexpr (Tile::kClusters) {
      if (args.schedule.cluster > 1) {
        with_result(args.result, [&]<GemmResult kResult>() {
          store_cluster<Codec, Tile, kResult>(sums, args, terms, tokens, part, group, thread, base);
        });
        stored = true;
      }
    }
    if (!stored && (part.split < 0 || combine<Codec, Tile>(sums, args, part, cluster_index<Tile>(),
                                                           group, thread, flags))) {
      store<Codec, Tile>(sums, args, terms, tokens, part, group, thread, base);
    }
    more = uniform(next_part<Tile>(parts, part));
    terms = load_terms<Codec, Tile>(args, part, group, thread);
  }
}

template <typename Codec, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gemm_sm90(const __grid_constant__ CUtensorMap x, const __grid_constant__ GemmSm90Args args) {
  using Shared = GemmShared<Codec, Tile>;
  extern __shared__ uint8_t shared[];
  const uint32_t raw = ptx::shared_address(shared);
  const uint32_t base = __shfl_sync(0xffffffffU, (raw + 1023U) & ~1023U, 0);
  auto* flags = reinterpret_cast<volatile uint32_t*>(shared + (base - raw) + Shared::kFlags);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 128 * Tile::kGroups) {  // that fills the ring, in a cluster before all meet
    ptx::init_ring<Tile::kStages>(base + Shared::kBarriers,
                                  4 * Tile::kGroups * Tile::kCluster * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  begin_codec<Codec>();
  ptx::announce_barriers<Tile::kCluster>();
  ptx::allow_successor();
  if (warp >= 4 * Tile::kGroups) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<40>();
    }
    if (threadIdx.x == 128 * Tile::kGroups) {
      fill_ring<Codec, Tile>(x, args, base);
    } else if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<232>();
    }
    multiply_parts<Codec, Tile>(args, warp >> 2, base, flags);
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_sync();  // the others may still arrive at this block's barriers
  }
}

}  // namespace nibble::cuda
