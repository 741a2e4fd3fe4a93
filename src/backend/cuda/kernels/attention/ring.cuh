#pragma once

// How decode gets its tiles: the walk along a block's share of the plan's line, and the ring of
// each warp that tiles are copied into ahead of their use.

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/fragments.cuh"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nibble::cuda {

struct DecodeArgs : PagedArgs {
  int32_t tiles_shift;     // log2 of tiles_per_page, or -1
  int32_t groups;          // passes per KV head
  const int32_t* q_begin;  // of the step
  const int32_t* kv_len;
  int32_t stages;
  float* partial_sums;   // [2 grid][kColumns][head_dim]
  float2* partial_tops;  // [2 grid][kColumns]: top, total
  uint32_t* arrivals;    // [grid], zero
  AppendArgs append;     // of attention/decode_short.cuh: of the step's own tokens, or of none
};

constexpr int kDecodeThreads = 32 * kDecodeWarps;

/// A tile on the line: KV head and group, tile of the sequence.
struct LinePlace {
  int32_t sequence;
  int32_t item;
  int32_t tile;
};

/// What a block takes of the line.
struct BlockShare {
  int32_t begin;
  int32_t end;
  int32_t blocks;  // that share the line
  int32_t total;   // length of the line
};

/// Walks along the line of tiles.
struct LineWalker {
  LinePlace at;
  PlannedSequence sequence;

  /// To where a block begins.
  __device__ BlockShare start(const DecodeArgs& args, int32_t block) {
    const auto* from = reinterpret_cast<const int4*>(args.plan.starts + block);
    const int4 a = __ldcg(from);
    const int4 b = __ldcg(from + 1);
    const int4 c = __ldcg(from + 2);
    at = {a.x, a.y, a.z};
    sequence = {c.x, c.y, c.z, c.w};
    return {a.w, b.x, b.y, b.z};
  }
  /// `count` tiles on. The caller knows that there are so many.
  __device__ void advance(const DecodeArgs& args, int32_t count) {
    at.tile += count;
    while (at.tile >= sequence.end_tile) {
      const int32_t over = at.tile - sequence.end_tile;
      if (++at.item == args.kv_heads * args.groups) {
        at.item = 0;
        do {
          ++at.sequence;
          load(args);
        } while (sequence.end_tile == 0);
      }
      at.tile = sequence.first_tile + over;
    }
  }

 private:
  __device__ void load(const DecodeArgs& args) {
    const int4 v = __ldcg(reinterpret_cast<const int4*>(args.plan.sequences) + at.sequence);
    sequence = {v.x, v.y, v.z, v.w};
  }
};

/// A warp's ring of tiles. The page of the next tile is looked up a step ahead.
template <typename Tile>
struct TileRing {
  uint32_t slots;     // shared memory of this warp
  uint32_t barriers;  // one per slot
  int32_t stages;
  int32_t remaining;  // tiles of this warp that are not yet asked for
  LineWalker walker;
  int32_t page;
  int32_t write_slot = 0;
  int32_t read_slot = 0;
  uint32_t parity = 0;

  __device__ int32_t page_of_tile(const DecodeArgs& args) const {
    return args.tiles_shift >= 0 ? walker.at.tile >> args.tiles_shift
                                 : walker.at.tile / args.tiles_per_page;
  }
  __device__ void look_up(const DecodeArgs& args) {
    page =
        __ldg(args.page_table + walker.at.sequence * args.page_table_stride + page_of_tile(args));
  }
  /// The next tile holds tokens of this step.
  [[nodiscard]] __device__ bool is_fresh() const {
    return walker.at.tile + 1 >= walker.sequence.end_tile;
  }
  /// Asks for the next tile, if any.
  __device__ void fill(const DecodeArgs& args, int lane) {
    if (remaining > 0) {
      const int32_t in_page = walker.at.tile - page_of_tile(args) * args.tiles_per_page;
      const int32_t head = args.groups == 1 ? walker.at.item : walker.at.item / args.groups;
      const uint8_t* source =
          args.pages + page * args.page_bytes +
          static_cast<int64_t>(head * args.tiles_per_page + in_page) * Tile::kBytes;
      const uint32_t slot = slots + static_cast<uint32_t>(write_slot * Tile::kBytes);
#if __CUDA_ARCH__ >= 900
      if (lane == 0) {
        const uint32_t barrier = barriers + 8U * static_cast<uint32_t>(write_slot);
        ptx::fence_before_refill();
        ptx::barrier_arrive_expect(barrier, Tile::kBytes);
        ptx::bulk_copy(slot, source, Tile::kBytes, barrier, ptx::CacheHint::kEvictFirst);
      }
#else
      for (int i = lane * 16; i < Tile::kBytes; i += 512) {
        ptx::copy_async16(slot + static_cast<uint32_t>(i), source + i);
      }
#endif
      write_slot = write_slot + 1 == stages ? 0 : write_slot + 1;
      if (--remaining > 0) {
        walker.advance(args, kDecodeWarps);
        look_up(args);
      }
    }
#if __CUDA_ARCH__ < 900
    ptx::copy_commit();
#endif
  }
  /// Waits for the oldest tile; its shared memory.
  __device__ uint32_t wait() {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barriers + 8U * static_cast<uint32_t>(read_slot), parity);
#else
    if (stages == 2) {
      ptx::copy_wait<1>();
    } else {
      ptx::copy_wait<2>();
    }
    __syncwarp();
#endif
    return slots + static_cast<uint32_t>(read_slot * Tile::kBytes);
  }
  /// The tile has been read by all lanes; its slot takes the next one.
  __device__ void release(const DecodeArgs& args, int lane) {
    __syncwarp();
    if (++read_slot == stages) {
      read_slot = 0;
      parity ^= 1U;
    }
    fill(args, lane);
  }
};

}  // namespace nibble::cuda
