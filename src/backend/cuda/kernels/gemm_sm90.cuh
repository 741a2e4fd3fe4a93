#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/gemm_sm90.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
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

/// One tile of a block: kBlocks x 64 rows for each warpgroup, kTokens tokens, kDepth x 128 bytes of
/// x along K in each of kStages stages. kResident blocks fit a multiprocessor.
template <int kTokens_, int kBlocks_, int kDepth_, int kStages_, int kResident_>
struct GemmTile {
  static constexpr int kTokens = kTokens_, kBlocks = kBlocks_, kDepth = kDepth_;
  static constexpr int kStages = kStages_, kResident = kResident_;
  static constexpr int kGroups = 2;
  static constexpr int kRowBlocks = kGroups * kBlocks;  // of 64 rows
  // With a block per multiprocessor the copying warp is a warpgroup, whose registers the others
  // take.
  static constexpr bool kTakesRegisters = kResident == 1;
  static constexpr int kThreads = kGroups * 128 + (kTakesRegisters ? 128 : 32);
  static constexpr int kUnits = kBlocks * kDepth;  // of a warpgroup in a stage
  static_assert(kUnits == 1 || kUnits == 2);
};

template <typename Codec, typename Tile>
struct GemmShared {
  static constexpr int kWeightBytes = Tile::kRowBlocks * Tile::kDepth * Codec::kUnitBytes;
  static constexpr int kXBytes = Tile::kTokens * 128;  // of one K block
  static constexpr int kStageBytes = kWeightBytes + Tile::kDepth * kXBytes;
  static constexpr int kBarriers = Tile::kStages * kStageBytes;  // full, then empty
  static constexpr int kFlags = kBarriers + 16 * Tile::kStages;
  static constexpr int kBytes = kFlags + 16 + 1024;  // the base is rounded up to 1024
  static_assert(kStageBytes % 1024 == 0);
};

// Number of a stage in the ring and the parity of its phase.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- the copying warp, one thread of it ---

// Units of one step of the tile's block b of rows; beyond the end, those of the last block, whose
// sums are not stored again.
template <typename Codec, typename Tile>
__device__ __forceinline__ const uint8_t* units_of(const GemmSm90Args& args,
                                                   const GemmPart& part,
                                                   int step,
                                                   int b) {
  const int block = min(part.row_tile * Tile::kRowBlocks + b, args.row_blocks - 1);
  return args.weights +
         (static_cast<int64_t>(block) * args.k_blocks + step * Tile::kDepth) * Codec::kUnitBytes;
}

template <typename Codec, typename Tile>
__device__ void copy_weights(
    const GemmSm90Args& args, const GemmPart& part, int step, uint32_t stage, uint32_t barrier) {
  constexpr int kBytes = Tile::kDepth * Codec::kUnitBytes;
#pragma unroll
  for (int b = 0; b < Tile::kRowBlocks; ++b) {
    ptx::bulk_copy(stage + b * kBytes, units_of<Codec, Tile>(args, part, step, b), kBytes, barrier);
  }
}

template <typename Codec, typename Tile>
__device__ void copy_x(
    const CUtensorMap& x, const GemmPart& part, int step, uint32_t stage, uint32_t barrier) {
  using Shared = GemmShared<Codec, Tile>;
#pragma unroll
  for (int d = 0; d < Tile::kDepth; ++d) {
    ptx::tensor_copy(stage + Shared::kWeightBytes + d * Shared::kXBytes, x,
                     (step * Tile::kDepth + d) * Codec::kBlockElements,
                     part.token_tile * Tile::kTokens, barrier);
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
    GemmParts parts(args.schedule, blockIdx.x);
    int count = 0;
    while (count < Tile::kStages && parts.next(part)) {
      for (int step = part.begin; step < part.end && count < Tile::kStages; ++step, ++count) {
        ptx::barrier_arrive_expect(full + 8 * count, Shared::kStageBytes);
        copy_weights<Codec, Tile>(args, part, step, base + count * Shared::kStageBytes,
                                  full + 8 * count);
      }
    }
  }
  ptx::wait_for_predecessor();
  GemmParts parts(args.schedule, blockIdx.x);
  RingPlace<Tile::kStages> place;
  int count = 0;
  while (parts.next(part)) {
    for (int step = part.begin; step < part.end; ++step, ++count) {
      const uint32_t stage = base + place.stage * Shared::kStageBytes;
      const uint32_t barrier = full + 8 * place.stage;
      if (count >= Tile::kStages) {
        ptx::barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
        ptx::barrier_arrive_expect(barrier, Shared::kStageBytes);
        copy_weights<Codec, Tile>(args, part, step, stage, barrier);
      }
      copy_x<Codec, Tile>(x, part, step, stage, barrier);
      place.advance();
    }
  }
}

// --- the multiplying warpgroups ---

template <typename Sum, int kBlocks, int kCount>
__device__ __forceinline__ void clear(Sum (&sums)[kBlocks][kCount]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[b][i] = 0;
    }
  }
}

// Products of one unit, as one group.
template <typename Codec, int kTokens>
__device__ __forceinline__ void multiply(ptx::MmaSum<Codec::kType> (&sums)[kTokens / 2],
                                         const uint32_t (&a)[4][4],
                                         uint64_t x) {
  ptx::mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    ptx::mma_registers<Codec::kType, kTokens>(sums, a[k], x + 2 * k);
  }
  ptx::mma_commit();
}

// Sums of one part: `steps` stages of the ring from `place` on.
template <typename Codec, typename Tile>
__device__ __forceinline__ void accumulate(
    ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    RingPlace<Tile::kStages>& place,
    int steps,
    int group,
    int thread,
    uint32_t base) {
  using Shared = GemmShared<Codec, Tile>;
  const uint32_t full = base + Shared::kBarriers;
  const uint32_t empty = full + 8 * Tile::kStages;
  uint32_t a[2][4][4];
  // Unit u of a stage: block u % kBlocks of rows, K block u / kBlocks.
  const auto load = [&](int u, uint32_t(&to)[4][4]) {
    const int unit = (group * Tile::kBlocks + u % Tile::kBlocks) * Tile::kDepth + u / Tile::kBlocks;
    Codec::load(base + place.stage * Shared::kStageBytes + unit * Codec::kUnitBytes, thread, to);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::pin(to[k]);
    }
  };
  const auto x_of = [&](int u) {
    return ptx::swizzled_descriptor(base + place.stage * Shared::kStageBytes +
                                    Shared::kWeightBytes + (u / Tile::kBlocks) * Shared::kXBytes);
  };
  int before = -1;  // the stage that the products now under way leave behind
  const auto release = [&] {
    if (before >= 0 && (thread & 31) == 0) {
      ptx::barrier_arrive(empty + 8 * before);
    }
  };
  const auto next_stage = [&] {
    before = place.stage;
    place.advance();
  };

  ptx::barrier_wait(full + 8 * place.stage, place.parity);
  load(0, a[0]);
  while (true) {
    multiply<Codec, Tile::kTokens>(sums[0], a[0], x_of(0));
    ptx::mma_wait<1>();
    release();
    if constexpr (Tile::kUnits == 1) {
      next_stage();
      if (--steps == 0) {
        break;
      }
      ptx::barrier_wait(full + 8 * place.stage, place.parity);
    }
    load(Tile::kUnits - 1, a[1]);
    multiply<Codec, Tile::kTokens>(sums[Tile::kBlocks - 1], a[1], x_of(Tile::kUnits - 1));
    ptx::mma_wait<1>();
    if constexpr (Tile::kUnits == 1) {
      release();
    }
    next_stage();
    if (--steps == 0) {
      break;
    }
    ptx::barrier_wait(full + 8 * place.stage, place.parity);
    load(0, a[0]);
  }
  ptx::mma_wait<0>();
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    ptx::pin(sums[b]);
  }
  release();
}

// Of one warpgroup of at most four; the numbers of barriers are constants, so that only these are
// taken.
__device__ __forceinline__ void sync_group(int group) {
  switch (group % 4) {
    case 0:
      return ptx::group_sync(1, 128);
    case 1:
      return ptx::group_sync(2, 128);
    case 2:
      return ptx::group_sync(3, 128);
    default:
      return ptx::group_sync(4, 128);
  }
}

// Leaves this warpgroup's sums of a split tile in memory; the warpgroup that comes last gets true
// and the sums of all parts, added in the order of the blocks.
template <typename Codec, typename Tile>
__device__ __forceinline__ bool combine(
    ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const GemmPart& part,
    int own,
    int group,
    int thread,
    volatile uint32_t* flags) {
  using Sum = ptx::MmaSum<Codec::kType>;
  using Sum4 = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;
  constexpr int kWords = Tile::kTokens / 8;  // 16-byte words of a row block
  const GemmSchedule& schedule = args.schedule;
  const int first = schedule.block_of(part.split * schedule.steps);
  const int last = schedule.block_of((part.split + 1) * schedule.steps - 1);
  if (first == last) {
    return true;
  }
  // A block's run holds the end of one split tile, whole ones, and the start of another: where it
  // began before the tile, these sums are the start.
  const auto slot = [&](int block) {
    const int start = schedule.run_begin(block) < part.split * schedule.steps ? 1 : 0;
    return static_cast<Sum4*>(args.parts) +
           ((block * 2 + start) * Tile::kGroups + group) * (Tile::kBlocks * kWords * 128) + thread;
  };
  Sum4* mine = slot(own);
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      Sum4 word;
      word.x = sums[b][4 * i];
      word.y = sums[b][4 * i + 1];
      word.z = sums[b][4 * i + 2];
      word.w = sums[b][4 * i + 3];
      __stcg(mine + (b * kWords + i) * 128, word);
    }
  }
  sync_group(group);
  if (thread == 0) {
    uint32_t* counter = args.counters + part.split * Tile::kGroups + group;
    const bool done = ptx::add_acquire_release(counter, 1) == static_cast<uint32_t>(last - first);
    if (done) {
      *counter = 0;
    }
    flags[group] = done ? 1 : 0;
  }
  sync_group(group);
  if (flags[group] == 0) {
    return false;
  }
  if constexpr (std::is_same_v<Sum, float>) {
    clear(sums);
  }
  for (int block = first; block <= last; ++block) {
    if (std::is_same_v<Sum, int32_t> && block == own) {
      continue;  // the order of integers does not matter
    }
    const Sum4* theirs = slot(block);
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const Sum4 word = __ldcg(theirs + (b * kWords + i) * 128);
        sums[b][4 * i] += word.x;
        sums[b][4 * i + 1] += word.y;
        sums[b][4 * i + 2] += word.z;
        sums[b][4 * i + 3] += word.w;
      }
    }
  }
  return true;
}

// Scales and bias of a thread's channels, read while the products run.
template <int kBlocks>
struct ChannelTerms {
  float2 scale[kBlocks];
  float2 bias[kBlocks];
};

template <typename Codec, typename Tile>
__device__ __forceinline__ int first_channel(const GemmPart& part, int group, int thread, int b) {
  const int block = part.row_tile * Tile::kRowBlocks + group * Tile::kBlocks + b;
  return 64 * block + 16 * (thread >> 5) + 2 * ((thread & 31) >> 2);
}

template <typename Codec, typename Tile>
__device__ __forceinline__ ChannelTerms<Tile::kBlocks> load_terms(const GemmSm90Args& args,
                                                                  const GemmPart& part,
                                                                  int group,
                                                                  int thread) {
  ChannelTerms<Tile::kBlocks> terms;
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    const int row = first_channel<Codec, Tile>(part, group, thread, b);
    const bool inside = row < args.n;
    const float* scales = args.weight_scales + (inside ? row : 0);  // filled up to whole blocks
    terms.scale[b] = float2{__ldg(scales), __ldg(scales + 1)};
    terms.bias[b] = float2{0.0F, 0.0F};
    if (args.bias != nullptr && inside) {
      terms.bias[b].x = __ldg(args.bias + row);
      terms.bias[b].y = row + 1 < args.n ? __ldg(args.bias + row + 1) : 0.0F;
    }
  }
  return terms;
}

// How results leave: pairs of channels at once where n and the rows' distance are even.
template <GemmResult kResult, bool kPairs>
__device__ __forceinline__ void store_pair(void* y, bool both, float first, float second) {
  if constexpr (kResult == GemmResult::kBf16) {
    if constexpr (kPairs) {
      *static_cast<uint32_t*>(y) = ptx::pack_bf16(first, second);
    } else {
      auto* values = static_cast<__nv_bfloat16*>(y);
      values[0] = __float2bfloat16(first);
      if (both) {
        values[1] = __float2bfloat16(second);
      }
    }
  } else {
    constexpr bool kAdd = kResult == GemmResult::kAddF32;
    auto* values = static_cast<float*>(y);
    if constexpr (kPairs && kAdd) {
      ptx::add_pair(values, first, second);
    } else if constexpr (kPairs) {
      *static_cast<float2*>(y) = float2{first, second};
    } else {
      values[0] = first + (kAdd ? values[0] : 0.0F);
      if (both) {
        values[1] = second + (kAdd ? values[1] : 0.0F);
      }
    }
  }
}

template <typename Codec, typename Tile, GemmResult kResult, bool kPairs>
__device__ __forceinline__ void store_tile(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const GemmPart& part,
    int group,
    int thread) {
  // Scales of tokens read before the stores that follow: their latencies overlap.
  constexpr int kAtOnce = Tile::kTokens < 32 ? Tile::kTokens / 4 : 8;
  constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
  const int token0 = part.token_tile * Tile::kTokens + 2 * (thread & 3);
  const int tokens = args.m - token0;
  const int64_t stride = args.y_stride * kBytes;
  const int row0 = first_channel<Codec, Tile>(part, group, thread, 0);
  uint8_t* y =
      static_cast<uint8_t*>(args.y) + token0 * stride + static_cast<int64_t>(row0) * kBytes;
#pragma unroll
  for (int start = 0; start < Tile::kTokens / 4; start += kAtOnce) {
    float x_scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = token0 + 8 * ((start + i) / 2) + i % 2;
      x_scales[i] = __ldcg(args.x_scales + min(token, args.m - 1));  // L1 may hold older ones
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = 8 * ((start + i) / 2) + i % 2;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        const int at = 4 * ((start + i) / 2) + i % 2;
        const float scale = Codec::kScale * x_scales[i];
        const float first = static_cast<float>(sums[b][at]) * (terms.scale[b].x * scale);
        const float second = static_cast<float>(sums[b][at + 2]) * (terms.scale[b].y * scale);
        if (token < tokens && row0 + 64 * b < args.n) {
          store_pair<kResult, kPairs>(y + token * stride + 64 * kBytes * b,
                                      row0 + 64 * b + 1 < args.n, first + terms.bias[b].x,
                                      second + terms.bias[b].y);
        }
      }
    }
  }
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void store(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const GemmPart& part,
    int group,
    int thread) {
  const bool pairs = args.n % 2 == 0 && args.y_stride % 2 == 0;
  const auto with = [&]<GemmResult kResult>() {
    if (pairs) {
      store_tile<Codec, Tile, kResult, true>(sums, args, terms, part, group, thread);
    } else {
      store_tile<Codec, Tile, kResult, false>(sums, args, terms, part, group, thread);
    }
  };
  if (args.result == GemmResult::kBf16) {
    with.template operator()<GemmResult::kBf16>();
  } else if (args.result == GemmResult::kF32) {
    with.template operator()<GemmResult::kF32>();
  } else {
    with.template operator()<GemmResult::kAddF32>();
  }
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void multiply_parts(const GemmSm90Args& args,
                                               int group,
                                               uint32_t base,
                                               volatile uint32_t* flags) {
  const int thread = static_cast<int>(threadIdx.x & 127);
  GemmParts parts(args.schedule, blockIdx.x);
  GemmPart part;
  RingPlace<Tile::kStages> place;
  bool more = parts.next(part);
  ChannelTerms<Tile::kBlocks> terms = load_terms<Codec, Tile>(args, part, group, thread);
  ptx::wait_for_predecessor();
  while (more) {
    ptx::MmaSum<Codec::kType> sums[Tile::kBlocks][Tile::kTokens / 2];
    clear(sums);
    accumulate<Codec, Tile>(sums, place, part.end - part.begin, group, thread, base);
    if (part.split < 0 ||
        combine<Codec, Tile>(sums, args, part, blockIdx.x, group, thread, flags)) {
      store<Codec, Tile>(sums, args, terms, part, group, thread);
    }
    more = parts.next(part);
    terms = load_terms<Codec, Tile>(args, part, group, thread);
  }
}

template <typename Codec, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gemm_sm90(const __grid_constant__ CUtensorMap x, const __grid_constant__ GemmSm90Args args) {
  using Shared = GemmShared<Codec, Tile>;
  extern __shared__ uint8_t shared[];
  const uint32_t raw = ptx::shared_address(shared);
  const uint32_t base = (raw + 1023U) & ~1023U;
  auto* flags = reinterpret_cast<volatile uint32_t*>(shared + (base - raw) + Shared::kFlags);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::barrier_init(base + Shared::kBarriers + 8 * s, 1);
      ptx::barrier_init(base + Shared::kBarriers + 8 * (Tile::kStages + s), 4 * Tile::kGroups);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (warp >= 4 * Tile::kGroups) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<40>();
    }
    if (threadIdx.x == 128 * Tile::kGroups) {
      fill_ring<Codec, Tile>(x, args, base);
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<232>();
    }
    multiply_parts<Codec, Tile>(args, warp >> 2, base, flags);
  }
}

}  // namespace nibble::cuda
