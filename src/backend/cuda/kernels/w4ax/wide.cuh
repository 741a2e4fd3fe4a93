#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4ax/shared.cuh"
#include "backend/cuda/ptx/wgmma_fresh.cuh"

// y = x · wᵀ for 17 tokens and more, by wgmma: weights from registers, tokens as columns, as in
// gemm_sm90/gemm_sm90.cuh.
//
// Each block of K has an exact sum of its own, which becomes an F32 number and is added
// to its tile's, in the order of K. A warpgroup multiplies the two halves of its tokens in turn:
// the sums of one half are added while the tensor cores work on the other, whose registers are free
// again when their turn comes.
namespace nibble::cuda {

/// kGroups warpgroups with 64 rows each, for the same kTokens tokens; kDepth K blocks of 128 in a
/// stage; a warpgroup's rows are kBlocks times 64.
template <int kTokens_, int kGroups_, int kDepth_, int kStages_, int kResident_, int kBlocks_ = 1>
struct WideTile {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kDepth = kDepth_;
  static constexpr int kStages = kStages_, kResident = kResident_, kBlocks = kBlocks_;
  static constexpr int kRows = 64 * kBlocks * kGroups;
  // Of a block alone on its multiprocessor, the copying warp is a warpgroup, whose registers the
  // others take.
  static constexpr bool kTakesRegisters = kResident == 1;
  static constexpr int kThreads = kGroups * 128 + (kTakesRegisters ? 128 : 32);
  static constexpr int kCopyRegisters = kGroups == 2 ? 40 : kGroups == 3 ? 32 : 24;
  static constexpr int kRegisters = kGroups < 3 ? 232 : kGroups == 3 ? 160 : 112;
  // What the stores of gemm_sm90/store.cuh ask.
  static constexpr int kRowBlocks = kBlocks * kGroups;
  static constexpr bool kStoresWords = true, kOfExperts = false;
};

/// Sums in F32 that have all their scales, for these stores.
struct ScaledSums {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr bool kRowScales = false;
  static constexpr float kScale = 1.0F;
};

template <typename Form, typename Tile>
struct WideShared : W4AxShared<Form, Tile> {
  using Base = W4AxShared<Form, Tile>;
  static constexpr int kTokenScaleBytes = Tile::kTokens > 32 ? Tile::kTokens * 4 : 0;
  static constexpr int kTokenScales = (Base::kEnd + 127) / 128 * 128;
  static constexpr int kWords = kTokenScales + Tile::kGroups * kTokenScaleBytes;
  static constexpr int kWordBytes = 2 * 32 * 128;
  static constexpr int kBytes = kWords + Tile::kGroups * kWordBytes + 1024;
  static_assert((kBytes + 1024) * Tile::kResident <= 233472);
};

__device__ __forceinline__ void set_word(float* four, const uint4& word) {
  four[0] = __uint_as_float(word.x);
  four[1] = __uint_as_float(word.y);
  four[2] = __uint_as_float(word.z);
  four[3] = __uint_as_float(word.w);
}

/// One warpgroup's work on one part.
template <typename Form, typename Tile>
class WideSums {
 public:
  using Shared = WideShared<Form, Tile>;
  static constexpr int kBlocks = Tile::kBlocks;
  static_assert(kBlocks == 1 || kBlocks == 2);
  // Tokens of a half: of both blocks of rows, or half of them.
  static constexpr bool kOfTokens = kBlocks == 1;
  static constexpr int kHalf = kOfTokens ? Tile::kTokens / 2 : Tile::kTokens;
  using Operands = uint32_t[kBlocks][4][4];       // of a K block
  static constexpr int kSteps = 4 / Form::kSubs;  // of 32 bytes of K in a block

  float total[kBlocks][Tile::kTokens / 2];

  __device__ __forceinline__ WideSums(uint32_t base, int group, int thread)
      : base_(base),
        group_(group),
        lane_(thread & 31),
        piece_(2 * kBlocks * group + (thread >> 6)),
        sixteen_(thread >> 5 & 1) {
    clear(total);
  }

  // No products are under way between steps: the compiler does not follow them around a loop, and
  // then lets each wait for the one before. Meanwhile other warpgroups' run.
  __device__ __forceinline__ void accumulate(RingPlace<Tile::kStages>& place, int steps) {
    constexpr int kLast = Form::kSubs - 1;
    Operands a[2];
    wait(place);
    fetch(stage_of(place), 0, a[0]);
    while (steps > 0) {
      const uint32_t stage = stage_of(place);
      const int number = place.stage;
      start(0, a[0], 0, tokens_of(stage, 0));
      start(1, a[0], 0, tokens_of(stage, 0));
#pragma unroll
      for (int u = 0; u + 1 < Tile::kDepth; ++u) {
        turns_within(stage, u, a[u % 2]);
        fetch(stage, u + 1, a[(u + 1) % 2]);
        turn(stage, u, kLast, a[(u + 1) % 2], 0, tokens_of(stage, u + 1));
      }
      turns_within(stage, Tile::kDepth - 1, a[1]);
      place.advance();
      if (--steps > 0) {
        wait(place);
        fetch(stage_of(place), 0, a[0]);
      }
      ptx::mma_wait<1>();
      add(0, stage, Tile::kDepth - 1, kLast);
      ptx::mma_wait<0>();
      add(1, stage, Tile::kDepth - 1, kLast);
      release(number);
    }
  }

  template <typename Link>
  __device__ __forceinline__ void hand_on(const Link& link) {
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 8; ++i) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        link.put(kBlocks * i + b, sum_word(total[b] + 4 * i));
      }
    }
  }
  template <typename Link>
  __device__ __forceinline__ void take_over(const Link& link) {
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 8; ++i) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        set_word(total[b] + 4 * i, link.get(kBlocks * i + b));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t stage_of(const RingPlace<Tile::kStages>& place) const {
    return base_ + place.stage * Shared::kStageBytes;
  }
  __device__ __forceinline__ void wait(const RingPlace<Tile::kStages>& place) const {
    ptx::barrier_wait(base_ + Shared::kBarriers + 8 * place.stage, place.parity);
  }
  __device__ __forceinline__ void release(int stage) const {
    ptx::warp_arrive(base_ + Shared::kBarriers + 8 * (Tile::kStages + stage));
  }
  __device__ __forceinline__ void fetch(uint32_t stage, int u, Operands& a) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t piece = piece_place<Form, Tile>(stage, piece_ + 2 * b, u);
      W4AxWords::fetch(piece, sixteen_, lane_).expand(a[b]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::pin(a[b][k]);
      }
    }
  }
  // Low word of the descriptor of a K block's tokens.
  __device__ __forceinline__ uint32_t tokens_of(uint32_t stage, int u) const {
    return ptx::descriptor_address(stage + Shared::kX + u * Shared::kXBytes);
  }

  // Starts the products of block `sub` of a K block for half h of the sums.
  __device__ __forceinline__ void start(int h, const Operands& both, int sub, uint32_t x) {
    const auto& a = both[kOfTokens ? 0 : h];
    const uint32_t from = x + (kOfTokens ? h * (kHalf * 128 / 16) : 0);
    ptx::mma_fence();
    ptx::mma_fresh_s8<kHalf>(sums_[h], a[sub * kSteps], ptx::with_swizzle(from + 2 * sub * kSteps));
#pragma unroll
    for (int k = 1; k < kSteps; ++k) {
      ptx::mma_registers<ptx::MmaType::kInt8, kHalf>(
          sums_[h], a[sub * kSteps + k], ptx::with_swizzle(from + 2 * (sub * kSteps + k)));
    }
    ptx::mma_commit();
  }

  // Adds half h of a block's sums to the totals.
  __device__ __forceinline__ void add(int h, uint32_t stage, int u, int sub) {
    ptx::pin(sums_[h]);
    const int block = kOfTokens ? 0 : h;
    const uint32_t piece = piece_place<Form, Tile>(stage, piece_ + 2 * block, u);
    const float2 w = w4ax_scales(
        ptx::load_shared4(piece + Form::kCodeBytes + sub * 64 + sixteen_ * 32 + (lane_ >> 2) * 4));
    const uint32_t scales = stage + Shared::kScales +
                            (u * Form::kSubs + sub) * Shared::kScaleBytes +
                            (kOfTokens ? h * (kHalf * 4) : 0) + 8 * (lane_ & 3);
#pragma unroll
    for (int octet = 0; octet < kHalf / 8; ++octet) {
      if (kOfTokens || h == 0) {
        x_scales_[octet] = ptx::load_shared8(scales + 32 * octet);
      }
      const float x0 = __uint_as_float(x_scales_[octet].x);
      const float x1 = __uint_as_float(x_scales_[octet].y);
      const int32_t* sum = sums_[h] + 4 * octet;
      float* to = total[block] + (kOfTokens ? h * (kHalf / 2) : 0) + 4 * octet;
      to[0] = w4ax_add(sum[0], w.x, x0, to[0]);
      to[1] = w4ax_add(sum[1], w.x, x1, to[1]);
      to[2] = w4ax_add(sum[2], w.y, x0, to[2]);
      to[3] = w4ax_add(sum[3], w.y, x1, to[3]);
    }
    // All are added before the products that follow take the sums' registers.
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) {
      float& number = kOfTokens ? total[0][h * (kHalf / 2) + i] : total[block][i];
      asm volatile("" : "+f"(number)::"memory");
    }
  }

  // Adds the sums of one block of K and starts the products of the block behind it, of which `to`
  // are the weights.
  __device__ __forceinline__ void turn(
      uint32_t stage, int u, int sub, const Operands& to, int next_sub, uint32_t x) {
    ptx::mma_wait<1>();
    add(0, stage, u, sub);
    start(0, to, next_sub, x);
    ptx::mma_wait<1>();
    add(1, stage, u, sub);
    start(1, to, next_sub, x);
  }
  // The blocks of a K block but for its last one.
  __device__ __forceinline__ void turns_within(uint32_t stage, int u, const Operands& a) {
#pragma unroll
    for (int sub = 0; sub + 1 < Form::kSubs; ++sub) {
      turn(stage, u, sub, a, sub + 1, tokens_of(stage, u));
    }
  }

  uint32_t base_;
  int group_, lane_;
  int piece_, sixteen_;
  int32_t sums_[2][kHalf / 2];  // of both halves
  uint2 x_scales_[kHalf / 8];
};

// The same in all threads of a warp, so that the compiler keeps what depends on it in uniform
// registers, from which products take their descriptors.
__device__ __forceinline__ int same_in_warp(int value) {
  return __shfl_sync(0xffffffffU, value, 0);
}

// Until the block before has handed on the sums of its part. All threads look: where one alone
// did, the compiler would take them to have parted, and use no uniform registers.
template <typename Link>
__device__ __forceinline__ void wait_for_sums(const Link& link, int group, int thread) {
  while (same_in_warp(static_cast<int>(ptx::load_acquire(link.flag_before))) == 0) {
  }
  sync_group(group);
  if (thread == 0) {
    *link.flag_before = 0;
  }
}

template <typename Form, typename Tile>
__device__ __forceinline__ void store_wide(WideSums<Form, Tile>& sums,
                                           const W4AxArgs& args,
                                           const GemmPart& part,
                                           int group,
                                           int thread,
                                           uint32_t base) {
  using Shared = WideShared<Form, Tile>;
  using Codec = ScaledSums;
  const ChannelTerms<Tile::kBlocks> terms = load_terms<Codec, Tile>(args.base, part, group, thread);
  const TokenTerms<Tile::kTokens> tokens = load_token_terms<Codec, Tile>(args.base, part, thread);
  const StoreRooms rooms{base + Shared::kTokenScales + group * Shared::kTokenScaleBytes,
                         base + Shared::kWords + group * Shared::kWordBytes};
  store_rows<Codec, Tile>(sums.total, args.base, terms, tokens, part, group, thread, rooms);
}

template <typename Form, typename Tile>
__device__ __forceinline__ void multiply_wide(const W4AxArgs& args, int group, uint32_t base) {
  using Link = ChainLink<128, Tile::kGroups, Tile::kTokens / 8 * Tile::kBlocks>;
  const int thread = static_cast<int>(threadIdx.x & 127);
  ChainParts parts(args.schedule, static_cast<int>(blockIdx.x));
  GemmPart part;
  RingPlace<Tile::kStages> place;
  ptx::wait_for_predecessor();
  bool more = same_in_warp(parts.next(part) ? 1 : 0) != 0;
  while (more) {
    WideSums<Form, Tile> sums(base, group, thread);
    const Link link(args, group, thread);
    if (same_in_warp(part.begin) > 0) {
      wait_for_sums(link, group, thread);
      sums.take_over(link);
    }
    sums.accumulate(place, same_in_warp(part.end - part.begin));
    if (same_in_warp(part.end) < args.schedule.steps) {
      sums.hand_on(link);
      sync_group(group);
      if (thread == 0) {
        ptx::add_release(link.own_flag, 1);
      }
    } else {
      store_wide<Form, Tile>(sums, args, part, group, thread, base);
    }
    more = same_in_warp(parts.next(part) ? 1 : 0) != 0;
  }
}

template <typename Form, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    w4ax_wide_sm90(const __grid_constant__ W4AxMaps maps, const __grid_constant__ W4AxArgs args) {
  using Shared = WideShared<Form, Tile>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = __shfl_sync(0xffffffffU, (ptx::shared_address(shared) + 1023U) & ~1023U, 0);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  constexpr int kCopier = 4 * Tile::kGroups;
  if (threadIdx.x == 32 * kCopier) {
    ptx::init_ring<Tile::kStages>(base + Shared::kBarriers, 4 * Tile::kGroups * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (warp >= kCopier) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<Tile::kCopyRegisters>();
    }
    if (warp == kCopier) {
      fill_stages<Form, Tile>(maps, args, base);
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<Tile::kRegisters>();
    }
    multiply_wide<Form, Tile>(args, warp >> 2, base);
  }
}

}  // namespace nibble::cuda
