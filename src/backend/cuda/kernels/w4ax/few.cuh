#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4ax/shared.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_s8.cuh"

// y = x · wᵀ for up to 16 tokens, by mma.sync: the warps of a block share the K blocks of a step,
// and each leaves its exact sums in shared memory, where every thread then adds those of its own
// results in the order of K. So many warps read one tile of few rows, of which there are enough for
// all multiprocessors, though a tile's sums have one order.
namespace nibble::cuda {

template <int kTokens_, int kRows_, int kDepth_, int kStages_, int kResident_>
struct FewTile {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kResident = kResident_;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps + 32;
  static constexpr int kSixteens = kRows / 16, kOctets = kTokens / 8;
  static constexpr int kParts = kSixteens * kDepth / kWarps;    // 16 rows of a K block, of a warp
  static constexpr int kOwn = kRows * kTokens / (32 * kWarps);  // results of a thread
  static_assert(kParts >= 1 && kWarps % kDepth == 0);
  static_assert(kOwn == 1 || kOwn == 2 || kOwn == 4);
};

template <typename Form, typename Tile>
struct FewShared : W4AxShared<Form, Tile> {
  using Base = W4AxShared<Form, Tile>;
  static constexpr int kSumBytes = Tile::kRows * Tile::kTokens * 4;  // of one block of K
  static constexpr int kRoomBytes = Tile::kDepth * Form::kSubs * kSumBytes;
  static constexpr int kSums = (Base::kEnd + 127) / 128 * 128;
  static constexpr int kBytes = kSums + 2 * kRoomBytes + 1024;
  static_assert((kBytes + 1024) * Tile::kResident <= 233472);
};

/// What a thread holds of a tile: results e on of one row of 16 and eight tokens, in the places of
/// fragments.
template <typename Tile>
struct FewPlace {
  int row, token;  // of the first result, in the tile
  int fragment;    // its place among those of a lane: token fragment % 2, row fragment / 2

  __device__ __forceinline__ explicit FewPlace(int thread) {
    const int word = thread * Tile::kOwn;
    const int square = word >> 7, lane = word >> 2 & 31;
    fragment = word & 3;
    row = square / Tile::kOctets * 16 + 2 * (lane >> 2);
    token = square % Tile::kOctets * 8 + 2 * (lane & 3);
  }
};

template <typename Form, typename Tile>
class FewSums {
 public:
  using Shared = FewShared<Form, Tile>;
  static constexpr int kOwn = Tile::kOwn;
  float total[kOwn] = {};

  __device__ __forceinline__ FewSums(uint32_t base, int thread)
      : base_(base), thread_(thread), lane_(thread & 31), warp_(thread >> 5), place_(thread) {}

  // A step's products are under way while the sums of the one before are added.
  __device__ __forceinline__ void accumulate(RingPlace<Tile::kStages>& place,
                                             int steps,
                                             int& room) {
    const auto room_of = [&](int r) { return base_ + Shared::kSums + r * Shared::kRoomBytes; };
    StepSums d;
    uint32_t stage = wait(place);
    multiply_blocks(stage, d);
    leave_blocks(room_of(room), d);
    ptx::group_sync(1, 32 * Tile::kWarps);
    for (int step = 0; step < steps; ++step) {
      const uint32_t before = stage;
      const int number = place.stage;
      place.advance();
      const bool more = step + 1 < steps;
      if (more) {
        stage = wait(place);
        multiply_blocks(stage, d);
      }
      add(before, room_of(room) + thread_ * (4 * kOwn));
      release(number);
      room ^= 1;
      if (more) {
        leave_blocks(room_of(room), d);
        ptx::group_sync(1, 32 * Tile::kWarps);
      }
    }
  }

  // The word of a thread that passes from block to block.
  template <typename Link>
  __device__ __forceinline__ void hand_on(const Link& link) const {
    uint4 word{};
    word.x = __float_as_uint(total[0]);
    if constexpr (kOwn > 1) {
      word.y = __float_as_uint(total[1]);
    }
    if constexpr (kOwn > 2) {
      word.z = __float_as_uint(total[2]);
      word.w = __float_as_uint(total[3]);
    }
    link.put(0, word);
  }
  template <typename Link>
  __device__ __forceinline__ void take_over(const Link& link) {
    const uint4 word = link.get(0);
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      total[i] = __uint_as_float(words[i]);
    }
  }

  __device__ __forceinline__ void store(const W4AxArgs& args, const GemmPart& part) {
    const GemmSm90Args& to = args.base;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = place_.fragment + i;
      const int row = part.row_tile * Tile::kRows + place_.row + at / 2;
      const int token = part.token_tile * Tile::kTokens + place_.token + at % 2;
      if (row >= to.n || token >= to.m) {
        continue;
      }
      float value = total[i];
      if (to.bias != nullptr) {
        value = __fadd_rn(value, __ldg(to.bias + row));
      }
      const int64_t index = token * to.y_stride + row;
      if (to.result == GemmResult::kBf16) {
        static_cast<__nv_bfloat16*>(to.y)[index] = __float2bfloat16(value);
      } else {
        auto* y = static_cast<float*>(to.y) + index;
        *y = to.result == GemmResult::kAddF32 ? __fadd_rn(value, *y) : value;
      }
    }
  }

 private:
  static constexpr int kParts = Tile::kParts, kOctets = Tile::kOctets;
  using Fragments = uint32_t[kOctets][4][2];

  __device__ __forceinline__ uint32_t wait(const RingPlace<Tile::kStages>& place) const {
    ptx::barrier_wait(base_ + Shared::kBarriers + 8 * place.stage, place.parity);
    return base_ + place.stage * Shared::kStageBytes;
  }
  __device__ __forceinline__ void release(int stage) const {
    ptx::warp_arrive(base_ + Shared::kBarriers + 8 * (Tile::kStages + stage));
  }
  // This warp's K block in a stage, and the first of its 16 rows.
  [[nodiscard]] __device__ __forceinline__ int k_block() const { return warp_ % Tile::kDepth; }
  [[nodiscard]] __device__ __forceinline__ int first_sixteen() const {
    return warp_ / Tile::kDepth * kParts;
  }
  __device__ __forceinline__ void load_x(uint32_t stage, Fragments& b) const {
    const uint32_t x = stage + Shared::kX + k_block() * Shared::kXBytes;
    const int row = lane_ & 7;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t v[4];
        const int chunk = 4 * half + (lane_ >> 3);
        ptx::load_matrix4(v, x + octet * 1024 + row * 128 + ((chunk ^ row) << 4));
        b[octet][2 * half][0] = v[0];
        b[octet][2 * half][1] = v[1];
        b[octet][2 * half + 1][0] = v[2];
        b[octet][2 * half + 1][1] = v[3];
      }
    }
  }
  __device__ __forceinline__ void load_weights(uint32_t stage,
                                               int sixteen,
                                               uint32_t (&a)[4][4]) const {
    const uint32_t piece = piece_place<Form, Tile>(stage, sixteen >> 1, k_block());
    W4AxWords::fetch(piece, sixteen & 1, lane_).expand(a);
  }
  // Leaves a fragment of sums in [rooms][squares of 16 rows x 8 tokens][lanes].
  __device__ __forceinline__ void leave(
      uint32_t sums, int room, int sixteen, int octet, const int32_t (&d)[4]) const {
    const int square = sixteen * kOctets + octet;
    ptx::store_shared16(sums + room * Shared::kSumBytes + square * 512 + lane_ * 16, sum_word(d));
  }

  // This warp's sums of a step: its K block times its rows, one for each block within.
  using StepSums = int32_t[kParts][Form::kSubs][kOctets][4];

  __device__ __forceinline__ void multiply_blocks(uint32_t stage, StepSums& d) const {
    constexpr int kSteps = 4 / Form::kSubs;
    Fragments b;
    load_x(stage, b);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      uint32_t a[4][4];
      load_weights(stage, first_sixteen() + p, a);
#pragma unroll
      for (int sub = 0; sub < Form::kSubs; ++sub) {
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
          auto& sum = d[p][sub][octet];
          sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            ptx::warp_mma_s8(sum, a[sub * kSteps + k], b[octet][sub * kSteps + k]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void leave_blocks(uint32_t sums, const StepSums& d) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int sub = 0; sub < Form::kSubs; ++sub) {
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
          leave(sums, k_block() * Form::kSubs + sub, first_sixteen() + p, octet, d[p][sub][octet]);
        }
      }
    }
  }

  static __device__ __forceinline__ void load_own(uint32_t (&own)[kOwn], uint32_t at) {
    if constexpr (kOwn == 1) {
      own[0] = ptx::load_shared4(at);
    } else if constexpr (kOwn == 2) {
      const uint2 two = ptx::load_shared8(at);
      own[0] = two.x;
      own[1] = two.y;
    } else {
      const uint4 four = ptx::load_shared16(at);
      own[0] = four.x;
      own[1] = four.y;
      own[2] = four.z;
      own[3] = four.w;
    }
  }

  // Adds the sums of a step that are this thread's, which lie at `own`.
  __device__ __forceinline__ void add(uint32_t stage, uint32_t own) {
#pragma unroll
    for (int u = 0; u < Tile::kDepth; ++u) {
      const uint32_t piece = piece_place<Form, Tile>(stage, place_.row >> 5, u);
#pragma unroll
      for (int sub = 0; sub < Form::kSubs; ++sub) {
        const int block = u * Form::kSubs + sub;
        uint32_t sum[kOwn];
        load_own(sum, own + block * Shared::kSumBytes);
        add_block(sum, piece + Form::kCodeBytes + sub * 64 + (place_.row & 31) * 2,
                  stage + Shared::kScales + block * Shared::kScaleBytes + place_.token * 4);
      }
    }
  }
  __device__ __forceinline__ void add_block(const uint32_t (&sum)[kOwn],
                                            uint32_t weight_scales,
                                            uint32_t x_scales) {
    const float2 w = w4ax_scales(ptx::load_shared4(weight_scales));
    const uint2 x = ptx::load_shared8(x_scales);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = place_.fragment + i;
      total[i] = w4ax_add(static_cast<int32_t>(sum[i]), at / 2 == 0 ? w.x : w.y,
                          __uint_as_float(at % 2 == 0 ? x.x : x.y), total[i]);
    }
  }

  uint32_t base_;
  int thread_, lane_, warp_;
  FewPlace<Tile> place_;
};

template <typename Form, typename Tile>
__device__ __forceinline__ void multiply_few(const W4AxArgs& args, uint32_t base) {
  constexpr int kThreads = 32 * Tile::kWarps;
  using Link = ChainLink<kThreads, 1, 1>;
  const int thread = static_cast<int>(threadIdx.x);
  ChainParts parts(args.schedule, static_cast<int>(blockIdx.x));
  GemmPart part;
  RingPlace<Tile::kStages> place;
  int room = 0;
  ptx::wait_for_predecessor();
  while (parts.next(part)) {
    FewSums<Form, Tile> sums(base, thread);
    const Link link(args, 0, thread);
    if (part.begin > 0) {
      if (thread == 0) {
        while (ptx::load_acquire(link.flag_before) == 0) {
        }
        *link.flag_before = 0;
      }
      ptx::group_sync(1, kThreads);
      sums.take_over(link);
    }
    sums.accumulate(place, part.end - part.begin, room);
    if (part.end < args.schedule.steps) {
      sums.hand_on(link);
      ptx::group_sync(1, kThreads);
      if (thread == 0) {
        ptx::add_release(link.own_flag, 1);
      }
    } else {
      sums.store(args, part);
    }
  }
}

template <typename Form, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    w4ax_few_sm90(const __grid_constant__ W4AxMaps maps, const __grid_constant__ W4AxArgs args) {
  using Shared = FewShared<Form, Tile>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 1023U) & ~1023U;
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 32 * Tile::kWarps) {
    ptx::init_ring<Tile::kStages>(base + Shared::kBarriers, Tile::kWarps * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (warp == Tile::kWarps) {
    fill_stages<Form, Tile>(maps, args, base);
  } else {
    multiply_few<Form, Tile>(args, base);
  }
}

}  // namespace nibble::cuda
