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
  float* partial_sums;    // [2 grid][kColumns][head_dim]
  float2* partial_tops;   // [2 grid][kColumns]: top, total
  uint32_t* arrivals;     // [grid], zero
  AppendArgs append;      // of attention/decode_short.cuh: of the step's own tokens, or of none
  int32_t cluster_shift;  // of the same: log2 of the blocks of a cluster
};

constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeWarpsLog2 = 2;
static_assert(kDecodeWarps == 1 << kDecodeWarpsLog2);

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
  bool alone;      // a warp has a whole item alone; else all warps share each
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
    return {a.w, b.x, b.y, b.z, b.w != 0};
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

/// The segments of a block's share: what it has of one item after the other.
struct ShareSegments {
  LineWalker walker;   // where the segment begins
  int32_t begin, end;  // the share
  int32_t at;          // the segment's place on the line
  int32_t number;      // of segments before

  [[nodiscard]] __device__ bool more() const { return at < end; }
  /// Tiles of the segment.
  [[nodiscard]] __device__ int32_t count() const {
    return min(walker.sequence.end_tile - walker.at.tile, end - at);
  }
  __device__ void next(const DecodeArgs& args) {
    const int32_t passed = count();
    at += passed;
    ++number;
    if (more()) {
      walker.advance(args, passed);
    }
  }
  /// Where the item begins and ends on the line.
  [[nodiscard]] __device__ int32_t item_begin() const {
    return at - (walker.at.tile - walker.sequence.first_tile);
  }
  [[nodiscard]] __device__ int32_t item_end() const {
    return item_begin() + walker.sequence.end_tile - walker.sequence.first_tile;
  }
  [[nodiscard]] __device__ bool whole() const { return item_begin() >= begin && item_end() <= end; }
};

/// How warps may take a block's share.
enum class DecodeItems : uint8_t {
  kOfAllWarps,
  kAlone  // whole ones by one warp, where the plan says so
};

/// The tiles of a segment that a warp takes: first, first + step, ...
struct WarpTiles {
  int32_t first;
  int32_t step;

  /// Whole items are a warp's each where `alone` says so, in turns; all warps share the others.
  __device__ __forceinline__ WarpTiles(const ShareSegments& segments, bool alone, int32_t warp) {
    if (alone && segments.whole()) {
      first = segments.number % kDecodeWarps == warp ? 0 : segments.count();
      step = 1;
    } else {
      first = (warp - (segments.at - segments.begin)) & (kDecodeWarps - 1);
      step = kDecodeWarps;
    }
  }
};

/// A warp's ring of tiles. The page of the next tile is looked up a step ahead.
template <typename Tile, DecodeItems kItems>
struct TileRing {
  uint32_t slots;     // shared memory of this warp
  uint32_t barriers;  // one per slot
  int32_t stages;
  int32_t warp;
  bool planned_alone;      // as BlockShare
  ShareSegments segments;  // of the next tile; unless alone, its walker is at that tile
  int32_t index = 0;       // of the next tile in its segment, if alone
  int32_t remaining = 0;   // tiles of this warp that are not yet asked for; 1 for some, if alone
  int32_t page = 0;
  int32_t write_slot = 0;
  int32_t read_slot = 0;
  uint32_t parity = 0;

  [[nodiscard]] __device__ bool alone() const {
    return kItems == DecodeItems::kAlone && planned_alone;
  }
  /// To the warp's first tile.
  __device__ void start(const DecodeArgs& args) {
    if (alone()) {
      remaining = 1;
      index = WarpTiles(segments, true, warp).first;
      find(args);
      return;
    }
    remaining = (segments.end - segments.begin - warp + kDecodeWarps - 1) / kDecodeWarps;
    if (remaining > 0) {
      segments.walker.advance(args, warp);
      look_up(args);
    }
  }
  [[nodiscard]] __device__ int32_t tile() const { return segments.walker.at.tile + index; }
  [[nodiscard]] __device__ int32_t page_of_tile(const DecodeArgs& args) const {
    return args.tiles_shift >= 0 ? tile() >> args.tiles_shift : tile() / args.tiles_per_page;
  }
  /// The next tile holds tokens of this step.
  [[nodiscard]] __device__ bool is_fresh() const {
    return tile() + 1 >= segments.walker.sequence.end_tile;
  }
  /// Asks for the next tile, if any.
  __device__ void fill(const DecodeArgs& args, int lane) {
    if (remaining > 0) {
      const int32_t in_page = tile() - page_of_tile(args) * args.tiles_per_page;
      const int32_t item = segments.walker.at.item;
      const int32_t head = args.groups == 1 ? item : item / args.groups;
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
      step(args);
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

 private:
  __device__ void look_up(const DecodeArgs& args) {
    page = __ldg(args.page_table + segments.walker.at.sequence * args.page_table_stride +
                 page_of_tile(args));
  }
  /// To the warp's next tile.
  __device__ void step(const DecodeArgs& args) {
    if (alone()) {
      index += WarpTiles(segments, true, warp).step;
      find(args);
    } else if (--remaining > 0) {
      segments.walker.advance(args, kDecodeWarps);
      look_up(args);
    }
  }
  /// To the tile of the index, or, where the segment has none, to the warp's next one behind it.
  __device__ void find(const DecodeArgs& args) {
    while (index >= segments.count()) {
      segments.next(args);
      if (!segments.more()) {
        remaining = 0;
        return;
      }
      index = WarpTiles(segments, true, warp).first;
    }
    look_up(args);
  }
};

}  // namespace nibble::cuda
