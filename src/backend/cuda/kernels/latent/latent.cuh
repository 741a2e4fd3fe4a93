#pragma once

// Attention over cached latents of 512 + 64 numbers: what its kernels share, those of sm_90a above
// all. A row of the cache is read from memory once, for its score and as a value.
//
// A block walks along its share of the plan's line (attention/plan.cuh); what it does of one item,
// a segment, is a run of tiles for up to `columns` queries of one sequence: all heads of its rows
// are queries alike, numbered row by row.

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/latent.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "base/math.h"

namespace nibble::cuda {

constexpr int kLatentDim = 576;                        // of a row
constexpr int kLatentValues = 512;                     // of which are values
constexpr uint32_t kLatentGroup = 8 * 2 * kLatentDim;  // bytes of 8 tokens
constexpr uint32_t kLatentPiece = 2 * kLatentGroup;    // of 16 tokens: what is freed at once

/// Rows of a tile in shared memory, which are as the cache has them.
struct Bf16Rows {
  static constexpr uint32_t kGroup = kLatentGroup;
  static constexpr uint32_t kParamBytes = 0;  // of a row, which lie apart
  static constexpr uint32_t kNoParams = 0;    // four bytes of those of a row that is not there
};
/// In 8 bits: 512 codes, 64 numbers in bf16, and a scale in f32.
struct CodedRows {
  static constexpr uint32_t kGroup = 8 * (kLatentValues + 2 * (kLatentDim - kLatentValues));
  static constexpr uint32_t kParamBytes = 4;
  static constexpr uint32_t kNoParams = 0x3f800000;  // 1
};
/// In 4 bits: 512 codes, 64 numbers in bf16, and of four groups a scale and an offset in fp16.
struct Int4Rows {
  static constexpr uint32_t kGroup = 8 * (kLatentValues / 2 + 2 * (kLatentDim - kLatentValues));
  static constexpr uint32_t kParamBytes = 16;
  static constexpr uint32_t kNoParams = 0;
};

/// An item that several blocks have shared: first..first + parts - 1 have its parts.
struct SharedItem {
  int32_t row;  // the sequence's first of the step
  int32_t rows;
  int32_t first_query;
  int32_t first;
  int32_t parts;
  int32_t first_slot;  // of the first block; the others' are their first
};

constexpr int kMostBlocks = 288;  // that share the line

/// Those of a step, behind its plan.
struct SharedItems {
  int32_t count;
  int32_t together;  // not 0 if there are so few that warps share the parts of each
  SharedItem items[kMostBlocks];
};

struct LatentArgs {
  const uint16_t* q;
  int64_t q_stride;
  uint16_t* out;
  int64_t out_stride;
  const uint8_t* pages;
  int64_t page_bytes;
  int64_t params_at;  // in a page of coded rows
  const int32_t* page_table;
  int64_t page_table_stride;
  int32_t pieces_per_page;  // of 16 tokens
  int32_t heads;
  int32_t columns;
  int32_t tile_tokens;
  const int32_t* q_begin;
  float score_factor;
  ptx::CacheHint hint;  // of copies: whether other blocks read the same rows
  PlanView plan;
  SharedItems* shared;
  float* partial_sums;   // [2 grid][columns][kLatentValues]
  float2* partial_tops;  // [2 grid][columns]: top, total
  uint8_t* images;       // [sequences][line_items] of queries over rows in codes (queries.cuh)
  int32_t line_items;    // of a sequence on the line, at most
};

/// Items of a sequence on the line, at most.
[[nodiscard]] inline int32_t line_items(const LineForm& form) {
  return ceil_div(form.line_rows * form.ratio, form.columns);
}
[[nodiscard]] LatentArgs latent_args(const LatentLaunch& launch, const LineForm& form);
/// Lists the items that blocks share, behind the plan of the line.
cudaError_t list_shared(const LatentArgs& args, cudaStream_t stream);
/// Behind the kernel that has decoded: items that several of its blocks have shared become one, in
/// the order of the line.
cudaError_t merge_latent(const LatentArgs& args, const LaunchContext& context);

/// One item's run of tiles.
struct LatentSegment {
  int32_t sequence;
  int32_t row;   // the sequence's first of the step
  int32_t rows;  // of the sequence in the step
  int32_t kv_len;
  int32_t first_query;  // of the item, among rows * heads
  int32_t first_tile;
  int32_t end_tile;
  int32_t slot;  // of the partial result; -1: the segment is a whole item

  /// Queries of the item that there are.
  __device__ int32_t queries(const LatentArgs& args) const {
    return min(args.columns, rows * args.heads - first_query);
  }
  /// Tokens that a query of the item sees.
  __device__ int32_t seen(const LatentArgs& args, int32_t query) const {
    return kv_len - rows + 1 + (first_query + query) / args.heads;
  }
  __device__ const uint16_t* query(const LatentArgs& args, int32_t index) const {
    const int32_t at = first_query + index;
    return args.q + int64_t{row + at / args.heads} * args.q_stride + at % args.heads * kLatentDim;
  }
  __device__ uint16_t* result(const LatentArgs& args, int32_t index) const {
    const int32_t at = first_query + index;
    return args.out + int64_t{row + at / args.heads} * args.out_stride +
           at % args.heads * kLatentDim;
  }
};

/// The segments of a block's share of the line.
class LatentLine {
 public:
  __device__ explicit LatentLine(const LatentArgs& args) {
    const auto block = static_cast<int32_t>(blockIdx.x);
    const auto* from = reinterpret_cast<const int4*>(args.plan.starts + block);
    const int4 a = __ldcg(from);
    const int4 b = __ldcg(from + 1);
    const int4 c = __ldcg(from + 2);
    segment_.sequence = a.x;
    item_ = a.y;
    at_ = a.w;
    end_ = b.x;
    begin_ = at_;
    take(args, c, a.z);
  }
  [[nodiscard]] __device__ bool more() const { return at_ < end_; }
  [[nodiscard]] __device__ const LatentSegment& segment() const { return segment_; }

  __device__ void next(const LatentArgs& args) {
    at_ += segment_.end_tile - segment_.first_tile;
    if (!more()) {
      return;
    }
    ++item_;
    if (item_ * args.columns < segment_.rows * args.heads) {
      take(args, make_int4(0, tiles_, segment_.kv_len, segment_.row), 0);
      return;
    }
    item_ = 0;
    int4 next;
    do {
      ++segment_.sequence;
      next = __ldcg(reinterpret_cast<const int4*>(args.plan.sequences) + segment_.sequence);
    } while (next.y == 0);
    take(args, next, 0);
  }

 private:
  /// The segment from `tile` on of a sequence {0, tiles, kv_len, row}.
  __device__ void take(const LatentArgs& args, int4 sequence, int32_t tile) {
    if (!more()) {
      return;
    }
    tiles_ = sequence.y;
    segment_.kv_len = sequence.z;
    segment_.row = sequence.w;
    segment_.rows = __ldcg(args.q_begin + segment_.sequence + 1) - sequence.w;
    segment_.first_query = item_ * args.columns;
    segment_.first_tile = tile;
    segment_.end_tile = min(tiles_, tile + end_ - at_);
    const bool whole = tile == 0 && segment_.end_tile == tiles_;
    segment_.slot = whole ? -1 : 2 * static_cast<int32_t>(blockIdx.x) + (at_ == begin_ ? 0 : 1);
  }

  LatentSegment segment_;
  int32_t item_;
  int32_t tiles_;  // of the sequence
  int32_t begin_;
  int32_t at_;
  int32_t end_;
};

/// The one segment of a block of prefill: a whole item of a sequence with many rows.
class LatentBlock {
 public:
  __device__ explicit LatentBlock(const LatentArgs& args) {
    const auto index = static_cast<int32_t>(gridDim.y - 1 - blockIdx.y);  // long rows first
    if (index >= __ldcg(args.plan.prefill_count)) {
      return;
    }
    const int2 place = __ldcg(reinterpret_cast<const int2*>(args.plan.prefill) + index);
    const int4 sequence = __ldcg(reinterpret_cast<const int4*>(args.plan.sequences) + place.x);
    segment_.sequence = place.x;
    segment_.kv_len = sequence.z;
    segment_.row = sequence.w;
    segment_.rows = __ldcg(args.q_begin + place.x + 1) - sequence.w;
    segment_.first_query = place.y * args.heads + static_cast<int32_t>(blockIdx.x) * args.columns;
    const int32_t queries =
        min(segment_.queries(args), (place.y + kPrefillRows) * args.heads - segment_.first_query);
    more_ = queries > 0;
    segment_.first_tile = 0;
    segment_.end_tile =
        more_ ? (segment_.seen(args, queries - 1) + args.tile_tokens - 1) / args.tile_tokens : 0;
    segment_.slot = -1;
  }
  [[nodiscard]] __device__ bool more() const { return more_; }
  [[nodiscard]] __device__ const LatentSegment& segment() const { return segment_; }
  __device__ void next(const LatentArgs& /*args*/) { more_ = false; }

 private:
  LatentSegment segment_;
  bool more_ = false;
};

/// Operands in shared memory, rows of kDim numbers as the cache has its own (latent.h).
template <int kDim = kLatentDim>
struct LatentOperand {
  /// Numbers 16 step..+15 of all rows.
  static __device__ __forceinline__ uint64_t rows(uint32_t at, int step) {
    return describe(at + static_cast<uint32_t>(step / 4 * 1024 + step % 4 * 32), 16);
  }
  /// 16 rows from `at` on, numbers from 64 column on, which are contiguous.
  static __device__ __forceinline__ uint64_t values(uint32_t at, int column) {
    return describe(at + static_cast<uint32_t>(column) * 1024, 1024);
  }

 private:
  static __device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t leading) {
    constexpr uint64_t kGroup = kDim * 16;  // bytes of 8 rows
    return static_cast<uint64_t>((address & 0x3ffffU) >> 4) |
           (static_cast<uint64_t>(leading >> 4) << 16) | (kGroup >> 4 << 32) | (1ULL << 62);
  }
};

/// A ring of tiles in shared memory: each has a barrier that says that it has come, and kParts that
/// say that a part of it has been read and may be overwritten.
template <int kTokens, int kSlots, int kParts, typename Rows = Bf16Rows>
struct LatentRing {
  static constexpr int kTileTokens = kTokens;
  static constexpr int kPieces = kTokens / 16;
  static constexpr int kPiecesOfPart = kPieces / kParts;
  static constexpr uint32_t kBarriers = kSlots * (1 + kParts);
  static constexpr uint32_t kGroup = Rows::kGroup;  // bytes of 8 tokens
  static constexpr uint32_t kPiece = 2 * kGroup;
  static constexpr uint32_t kTileBytes = kPieces * kPiece;
  static constexpr uint32_t kParamBytes = 16 * Rows::kParamBytes;  // of a piece
  static constexpr uint32_t kNoParams = Rows::kNoParams;
  static constexpr uint32_t kParams = (kSlots * kPieces * kParamBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kBytes = kSlots * kTileBytes + kParams;  // a multiple of 1024
  uint32_t tiles;  // and behind them the parameters of coded rows
  uint32_t barriers;

  /// By one thread. Readers and writers: how many arrive to say that a part has been read, and
  /// that a tile has come.
  __device__ void init(uint32_t readers, uint32_t writers = 1) const {
    for (uint32_t i = 0; i < kBarriers; ++i) {
      ptx::barrier_init(barriers + 8 * i, i < kSlots ? writers : readers);
    }
  }
  [[nodiscard]] __device__ uint32_t tile(uint32_t index) const {
    return tiles + index % kSlots * kTileBytes;
  }
  /// Parameters of the tile's rows.
  [[nodiscard]] __device__ uint32_t params(uint32_t index) const {
    return tiles + kSlots * kTileBytes + index % kSlots * kPieces * kParamBytes;
  }
  [[nodiscard]] __device__ uint32_t full_of(uint32_t index) const {
    return barriers + 8 * (index % kSlots);
  }
  [[nodiscard]] __device__ uint32_t empty_of(uint32_t index, uint32_t part) const {
    return barriers + 8 * (kSlots + index % kSlots * kParts + part);
  }
  __device__ void wait_full(uint32_t index) const {
    ptx::barrier_wait(full_of(index), index / kSlots % 2);
  }
  __device__ void wait_empty(uint32_t index, uint32_t part) const {
    if (index >= kSlots) {
      ptx::barrier_wait_to_refill(empty_of(index, part), (index / kSlots - 1) % 2);
    }
  }
};

/// Frees the four parts of a tile one by one, as the warp's groups of products that read them end:
/// one group has been committed for each, the last ones of all.
template <typename Ring>
__device__ __forceinline__ void release_read_parts(const Ring& ring, uint32_t index, int lane) {
  const auto release = [&](uint32_t part) {
    if (lane == 0) {  // each warp's products end for themselves
      ptx::barrier_arrive(ring.empty_of(index, part));
    }
  };
  ptx::mma_wait<3>();
  release(0);
  ptx::mma_wait<2>();
  release(1);
  ptx::mma_wait<1>();
  release(2);
  ptx::mma_wait<0>();
  release(3);
}

/// The fetching warp: all tiles of the block's segments, in order. Tiles that hold none of the
/// step's own tokens do not wait for the kernels before.
template <typename Work, typename Ring>
__device__ __forceinline__ void fetch_latents(const LatentArgs& args, const Ring& ring, int lane) {
  constexpr int kPieces = Ring::kPieces;
  uint32_t index = 0;
  bool waited = false;
  for (Work work(args); work.more(); work.next(args)) {
    const LatentSegment segment = work.segment();
    const int32_t* const table = args.page_table + segment.sequence * args.page_table_stride;
    const auto page_of = [&](int32_t tile) {
      const int32_t piece = tile * kPieces + lane % kPieces;
      return __ldg(table + min(piece, (segment.kv_len - 1) / 16) / args.pieces_per_page);
    };
    const int32_t old = (segment.kv_len - segment.rows) / Ring::kTileTokens;  // tiles of before
    int32_t page = page_of(segment.first_tile);
    for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index) {
      if (!waited && tile >= old) {
        ptx::wait_for_predecessor();
        waited = true;
      }
      const int32_t pieces = min(kPieces, (segment.kv_len - tile * Ring::kTileTokens + 15) / 16);
      const uint8_t* const source = args.pages + page * args.page_bytes;
      const int32_t place = (tile * kPieces + lane % kPieces) % args.pieces_per_page;
      const int32_t next = tile + 1 < segment.end_tile ? page_of(tile + 1) : 0;
#pragma unroll
      for (int32_t piece = 0; piece < kPieces; ++piece) {
        // A part that gets nothing could be given back before a lane had looked: none waits for it.
        if (piece % Ring::kPiecesOfPart == 0 && piece < pieces) {
          ring.wait_empty(index, static_cast<uint32_t>(piece / Ring::kPiecesOfPart));
        }
        if (piece == 0 && lane == 0) {
          ptx::barrier_arrive_expect(ring.full_of(index), static_cast<uint32_t>(pieces) *
                                                              (Ring::kPiece + Ring::kParamBytes));
        }
        __syncwarp();
        if (lane == piece && piece < pieces) {
          ptx::bulk_copy(ring.tile(index) + static_cast<uint32_t>(piece) * Ring::kPiece,
                         source + place * int64_t{Ring::kPiece}, Ring::kPiece, ring.full_of(index),
                         args.hint);
          if constexpr (Ring::kParamBytes > 0) {
            ptx::bulk_copy(ring.params(index) + static_cast<uint32_t>(piece) * Ring::kParamBytes,
                           source + args.params_at + place * int64_t{Ring::kParamBytes},
                           Ring::kParamBytes, ring.full_of(index), args.hint);
          }
        }
      }
      page = next;
    }
  }
  if (!waited) {
    ptx::wait_for_predecessor();
  }
}

/// Asks for the segment's queries, as rows of an operand; those that are not there are zeros. By
/// 128 threads, who have to wait for their copies and make them visible.
template <int kQueries>
__device__ __forceinline__ void fetch_queries(const LatentArgs& args,
                                              const LatentSegment& segment,
                                              uint32_t to,
                                              int thread) {
  constexpr int kChunks = kLatentDim / 8;  // of a row, 16 bytes each
  const int32_t queries = segment.queries(args);
#pragma unroll 4
  for (int i = thread; i < kQueries * kChunks; i += 128) {
    const int query = i / kChunks;
    const int chunk = i % kChunks;
    const bool there = query < queries;
    const uint16_t* const from = segment.query(args, there ? query : 0) + chunk * 8;
    ptx::copy_async16(to + static_cast<uint32_t>(latent_offset(kLatentDim, query, chunk * 8)), from,
                      there ? 16 : 0);
  }
  ptx::copy_commit();
}

/// Makes the rows of a tile from `known` on zeros. By 128 threads.
template <typename Ring>
__device__ __forceinline__ void clear_rows(const Ring& ring,
                                           uint32_t index,
                                           int32_t known,
                                           int thread) {
  constexpr int kRowBytes = static_cast<int>(Ring::kGroup / 8);
  constexpr int kChunks = kRowBytes / 16;
  known = max(0, known);
  for (int i = thread + known * kChunks; i < Ring::kTileTokens * kChunks; i += 128) {
    ptx::store_shared16(ring.tile(index) + static_cast<uint32_t>(latent_place(
                                               kRowBytes, i / kChunks, i % kChunks * 16)),
                        make_uint4(0, 0, 0, 0));
  }
  if constexpr (Ring::kParamBytes > 0) {
    constexpr int kWords = static_cast<int>(Ring::kParamBytes / 16 / 4);
    for (int i = thread + known * kWords; i < Ring::kTileTokens * kWords; i += 128) {
      ptx::store_shared4(ring.params(index) + static_cast<uint32_t>(4 * i), Ring::kNoParams);
    }
  }
  ptx::fence_shared_to_async();
}

}  // namespace nibble::cuda
