#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"
#include "bench/cuda/schedules/mixed_codecs.cuh"
#include "bench/cuda/schedules/mixed_gemm.h"
#include "bench/cuda/schedules/mixed_unpack.cuh"

// The product of INT4 weights per channel and activations of which each K block is INT8 or BF16:
//   y = weight scale * (x scale * sum of INT8 blocks + sum of BF16 blocks).
// The INT8 sum is exact. BF16 units are summed in F32 each from zero, then in their order; so no
// schedule changes a bit. A worker goes through its list of segments (work_list.h): a tile's owner
// parks its BF16 sums in shared memory until its INT8 ones are complete; workers that help it leave
// theirs in memory, for which the owner waits. Main loop and rounding to y are those of
// gemm_sm90/gemm_sm90.cuh.
namespace nibble::cuda {

/// A tile of kBlocks x 64 rows for each warpgroup and kTokens tokens. A launch takes kResident
/// blocks of a multiprocessor.
template <int kTokens, int kBlocks, int kStages, int kResident, ActStore kStore = ActStore::kBytes>
struct MixedShape : GemmTile<kTokens, kBlocks, 1, kStages, kResident> {
  using Base = GemmTile<kTokens, kBlocks, 1, kStages, kResident>;
  static constexpr bool kStoresWords = false;  // results leave by way of the parked sums' room
  static constexpr bool kNibbles = kStore == ActStore::kNibbles;
  // Warps beside the copying one that unpack: those of its warpgroup, or one more.
  static constexpr int kUnpackers = !kNibbles ? 0 : Base::kTakesRegisters ? 96 : 32;
  static constexpr int kThreads = Base::kThreads + (Base::kTakesRegisters ? 0 : kUnpackers);
};

/// Shared memory: the ring of gemm_sm90, scales of a tile's tokens for each warpgroup, and room for
/// its sums. Where x is unpacked, that is what fills a stage for its readers, and copies arrive at
/// barriers of their own.
template <typename Codec, typename Tile>
struct MixedShared {
  using Ring = GemmShared<Codec, Tile>;
  static constexpr int kScaleBytes = Tile::kTokens * 4;
  static constexpr int kGroupBytes = Tile::kBlocks * Tile::kTokens * 256;  // of sums
  static constexpr int kScales = Ring::kScales;
  static constexpr int kParked = kScales + Tile::kGroups * kScaleBytes;
  static constexpr int kEnd = kParked + Tile::kGroups * kGroupBytes;
  static constexpr int kCopied = Tile::kNibbles ? kEnd : Ring::kBarriers;
  static constexpr int kBytes =
      kEnd + (Tile::kNibbles ? 8 * Tile::kStages : 0) + 1024;  // base rounded up
  static_assert((kBytes + 1024) * Tile::kResident <= 233472);

  static __device__ __forceinline__ void init_barriers(uint32_t base) {
    constexpr uint32_t kReaders = 4 * Tile::kGroups * ptx::kWarpArrivals;
    if constexpr (!Tile::kNibbles) {
      ptx::init_ring<Tile::kStages>(base + Ring::kBarriers, kReaders);
    } else {
      for (int s = 0; s < Tile::kStages; ++s) {
        ptx::barrier_init(base + kCopied + 8 * s, 1);
        ptx::barrier_init(base + Ring::kBarriers + 8 * s, Tile::kUnpackers);
        ptx::barrier_init(base + Ring::kBarriers + 8 * (Tile::kStages + s), kReaders);
      }
    }
  }
};

inline constexpr float kMixedBf16Scale = Int4ToBf16Codec::kScale;  // of sums of MixedBf16Codec

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
      skip_empty();
    }
  }
  /// Past what only closes a tile.
  __device__ __forceinline__ void skip_empty() {
    while (more() && segment_.steps == 0) {
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
    const int x_bytes = Tile::kNibbles && segment.is_int8() ? Ring::kXBytes / 2 : Ring::kXBytes;
    ptx::barrier_arrive_expect(barrier, Tile::kRowBlocks * bytes + x_bytes);
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
    if (at.segment().is_int8() && Tile::kNibbles) {
      ptx::tensor_copy(to + NibbleTile<Tile::kTokens>::kCopied, int8_x, at.step() * 64, token,
                       barrier);
    } else if (at.segment().is_int8()) {
      ptx::tensor_copy(to, int8_x, at.step() * 128, token, barrier);
    } else {
      ptx::tensor_copy(to, bf16_x, at.step() * 64, token, barrier);
    }
  }

  static __device__ void fill_ring(const CUtensorMap& int8_x,
                                   const CUtensorMap& bf16_x,
                                   const MixedGemmArgs& args,
                                   uint32_t base) {
    const uint32_t copied = base + Shared::kCopied;
    const uint32_t empty = base + Ring::kBarriers + 8 * Tile::kStages;
    ptx::prefetch_tensor_map(int8_x);
    ptx::prefetch_tensor_map(bf16_x);
    // Weights of the first ring, then, when the predecessor has ended, its activations.
    MixedSteps ahead(args);
    ahead.skip_empty();
    for (int s = 0; s < Tile::kStages && ahead.more(); ++s, ahead.advance()) {
      copy_weights(args, ahead, base + s * Ring::kStageBytes, copied + 8 * s);
    }
    ptx::wait_for_predecessor();
    RingPlace<Tile::kStages> place;
    int count = 0;
    MixedSteps at(args);
    for (at.skip_empty(); at.more(); at.advance(), ++count) {
      const uint32_t stage = base + place.stage * Ring::kStageBytes;
      const uint32_t barrier = copied + 8 * place.stage;
      if (count >= Tile::kStages) {
        ptx::barrier_wait_to_refill(empty + 8 * place.stage, place.parity ^ 1);
        copy_weights(args, at, stage, barrier);
      }
      copy_x(int8_x, bf16_x, at, stage, barrier);
      place.advance();
    }
  }

  // --- the unpacking warps ---

  static __device__ void unpack_ring(const MixedGemmArgs& args, uint32_t base, int thread) {
    const uint32_t full = base + Ring::kBarriers;
    RingPlace<Tile::kStages> place;
    MixedSteps at(args);
    for (at.skip_empty(); at.more(); at.advance()) {
      ptx::barrier_wait(base + Shared::kCopied + 8 * place.stage, place.parity);
      if (at.segment().is_int8()) {
        unpack_tile<Tile::kTokens, Tile::kUnpackers>(
            base + place.stage * Ring::kStageBytes + Ring::kWeightBytes, thread);
        ptx::fence_shared_to_async();  // products of other warps read it
      }
      ptx::barrier_arrive(full + 8 * place.stage);
      place.advance();
    }
  }

  // --- the multiplying warpgroups ---

  struct Worker {
    const MixedGemmArgs& args;
    uint32_t base;
    uint32_t parked, scales;  // of this warpgroup's shared memory
    volatile uint32_t* flag;
    int group, thread;
    RingPlace<Tile::kStages> place;

    [[nodiscard]] __device__ __forceinline__ uint32_t word(int w) const {
      return parked + (w * 128 + thread) * 16;
    }
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
    if (steps == 0) {  // of a tile without INT8 blocks
      return;
    }
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
  // Gives the warpgroup the scales of the tile's tokens.
  static __device__ __forceinline__ void load_scales(const Worker& worker,
                                                     const MixedSegment& segment) {
    sync_group(worker.group);  // the results of the tile before have left
    if (worker.thread < Tile::kTokens) {
      const int token = min(segment.token_tile * Tile::kTokens + worker.thread, worker.args.m - 1);
      const float scale = __fmul_rn(Int8::kScale, __ldcg(worker.args.x_scales + token));
      ptx::store_shared4(worker.scales + 4 * worker.thread, __float_as_uint(scale));
    }
    sync_group(worker.group);
  }

  // Parks the totals of one word of sums.
  static __device__ __forceinline__ void put_totals(const Worker& worker,
                                                    int word,
                                                    const int32_t* int8,
                                                    const uint4& bf16) {
    const uint2 two =
        ptx::load_shared8(worker.scales + 4 * (word % kWords * 8 + 2 * (worker.thread & 3)));
    const float first = __uint_as_float(two.x), second = __uint_as_float(two.y);
    const float totals[4] = {total(int8[0], first, __uint_as_float(bf16.x)),
                             total(int8[1], second, __uint_as_float(bf16.y)),
                             total(int8[2], first, __uint_as_float(bf16.z)),
                             total(int8[3], second, __uint_as_float(bf16.w))};
    ptx::store_shared16(worker.word(word), sum_word(totals));
  }

  // Sums of a BF16 unit of this worker's own tile, kept until the INT8 ones close it.
  static __device__ __forceinline__ void park(float (&sums)[Tile::kBlocks][kHalf],
                                              const Worker& worker,
                                              const MixedSegment& segment) {
    const bool opens = (segment.kind & MixedSegment::kOpens) != 0;
    if (opens) {
      sync_group(worker.group);  // the results of the tile before have left
    }
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      float* four = sums[w / kWords] + w % kWords * 4;
      if (!opens) {
        add_word(four, ptx::load_shared16(worker.word(w)));
      }
      ptx::store_shared16(worker.word(w), sum_word(four));
    }
  }

  static __device__ __forceinline__ uint4* slot(const Worker& worker, int number) {
    return static_cast<uint4*>(worker.args.slots) +
           (static_cast<int64_t>(number) * Tile::kGroups + worker.group) * kAllWords * 128 +
           worker.thread;
  }
  static __device__ __forceinline__ uint32_t* counter_of(const Worker& worker,
                                                         const MixedSegment& segment) {
    return worker.args.counters + segment.tile * Tile::kGroups + worker.group;
  }
  // Leaves this warpgroup's sums for the tile's owner.
  template <typename Sum>
  static __device__ __forceinline__ void leave(const Sum (&sums)[Tile::kBlocks][kHalf],
                                               const Worker& worker,
                                               const MixedSegment& segment) {
    uint4* mine = slot(worker, segment.slot);
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      __stcg(mine + w * 128, sum_word(sums[w / kWords] + w % kWords * 4));
    }
    sync_group(worker.group);
    if (worker.thread == 0) {
      ptx::add_release(counter_of(worker, segment), 1);
    }
  }

  // Waits until all helpers of a tile have.
  static __device__ __forceinline__ void wait_for_helpers(const Worker& worker,
                                                          const MixedSegment& segment,
                                                          const MixedSlots& slots) {
    if (worker.thread == 0) {
      uint32_t* counter = counter_of(worker, segment);
      while (ptx::load_acquire(counter) < static_cast<uint32_t>(slots.bf16 + slots.int8)) {
      }
      *counter = 0;  // for the next launch
    }
    sync_group(worker.group);
  }

  // Calls add(word, what a slot has of it) for all words of slots first .. first + count - 1, one
  // slot after the other; eight words are on their way at once.
  template <typename Add>
  static __device__ __forceinline__ void for_slots(const Worker& worker,
                                                   int first,
                                                   int count,
                                                   const Add& add) {
    constexpr int kWordsAtOnce = kAllWords < 8 ? kAllWords : 8;
    constexpr int kSlotsAtOnce = 8 / kWordsAtOnce;
    for (int i = 0; i < count; i += kSlotsAtOnce) {
#pragma unroll
      for (int begin = 0; begin < kAllWords; begin += kWordsAtOnce) {
        uint4 words[kSlotsAtOnce][kWordsAtOnce];
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s) {
          const uint4* from = slot(worker, first + min(i + s, count - 1)) + begin * 128;
#pragma unroll
          for (int w = 0; w < kWordsAtOnce; ++w) {
            words[s][w] = __ldcg(from + w * 128);
          }
        }
#pragma unroll
        for (int s = 0; s < kSlotsAtOnce; ++s) {
#pragma unroll
          for (int w = 0; w < kWordsAtOnce; ++w) {
            if (i + s < count) {
              add(begin + w, words[s][w]);
            }
          }
        }
      }
    }
  }

  // Adds helpers' sums to the owner's; true where there are BF16 ones in the parked room.
  static __device__ __forceinline__ bool add_helpers(int32_t (&sums)[Tile::kBlocks][kHalf],
                                                     const Worker& worker,
                                                     const MixedSegment& segment) {
    bool parked = (segment.kind & MixedSegment::kOpens) == 0;
    if (segment.tile < 0) {
      return parked;
    }
    const auto* fields = reinterpret_cast<const int32_t*>(worker.args.shared + segment.tile);
    const MixedSlots slots{__ldg(fields), __ldg(fields + 1), __ldg(fields + 2)};
    wait_for_helpers(worker, segment, slots);
    if (slots.bf16 > 0 && !parked) {  // the helpers' are the first
#pragma unroll
      for (int w = 0; w < kAllWords; ++w) {
        ptx::store_shared16(worker.word(w), uint4{});
      }
      parked = true;
    }
    for_slots(worker, slots.first, slots.bf16, [&](int w, const uint4& theirs) {
      const uint4 mine = ptx::load_shared16(worker.word(w));
      float four[4] = {__uint_as_float(mine.x), __uint_as_float(mine.y), __uint_as_float(mine.z),
                       __uint_as_float(mine.w)};
      add_word(four, theirs);
      ptx::store_shared16(worker.word(w), sum_word(four));
    });
    for_slots(worker, slots.first + slots.bf16, slots.int8, [&](int w, const uint4& theirs) {
      add_word(sums[w / kWords] + w % kWords * 4, theirs);
    });
    return parked;
  }

  // The owner's INT8 sums, which complete the tile.
  static __device__ __forceinline__ void close_tile(int32_t (&sums)[Tile::kBlocks][kHalf],
                                                    const Worker& worker,
                                                    const MixedSegment& segment) {
    load_scales(worker, segment);
    const bool parked = add_helpers(sums, worker, segment);
#pragma unroll
    for (int w = 0; w < kAllWords; ++w) {
      put_totals(worker, w, sums[w / kWords] + w % kWords * 4,
                 parked ? ptx::load_shared16(worker.word(w)) : uint4{});
    }
    store_totals(worker, segment);
  }

  // Eight neighbouring channels of a token, times their scales.
  static __device__ __forceinline__ void store_eight(const MixedGemmArgs& args,
                                                     int token,
                                                     int channel,
                                                     const float (&sums)[8]) {
    if (token >= args.m || channel >= args.n) {
      return;
    }
    auto* y = static_cast<__nv_bfloat16*>(args.y) + static_cast<int64_t>(token) * args.n + channel;
    const float* scales = args.weight_scales + channel;  // filled up to whole blocks
    if (args.n % 8 == 0) {
      const auto two = [&](int i) {
        return ptx::pack_bf16(__fmul_rn(sums[i], __ldg(scales + i)),
                              __fmul_rn(sums[i + 1], __ldg(scales + i + 1)));
      };
      *reinterpret_cast<uint4*>(y) = uint4{two(0), two(2), two(4), two(6)};
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (channel + i < args.n) {
        y[i] = __float2bfloat16_rn(__fmul_rn(sums[i], __ldg(scales + i)));
      }
    }
  }

  // Stores the parked totals. Each warp takes words of eight tokens in turn: a lane two tokens of
  // eight channels, which lie in four threads' words, so that 64 channels leave side by side.
  static __device__ __forceinline__ void store_totals(const Worker& worker,
                                                      const MixedSegment& segment) {
    sync_group(worker.group);
    const int lane = worker.thread & 31, octet = lane >> 2, pair = lane & 3;
#pragma unroll 1
    for (int w = worker.thread >> 5; w < kAllWords; w += 4) {
      float sums[2][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i ^ (octet & 1);  // other banks than the octet beside
        const uint4 word =
            ptx::load_shared16(worker.parked + (w * 128 + 16 * octet + 4 * j + pair) * 16);
        const float four[4] = {__uint_as_float(word.x), __uint_as_float(word.y),
                               __uint_as_float(word.z), __uint_as_float(word.w)};
#pragma unroll
        for (int other = 0; other < 2; ++other) {  // a register has no run-time index
          if (j == (i ^ other)) {
            sums[0][2 * (i ^ other)] = four[0];
            sums[1][2 * (i ^ other)] = four[1];
            sums[0][2 * (i ^ other) + 1] = four[2];
            sums[1][2 * (i ^ other) + 1] = four[3];
          }
        }
      }
      const int block =
          segment.row_tile * Tile::kRowBlocks + worker.group * Tile::kBlocks + w / kWords;
      const int token = segment.token_tile * Tile::kTokens + w % kWords * 8 + 2 * pair;
      store_eight(worker.args, token, 64 * block + 8 * octet, sums[0]);
      store_eight(worker.args, token + 1, 64 * block + 8 * octet, sums[1]);
    }
  }

  static __device__ __forceinline__ void run_segment(Worker& worker, const MixedSegment& segment) {
    const bool helps = uniform(segment.slot >= 0);
    if (uniform(segment.is_int8())) {
      int32_t sums[Tile::kBlocks][kHalf];
      sum_segment<Int8>(sums, worker, segment);
      if (helps) {
        leave(sums, worker, segment);
      } else {
        close_tile(sums, worker, segment);
      }
    } else {
      float sums[Tile::kBlocks][kHalf];
      sum_segment<Bf16>(sums, worker, segment);
      if (helps) {
        leave(sums, worker, segment);
      } else {
        park(sums, worker, segment);
      }
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
    int round = 0;
    for (MixedSteps at(worker.args); uniform(at.more()); at.next_segment()) {
      run_segment(worker, at.segment());
      if (uniform((at.segment().kind & MixedSegment::kMeets) != 0)) {
        meet(worker.args.meetings);
        ++round;
      }
    }
    for (; round < worker.args.rounds; ++round) {
      meet(worker.args.meetings);
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
    Kernel::Shared::init_barriers(base);
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
    } else if constexpr (Tile::kNibbles) {
      if (warp > 4 * Tile::kGroups) {
        Kernel::unpack_ring(args, base, static_cast<int>(threadIdx.x) - 128 * Tile::kGroups - 32);
      }
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<232>();
    }
    const int group = warp >> 2, thread = static_cast<int>(threadIdx.x & 127);
    using Shared = typename Kernel::Shared;
    typename Kernel::Worker worker{
        .args = args,
        .base = base,
        .parked = base + Shared::kParked + group * Shared::kGroupBytes,
        .scales = base + Shared::kScales + group * Shared::kScaleBytes,
        .flag = reinterpret_cast<volatile uint32_t*>(shared + (base - raw) + Ring::kFlags),
        .group = group,
        .thread = thread,
        .place = {}};
    Kernel::multiply_segments(worker);
  }
}

}  // namespace nibble::cuda
