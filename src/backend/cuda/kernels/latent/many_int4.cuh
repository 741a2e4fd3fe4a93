#pragma once

// Rows in 4 bits for latent attention with many queries (many_sm90.cuh). They are fetched as codes,
// of which numbers in fp16 are made, times their group's scale plus its offset, in shared memory,
// where both products read them: of 16 tokens as soon as those of the tile before have been read.
// Three warps beside the one that fetches do so, and the warpgroup that makes weights, which has
// nothing to do until a tile is there. Queries are fp16.

#include "backend/cuda/kernels/latent/int4.cuh"
#include "backend/cuda/kernels/latent/many_sums.cuh"
#include "backend/cuda/ptx/wgmma_f16.cuh"

namespace nibble::cuda {

class ManyInt4 : public ManyNumbers<ManyInt4> {
 public:
  static constexpr int kFetchRegisters = 64;
  static constexpr int kSumRegisters = 160;
  static constexpr int kOwnWideners = 3;   // warps that do nothing else
  static constexpr uint32_t kWriters = 7;  // warps that widen
  static constexpr uint32_t kReaders = kWriters;
  using Ring = LatentRing<kManyTokens, 1, 4>;
  using Fetched = LatentRing<kManyTokens, 2, 1, Int4Rows>;
  using Shared = ManyShared<ManyInt4>;
  using Queries = ScaledQueries<kManyQueries>;
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_f16(a, b); }
  static __device__ __forceinline__ void take_weigher_registers() {}

  __device__ ManyInt4(const LatentArgs& /*args*/, const Shared& shared, int thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4;
    scales_[0] = shared.query_place.scales[row];
    scales_[1] = shared.query_place.scales[row + 8];
  }

  /// What the warpgroup that makes weights does before a tile is there: widens half of it, a group
  /// of numbers each warp.
  static __device__ __forceinline__ void prepare(const Shared& shared,
                                                 uint32_t index,
                                                 int32_t known,
                                                 int thread) {
    shared.fetched.wait_full(index);
    const Widener widener(shared, index, {known, 0}, thread % 32);
    widener.widen_group(thread / 32);
    widener.end(thread % 32);
  }

  /// Scores of a tile: queries by rows.
  __device__ __forceinline__ void finish(const Shared& shared,
                                         uint32_t index,
                                         int /*thread*/,
                                         ManyScores& scores) const {
    const uint32_t tile = shared.ring.tile(index);
#pragma unroll
    for (float& score : scores) {
      score = 0.0F;
    }
    ptx::pin(scores);
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kLatentValues / 16; ++step) {
      ptx::mma_shared_f16<kManyTokens>(scores,
                                       LatentOperand<kLatentValues>::rows(shared.queries, step),
                                       LatentOperand<>::rows(tile, step));
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kManyTokens>(
          scores, QueryRope::rows(shared.queries + Queries::kRope, step),
          LatentOperand<>::rows(tile, kLatentValues / 16 + step));
    }
    ptx::mma_commit();
    ptx::mma_wait<0>();
    ptx::pin(scores);
#pragma unroll
    for (int e = 0; e < kManyTokens / 2; ++e) {
      scores[e] *= scales_[e >> 1 & 1];
    }
  }

  static __device__ __forceinline__ void multiply_values(float (&sums)[64],
                                                         uint64_t weights,
                                                         uint64_t values) {
    ptx::mma_shared_f16<128, true>(sums, weights, values);
  }

  /// Gives a segment's sums of 256 numbers out, those of a whole item times their factors. In the
  /// order in which rows are widened a lane has eight neighbouring ones of every 32.
  static __device__ __forceinline__ void give_sums(const LatentArgs& args,
                                                   const LatentSegment& segment,
                                                   const ManySums& sums,
                                                   const float (&factors)[2],
                                                   int half) {
    const int row =
        static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    const int column = half * 256 + static_cast<int>(threadIdx.x) % 4 * 8;
    const int32_t queries = segment.queries(args);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      if (query >= queries) {
        continue;
      }
#pragma unroll
      for (int chunk = 0; chunk < 256 / kInt4Chunk; ++chunk) {
        float own[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          own[i] = sums[chunk / 4][(chunk % 4 * 4 + i % 4) * 4 + 2 * r + i / 4];
        }
        const int number = column + chunk * kInt4Chunk;
        if (segment.slot < 0) {
          const auto pack = [&](float a, float b) {
            return ptx::pack_bf16(a * factors[r], b * factors[r]);
          };
          *reinterpret_cast<uint4*>(segment.result(args, query) + number) =
              make_uint4(pack(own[0], own[1]), pack(own[2], own[3]), pack(own[4], own[5]),
                         pack(own[6], own[7]));
        } else {
          const int64_t at = int64_t{segment.slot} * args.columns + query;
          auto* const out =
              reinterpret_cast<float4*>(args.partial_sums + at * kLatentValues + number);
          out[0] = make_float4(own[0], own[1], own[2], own[3]);
          out[1] = make_float4(own[4], own[5], own[6], own[7]);
        }
      }
    }
  }

  /// The warpgroup that fetches: a warp does, the others widen.
  template <typename Work>
  static __device__ __forceinline__ void fetch(const LatentArgs& args, const Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 - 12;
    if (warp == 0) {
      fetch_latents<Work>(args, shared.fetched, lane);
    } else {
      widen_segments<Work>(args, shared, warp - 1, lane);
    }
  }

 private:
  static constexpr int kPieces = kManyTokens / 16;
  static constexpr int kGroups = kLatentValues / kInt4Group;

  template <typename Work>
  static __device__ __forceinline__ void widen_segments(const LatentArgs& args,
                                                        const Shared& shared,
                                                        int warp,
                                                        int lane) {
    uint32_t index = 0;
    for (Work work(args); work.more(); work.next(args)) {
      const LatentSegment segment = work.segment();
      for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index) {
        shared.fetched.wait_full(index);
        const Widener widener(shared, index, {segment.kv_len - tile * kManyTokens, 1}, lane);
        widener.widen_in_turns(warp);
        widener.end(lane);
      }
    }
  }

  /// A lane of a warp that widens: at once 8 tokens by a group of 128 numbers, of which lane r + 8
  /// s has those of token r that 16 bytes of codes make.
  class Widener {
   public:
    struct Rows {
      int32_t known;  // of the tile; rows from this one on become zeros
      int half;       // of each piece's tokens: the warp's
    };
    __device__ __forceinline__
    Widener(const Shared& shared, uint32_t index, const Rows& rows, int lane)
        : shared_(shared), index_(index), known_(rows.known - lane % 8), half_(rows.half) {
      const auto row = static_cast<uint32_t>(lane % 8);
      const auto chunk = static_cast<uint32_t>(lane / 8);
      from_ = row * 128 + (chunk ^ row) * 16;
      to_ = chunk / 2 * 1024 + row * 128 + ((chunk % 2 * 4) ^ row) * 16;
    }

    /// A group of all pieces. While codes become numbers the next are on their way.
    __device__ __forceinline__ void widen_group(int group) const {
      Codes codes = load(0, group);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        Codes ahead = codes;
        if (piece + 1 < kPieces) {
          ahead = load(piece + 1, group);
        }
        wait_read(piece);
        store(piece, group, codes);
        codes = ahead;
      }
    }

    /// What is warp `warp`'s of kOwnWideners: of a piece's four groups one or two, in turns, and of
    /// every third piece the rotated numbers.
    __device__ __forceinline__ void widen_in_turns(int warp) const {
      int piece = 0;
      int group = warp;
      Codes codes = load(piece, group);
#pragma unroll 1
      while (piece < kPieces) {
        // Of a piece's groups a warp has the first of three, and the fourth with the first.
        const bool both = group == 0;
        const int next_piece = both ? piece : piece + 1;
        const int next_group = both ? kGroups - 1 : (warp + 2 * next_piece) % kOwnWideners;
        Codes ahead = codes;
        if (next_piece < kPieces) {
          ahead = load(next_piece, next_group);
        }
        if (group != kGroups - 1) {
          wait_read(piece);
        }
        if (group == 1) {
          copy(piece);
        }
        store(piece, group, codes);
        codes = ahead;
        piece = next_piece;
        group = next_group;
      }
    }

    /// The warp's part of the tile is there, and what it was made of has been read.
    __device__ __forceinline__ void end(int lane) const {
      ptx::fence_shared_to_async();
      __syncwarp();
      if (lane == 0) {
        ptx::barrier_arrive(shared_.ring.full_of(index_));
        ptx::barrier_arrive(shared_.fetched.empty_of(index_, 0));
      }
    }

   private:
    struct Codes {
      uint4 words;
      uint32_t line;  // scale and offset
    };

    /// Until the tile before has been read; what follows are no copies.
    __device__ __forceinline__ void wait_read(int piece) const {
      if (index_ > 0) {
        ptx::barrier_wait(shared_.ring.empty_of(index_, static_cast<uint32_t>(piece)),
                          (index_ - 1) % 2);
      }
    }

    [[nodiscard]] __device__ __forceinline__ Codes load(int piece, int group) const {
      const uint32_t line =
          ptx::load_shared4(shared_.fetched.params(index_) + from_ / 128 * 16 +
                            static_cast<uint32_t>(piece * 256 + half_ * 128 + group * 4));
      const uint4 words = ptx::load_shared16(
          shared_.fetched.tile(index_) + (from_ ^ static_cast<uint32_t>(group % 2 * 64)) +
          static_cast<uint32_t>(piece) * Fetched::kPiece +
          static_cast<uint32_t>(half_) * Fetched::kGroup + static_cast<uint32_t>(group / 2 * 1024));
      // A row that is not there has whatever the memory had.
      return {words, piece * 16 + half_ * 8 < known_ ? line : 0};
    }

    __device__ __forceinline__ void store(int piece, int group, const Codes& codes) const {
      const uint32_t words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
      const uint32_t scale = ptx::low_twice(codes.line);
      const uint32_t offset = ptx::high_twice(codes.line);
      uint32_t pairs[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        widen_int4(words[j], scale, offset, pairs[j]);
      }
      const uint32_t to = shared_.ring.tile(index_) + static_cast<uint32_t>(piece) * Ring::kPiece +
                          static_cast<uint32_t>(half_) * Ring::kGroup +
                          static_cast<uint32_t>(group * 2048);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::store_shared16(to + (to_ ^ static_cast<uint32_t>(16 * i)),
                            make_uint4(pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]));
      }
    }

    /// The rotated numbers of all of a piece's tokens, as they are.
    __device__ __forceinline__ void copy(int piece) const {
      const uint32_t from = shared_.fetched.tile(index_) +
                            static_cast<uint32_t>(piece) * Fetched::kPiece +
                            kLatentValues / 2 / 128 * 1024;
      const uint32_t to = shared_.ring.tile(index_) + static_cast<uint32_t>(piece) * Ring::kPiece +
                          kLatentValues / 64 * 1024;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto half = static_cast<uint32_t>(i / 2);
        const uint32_t place = from_ ^ static_cast<uint32_t>(i % 2 * 64);
        const uint4 stored = ptx::load_shared16(from + half * Fetched::kGroup + place);
        const bool there = piece * 16 + i / 2 * 8 < known_;
        ptx::store_shared16(to + half * Ring::kGroup + place,
                            there ? stored : make_uint4(0, 0, 0, 0));
      }
    }

    const Shared& shared_;
    uint32_t index_;
    int32_t known_;  // of the rows from the lane's first on
    int half_;
    uint32_t from_;  // where the lane's codes lie in 8 rows, and rotated numbers, on both sides
    uint32_t to_;    // where its numbers are to lie
  };

  float scales_[2];  // of the lane's queries
};

}  // namespace nibble::cuda
