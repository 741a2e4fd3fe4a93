#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"
#include "bench/cuda/schedules/mixed_codecs.cuh"
#include "bench/cuda/schedules/mixed_gemm.h"

// The product of INT4 weights per channel and activations of which each K block is INT8 or BF16:
//   y = weight scale * (x scale * sum of INT8 blocks + sum of BF16 blocks).
// The INT8 sum is exact. BF16 units are summed in F32 each from zero, then in their order; so no
// schedule changes a bit. A worker goes through its list of segments (work_list.h): one that has a
// tile to itself parks its BF16 sums until the INT8 ones are complete; workers that share a tile
// leave theirs in memory, and the last one adds them. Main loop and rounding to y are those of
// gemm_sm90/gemm_sm90.cuh.
namespace nibble::cuda {

/// A tile of kBlocks x 64 rows for each warpgroup and kTokens tokens. kParks: its BF16 sums are
/// parked in shared memory, otherwise in the cache.
template <int kTokens, int kBlocks, int kStages, int kResident, bool kParks_>
struct MixedShape : GemmTile<kTokens, kBlocks, 1, kStages, kResident> {
  static constexpr bool kParks = kParks_;
};

/// Shared memory: the ring of gemm_sm90 and room for a tile's sums.
template <typename Codec, typename Tile>
struct MixedShared {
  using Ring = GemmShared<Codec, Tile>;
  static constexpr int kGroupBytes = Tile::kBlocks * Tile::kTokens * 256;  // of sums
  static constexpr int kParked = Ring::kWords;
  static constexpr int kBytes =
      Tile::kParks ? kParked + Tile::kGroups * kGroupBytes + 1024 : Ring::kBytes;
  static_assert((kBytes + 1024) * Tile::kResident <= 233472);
};

/// y of sums that have their scale of tokens already.
struct MixedStoreCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kUnitBytes = 4096;
  static constexpr float kScale = 1.0F;
  static constexpr bool kRowScales = true;
};
inline constexpr float kMixedBf16Scale = 0x1p40F;  // of sums of MixedBf16Codec

/// A worker's steps, one after the other.
class MixedSteps {
 public:
  __device__ __forceinline__ MixedSteps(const MixedGemmArgs& args)
      : at_(args.segments + __ldg(args.begins + blockIdx.x)),
        end_(args.segments + __ldg(args.begins + blockIdx.x + 1)) {
    load();
  }
  [[nodiscard]] __device__ __forceinline__ bool more() const { return at_ != end_; }
  [[nodiscard]] __device__ __forceinline__ const MixedSegment& segment() const { return segment_; }
  [[nodiscard]] __device__ __forceinline__ int step() const { return segment_.begin + done_; }
  __device__ __forceinline__ void advance() {
    if (++done_ == segment_.steps) {
      done_ = 0;
      next_segment();
    }
  }
  __device__ __forceinline__ void next_segment() {
    ++at_;
    load();
  }

 private:
  __device__ __forceinline__ void load() {
    if (more()) {
      const auto* words = reinterpret_cast<const int4*>(at_);
      const int4 low = __ldg(words), high = __ldg(words + 1);
      segment_.row_tile = low.x;
      segment_.token_tile = low.y;
      segment_.begin = low.z;
      segment_.steps = low.w;
      segment_.tile = high.x;
      segment_.slot = high.y;
      segment_.kind = high.z;
    }
  }
  const MixedSegment *at_, *end_;
  MixedSegment segment_;
  int done_ = 0;
};

template <typename Int8, typename Bf16, typename Tile>
struct MixedKernel {
  using Ring = GemmShared<Int8, Tile>;
  using Shared = MixedShared<Int8, Tile>;
  static constexpr int kWords = Tile::kTokens / 8;  // of a row block, 16 bytes each
  static constexpr int kAllWords = Tile::kBlocks * kWords;
  static constexpr int kHalf = Tile::kTokens / 2;  // sums of a thread
  static_assert(Ring::kStageBytes == GemmShared<Bf16, Tile>::kStageBytes);

  // --- the copying thread ---

  static __device__ __forceinline__ void copy_weights(const MixedGemmArgs& args,
                                                      const MixedSteps& at,
                                                      uint32_t stage,
                                                      uint32_t barrier) {
    const MixedSegment& segment = at.segment();
    const int bytes = segment.is_int8() ? Int8::kPackedBytes : Bf16::kPackedBytes;
    const int steps = segment.is_int8() ? args.int8_steps : args.bf16_steps;
    const uint8_t* weights = segment.is_int8() ? args.int8_weights : args.bf16_weights;
    // What is read once leaves the L2 cache to activations and sums.
    const auto hint =
        args.m <= Tile::kTokens ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal;
    ptx::barrier_arrive_expect(barrier, Tile::kRowBlocks * bytes + Ring::kXBytes);
#pragma unroll
    for (int b = 0; b < Tile::kRowBlocks; ++b) {
      const int block = min(segment.row_tile * Tile::kRowBlocks + b, args.row_blocks - 1);
      const int64_t unit = static_cast<int64_t>(block) * steps + at.step();
      ptx::bulk_copy(stage + b * Int8::kUnitBytes, weights + unit * bytes, bytes, barrier, hint);
    }
  }

  static __device__ __forceinline__ void copy_x(const CUtensorMap& int8_x,
                                                const CUtensorMap& bf16_x,
                                                const MixedSteps& at,
                                                uint32_t stage,
                                                uint32_t barrier) {
    const uint32_t to = stage + Ring::kWeightBytes;
    const int token = at.segment().token_tile * Tile::kTokens;
    if (at.segment().is_int8()) {
      ptx::tensor_copy(to, int8_x, at.step() * 128, token, barrier);
    } else {
      ptx::tensor_copy(to, bf16_x, at.step() * 64, token, barrier);
    }
  }

  static __device__ void fill_ring(const CUtensorMap& int8_x,
                                   const CUtensorMap& bf16_x,
                                   const MixedGemmArgs& args,
                                   uint32_t base) {
    const uint32_t full = base + Ring::kBarriers;
    const uint32_t empty = full + 8 * Tile::kStages;
    ptx::prefetch_tensor_map(int8_x);
    ptx::prefetch_tensor_map(bf16_x);
    // Weights of the first ring, then, when the predecessor has ended, its activations.
    MixedSteps ahead(args);
    for (int s = 0; s < Tile::kStages && ahead.more(); ++s, ahead.advance()) {
      copy_weights(args, ahead, base + s * Ring::kStageBytes, full + 8 * s);
    }
    ptx::wait_for_predecessor();
    RingPlace<Tile::kStages> place;
    int count = 0;
    for (MixedSteps at(args); at.more(); at.advance(), ++count) {
      const uint32_t stage = base + place.stage * Ring::kStageBytes;
      const uint32_t barrier = full + 8 * place.stage;
      if (count >= Tile::kStages) {
        ptx::barrier_wait_to_refill(empty + 8 * place.stage, place.parity ^ 1);
        copy_weights(args, at, stage, barrier);
      }
      copy_x(int8_x, bf16_x, at, stage, barrier);
      place.advance();
    }
  }

  // --- the multiplying warpgroups ---

  struct Worker {
    const MixedGemmArgs& args;
    uint32_t base;
    uint4* parked;  // this thread's words
    volatile uint32_t* flag;
    int group, thread;
    RingPlace<Tile::kStages> place;
  };

  // accumulate() of a ring of one stage: nothing overlaps.
  template <typename Codec>
  static __device__ __forceinline__ void accumulate_in_turn(
      ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][kHalf], Worker& worker, int steps) {
    const uint32_t full = worker.base + Ring::kBarriers;
    const uint32_t x = ptx::descriptor_address(worker.base + Ring::kWeightBytes);
    for (int step = 0; step < steps; ++step) {
      ptx::barrier_wait(full, worker.place.parity);
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        const int unit = worker.group * Tile::kBlocks + b;
        uint32_t a[4][4];
        Codec::expand(Codec::fetch(worker.base + unit * Codec::kUnitBytes, worker.thread), a);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::pin(a[k]);
        }
        multiply<Codec, Tile::kTokens>(sums[b], a, x);
        ptx::mma_wait<0>();
      }
      ptx::warp_arrive(full + 8);  // empty
      worker.place.advance();
    }
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
      ptx::pin(sums[b]);
    }
  }

  template <typename Codec>
  static __device__ __forceinline__ void sum_segment(
      ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][kHalf],
      Worker& worker,
      const MixedSegment& segment) {
    const int steps = __shfl_sync(0xffffffffU, segment.steps, 0);  // to uniform registers
    clear(sums);
    if constexpr (Tile::kStages == 1) {
      accumulate_in_turn<Codec>(sums, worker, steps);
    } else {
      accumulate<Codec, Tile>(sums, worker.place, steps, worker.group, worker.thread, worker.base);
    }
  }

  // What the sums of both precisions make, before the scales of channels.
  static __device__ __forceinline__ float total(int32_t int8, float x_scale, float bf16) {
    const float scaled = __fmul_rn(static_cast<float>(int8), x_scale);
    return __fmaf_rn(bf16, kMixedBf16Scale, scaled);
  }
  // Scales of this thread's two tokens of eight.
  static __device__ __forceinline__ float2 x_scales(const Worker& worker,
                                                    const MixedSegment& segment,
                                                    int word) {
    const int token =
        segment.token_tile * Tile::kTokens + word % kWords * 8 + 2 * (worker.thread & 3);
    const auto scale = [&](int t) {
      return __fmul_rn(Int8::kScale, __ldcg(worker.args.x_scales + min(t, worker.args.m - 1)));
    };
    return {scale(token), scale(token + 1)};
  }

  static __device__ __forceinline__ void store_totals(const float (&totals)[Tile::kBlocks][kHalf],
                                                      const Worker& worker,
                                                      const MixedSegment& segment) {
    const GemmPart part{.row_tile = segment.row_tile, .token_tile = segment.token_tile};
    const GemmSm90Args args{.weight_scales = worker.args.weight_scales,
                            .y = worker.args.y,
                            .y_stride = worker.args.n,
                            .m = worker.args.m,
                            .n = worker.args.n,
                            .result = GemmResult::kBf16};
    const auto terms = load_terms<MixedStoreCodec, Tile>(args, part, worker.group, worker.thread);
    const auto tokens = load_token_terms<MixedStoreCodec, Tile>(args, part, worker.thread);
    StoreRooms rooms = StoreRooms::of_group<Ring>(worker.base, worker.group);
    if constexpr (Tile::kParks) {  // what was parked is used up
      rooms.words = worker.base + Shared::kParked + worker.group * Shared::kGroupBytes;
    }
    store_rows<MixedStoreCodec, Tile>(totals, args, terms, tokens, part, worker.group,
                                      worker.thread, rooms);
  }

  static __device__ __forceinline__ void park(const float (&sums)[Tile::kBlocks][kHalf],
                                              Worker& worker) {
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      worker.parked[w * 128] = sum_word(sums[w / kWords] + w % kWords * 4);
    }
  }

  // Sums of a BF16 unit of this worker's own tile, kept for the INT8 sums; true where there are
  // none of these and the tile is complete.
  static __device__ __forceinline__ bool keep_bf16(float (&sums)[Tile::kBlocks][kHalf],
                                                   Worker& worker,
                                                   const MixedSegment& segment) {
    if ((segment.kind & MixedSegment::kOpens) == 0) {
#pragma unroll
      for (int w = 0; w < kAllWords; ++w) {
        add_word(sums[w / kWords] + w % kWords * 4, worker.parked[w * 128]);
      }
    } else if constexpr (Tile::kParks) {
      sync_group(worker.group);  // the results of the tile before have left
    }
    if ((segment.kind & MixedSegment::kCloses) == 0) {
      park(sums, worker);
      return false;
    }
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        sums[b][i] = total(0, 0.0F, sums[b][i]);
      }
    }
    return true;
  }

  // INT8 sums of this worker's own tile, which complete it.
  static __device__ __forceinline__ void close_tile(float (&totals)[Tile::kBlocks][kHalf],
                                                    const int32_t (&sums)[Tile::kBlocks][kHalf],
                                                    Worker& worker,
                                                    const MixedSegment& segment) {
    const bool alone = (segment.kind & MixedSegment::kOpens) != 0;  // no BF16 blocks
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      const uint4 parked = alone ? uint4{0, 0, 0, 0} : worker.parked[w * 128];
      const float2 scales = x_scales(worker, segment, w);
      const int32_t* from = sums[w / kWords] + w % kWords * 4;
      float* to = totals[w / kWords] + w % kWords * 4;
      to[0] = total(from[0], scales.x, __uint_as_float(parked.x));
      to[1] = total(from[1], scales.y, __uint_as_float(parked.y));
      to[2] = total(from[2], scales.x, __uint_as_float(parked.z));
      to[3] = total(from[3], scales.y, __uint_as_float(parked.w));
    }
  }

  static __device__ __forceinline__ uint4* slot(const Worker& worker, int number) {
    return static_cast<uint4*>(worker.args.slots) +
           (static_cast<int64_t>(number) * Tile::kGroups + worker.group) * kAllWords * 128 +
           worker.thread;
  }
  // Leaves this warpgroup's sums of a shared tile in memory.
  template <typename Sum>
  static __device__ __forceinline__ void leave(const Sum (&sums)[Tile::kBlocks][kHalf],
                                               const Worker& worker,
                                               const MixedSegment& segment) {
    uint4* mine = slot(worker, segment.slot);
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      __stcg(mine + w * 128, sum_word(sums[w / kWords] + w % kWords * 4));
    }
  }
  // Whether all others have left theirs.
  static __device__ __forceinline__ bool all_left(const Worker& worker,
                                                  const MixedSegment& segment,
                                                  const MixedSlots& slots) {
    sync_group(worker.group);
    if (worker.thread == 0) {
      uint32_t* counter = worker.args.counters + segment.tile * Tile::kGroups + worker.group;
      const auto others = static_cast<uint32_t>(slots.bf16 + slots.int8 - 1);
      const bool last = ptx::add_acquire_release(counter, 1) == others;
      if (last) {
        *counter = 0;
      }
      worker.flag[worker.group] = last ? 1 : 0;
    }
    sync_group(worker.group);
    return worker.flag[worker.group] != 0;
  }

  // Sums of `count` slots from `first` on, kCount words from number `word` on.
  template <typename Sum, int kCount>
  static __device__ __forceinline__ void add_slots(
      Sum (&sums)[kCount][4], const Worker& worker, int first, int count, int word) {
    clear(sums);
    for (int i = 0; i < count; ++i) {
      const uint4* from = slot(worker, first + i) + word * 128;
      uint4 words[kCount];
#pragma unroll
      for (int w = 0; w < kCount; ++w) {
        words[w] = __ldcg(from + w * 128);
      }
#pragma unroll
      for (int w = 0; w < kCount; ++w) {
        add_word(sums[w], words[w]);
      }
    }
  }

  // What all have left of a shared tile, added.
  static __device__ __forceinline__ void gather(float (&totals)[Tile::kBlocks][kHalf],
                                                const Worker& worker,
                                                const MixedSegment& segment,
                                                const MixedSlots& slots) {
    constexpr int kAtOnce = kAllWords <= 2 ? kAllWords : kAllWords <= 16 ? 4 : 2;
#pragma unroll
    for (int w = 0; w < kAllWords; w += kAtOnce) {
      float floats[kAtOnce][4];
      int32_t integers[kAtOnce][4];
      add_slots(floats, worker, slots.first, slots.bf16, w);
      add_slots(integers, worker, slots.first + slots.bf16, slots.int8, w);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float2 scales = x_scales(worker, segment, w + i);
        float* to = totals[(w + i) / kWords] + (w + i) % kWords * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          to[j] = total(integers[i][j], j % 2 == 0 ? scales.x : scales.y, floats[i][j]);
        }
      }
    }
  }

  static __device__ __forceinline__ void run_segment(Worker& worker, const MixedSegment& segment) {
    const bool shares = uniform(segment.slot >= 0);
    float totals[Tile::kBlocks][kHalf];
    bool complete = false;
    if (uniform(segment.is_int8())) {
      int32_t sums[Tile::kBlocks][kHalf];
      sum_segment<Int8>(sums, worker, segment);
      if (shares) {
        leave(sums, worker, segment);
      } else {
        close_tile(totals, sums, worker, segment);
        complete = true;
      }
    } else {
      sum_segment<Bf16>(totals, worker, segment);
      if (shares) {
        leave(totals, worker, segment);
      } else {
        complete = keep_bf16(totals, worker, segment);
      }
    }
    if (shares) {
      const auto* words = reinterpret_cast<const int32_t*>(worker.args.shared + segment.tile);
      const MixedSlots slots{__ldg(words), __ldg(words + 1), __ldg(words + 2)};
      complete = all_left(worker, segment, slots);
      if (complete) {
        gather(totals, worker, segment, slots);
      }
    }
    if (complete) {
      store_totals(totals, worker, segment);
    }
  }

  // All workers meet; `meetings` counts on from launch to launch.
  static __device__ __forceinline__ void meet(uint32_t* meetings) {
    ptx::group_sync(5, 128 * Tile::kGroups);
    if (threadIdx.x == 0) {
      const uint32_t before = ptx::add_acquire_release(meetings, 1);
      const uint32_t all = (before / gridDim.x + 1) * gridDim.x;
      while (ptx::load_acquire(meetings) < all) {
      }
    }
    ptx::group_sync(5, 128 * Tile::kGroups);
  }

  static __device__ __forceinline__ void multiply_segments(Worker& worker) {
    ptx::wait_for_predecessor();
    MixedSteps at(worker.args);
    for (int round = 0; uniform(at.more()) || round < worker.args.rounds; ++round) {
      if (uniform(at.more())) {
        run_segment(worker, at.segment());
        at.next_segment();
      }
      if (round < worker.args.rounds) {
        meet(worker.args.meetings);
      }
    }
  }
};

template <typename Int8, typename Bf16, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mixed_gemm_sm90(const __grid_constant__ CUtensorMap int8_x,
                    const __grid_constant__ CUtensorMap bf16_x,
                    const __grid_constant__ MixedGemmArgs args) {
  using Kernel = MixedKernel<Int8, Bf16, Tile>;
  using Ring = typename Kernel::Ring;
  extern __shared__ uint8_t shared[];
  const uint32_t raw = ptx::shared_address(shared);
  const uint32_t base = __shfl_sync(0xffffffffU, (raw + 1023U) & ~1023U, 0);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 128 * Tile::kGroups) {
    ptx::init_ring<Tile::kStages>(base + Ring::kBarriers, 4 * Tile::kGroups * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (warp >= 4 * Tile::kGroups) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<40>();
    }
    if (threadIdx.x == 128 * Tile::kGroups) {
      Kernel::fill_ring(int8_x, bf16_x, args, base);
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<232>();
    }
    const int group = warp >> 2, thread = static_cast<int>(threadIdx.x & 127);
    uint8_t* aligned = shared + (base - raw);
    constexpr int kGroupBytes = Kernel::Shared::kGroupBytes;
    uint8_t* parked = Tile::kParks
                          ? aligned + Kernel::Shared::kParked
                          : static_cast<uint8_t*>(args.parked) +
                                static_cast<int64_t>(blockIdx.x) * Tile::kGroups * kGroupBytes;
    typename Kernel::Worker worker{
        .args = args,
        .base = base,
        .parked = reinterpret_cast<uint4*>(parked + group * kGroupBytes) + thread,
        .flag = reinterpret_cast<volatile uint32_t*>(aligned + Ring::kFlags),
        .group = group,
        .thread = thread,
        .place = {}};
    Kernel::multiply_segments(worker);
  }
}

}  // namespace nibble::cuda
