#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/store.cuh"
#include "backend/cuda/kernels/gemm_sm90/tile.cuh"
#include "backend/cuda/kernels/w4ax/args.h"
#include "backend/cuda/kernels/w4ax/piece.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy_hint.cuh"
#include "backend/cuda/ptx/dependency.cuh"

// What the kernels of few and of many tokens have in common: the ring of copies and how a tile's
// sums pass from block to block.
namespace nibble::cuda {

/// Shared memory of a block, of a Tile that says kRows, kTokens, kDepth and kStages: in a
/// stage the pieces of a step, x as swizzled tiles of 128 bytes for each token, and the scales of
/// tokens in the blocks of K.
template <typename Form, typename Tile>
struct W4AxShared {
  static constexpr int kPieces = Tile::kRows / 32;
  static constexpr int kPiecesBytes = kPieces * Tile::kDepth * Form::kPieceBytes;
  static constexpr int kX = (kPiecesBytes + 1023) / 1024 * 1024;
  static constexpr int kXBytes = Tile::kTokens * 128;  // of one K block
  static constexpr int kScales = kX + Tile::kDepth * kXBytes;
  static constexpr int kScaleRows = Tile::kDepth * Form::kSubs;
  static constexpr int kScaleBytes = Tile::kTokens * 4;  // of one block
  static constexpr int kStageBytes = (kScales + kScaleRows * kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kCopiedBytes =
      kPiecesBytes + Tile::kDepth * kXBytes + kScaleRows * kScaleBytes;
  static constexpr int kBarriers = Tile::kStages * kStageBytes;  // full, then empty
  static constexpr int kEnd = kBarriers + 16 * Tile::kStages + 16;
};

/// Where a piece lies in a stage: those of the same rows side by side.
template <typename Form, typename Tile>
__device__ __forceinline__ uint32_t piece_place(uint32_t stage, int row, int block) {
  return stage + (row * Tile::kDepth + block) * Form::kPieceBytes;
}

// --- the copying warp, whose first lanes start copies: each takes a thread about 100 clocks, so
// that a stage has as few as can be ---

template <typename Form, typename Tile>
__device__ __forceinline__ void copy_pieces(const W4AxMaps& maps,
                                            const W4AxArgs& args,
                                            const GemmPart& part,
                                            int step,
                                            uint32_t stage,
                                            uint32_t barrier,
                                            int lane) {
  using Shared = W4AxShared<Form, Tile>;
  if (lane == 0) {
    ptx::barrier_arrive_expect(barrier, Shared::kCopiedBytes);
  }
  __syncwarp();
  const auto hint =
      args.schedule.token_tiles == 1 ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kNormal;
  const int piece = part.row_tile * Shared::kPieces;
  if (lane == 0) {
    ptx::tensor_copy(stage, maps.weights, 0, 2 * step * Tile::kDepth, piece, barrier, hint);
  }
}

template <typename Form, typename Tile>
__device__ __forceinline__ void copy_tokens(const W4AxMaps& maps,
                                            const GemmPart& part,
                                            int step,
                                            uint32_t stage,
                                            uint32_t barrier,
                                            int lane) {
  using Shared = W4AxShared<Form, Tile>;
  const int token = part.token_tile * Tile::kTokens;
  if (lane == 0) {
    ptx::tensor_copy(stage + Shared::kX, maps.x, 0, token, step * Tile::kDepth, barrier);
    ptx::tensor_copy(stage + Shared::kScales, maps.scales, token, step * Shared::kScaleRows,
                     barrier);
  }
}

template <typename Form, typename Tile>
__device__ __forceinline__ void fill_stages(const W4AxMaps& maps,
                                            const W4AxArgs& args,
                                            uint32_t base) {
  using Shared = W4AxShared<Form, Tile>;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const uint32_t full = base + Shared::kBarriers, empty = full + 8 * Tile::kStages;
  GemmPart part;
  {  // Weights of the first ring, then, when the predecessor has ended, its activations.
    ChainParts parts(args.schedule, static_cast<int>(blockIdx.x));
    int count = 0;
    while (count < Tile::kStages && parts.next(part)) {
      for (int step = part.begin; step < part.end && count < Tile::kStages; ++step, ++count) {
        copy_pieces<Form, Tile>(maps, args, part, step, base + count * Shared::kStageBytes,
                                full + 8 * count, lane);
      }
    }
  }
  ptx::wait_for_predecessor();
  ChainParts parts(args.schedule, static_cast<int>(blockIdx.x));
  RingPlace<Tile::kStages> place;
  int count = 0;
  while (parts.next(part)) {
    for (int step = part.begin; step < part.end; ++step, ++count) {
      const uint32_t stage = base + place.stage * Shared::kStageBytes;
      const uint32_t barrier = full + 8 * place.stage;
      if (count >= Tile::kStages) {
        ptx::barrier_wait_to_refill(empty + 8 * place.stage, place.parity ^ 1);
        copy_pieces<Form, Tile>(maps, args, part, step, stage, barrier, lane);
      }
      copy_tokens<Form, Tile>(maps, part, step, stage, barrier, lane);
      place.advance();
    }
  }
}

// --- sums that pass from block to block ---

/// Where a team of kThreads threads (number `team` of kTeams in its block) leaves kWords words of
/// 16 bytes of each thread, and takes over what the block before left.
template <int kThreads, int kTeams, int kWords>
struct ChainLink {
  uint4* own;
  const uint4* before;
  uint32_t* own_flag;
  uint32_t* flag_before;

  __device__ __forceinline__ ChainLink(const W4AxArgs& args, int team, int thread) {
    const int place = static_cast<int>(blockIdx.x) * kTeams + team;
    auto* words = static_cast<uint4*>(args.base.parts) + thread;
    own = words + static_cast<int64_t>(place) * kWords * kThreads;
    before = own - static_cast<int64_t>(kTeams) * kWords * kThreads;
    own_flag = args.base.counters + place;
    flag_before = own_flag - kTeams;
  }
  __device__ __forceinline__ void put(int i, const uint4& word) const {
    __stcg(own + i * kThreads, word);
  }
  [[nodiscard]] __device__ __forceinline__ uint4 get(int i) const {
    return __ldcg(before + i * kThreads);
  }
};

}  // namespace nibble::cuda
