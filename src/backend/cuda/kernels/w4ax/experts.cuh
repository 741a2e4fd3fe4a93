#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/int_blocks.h"
#include "backend/cuda/kernels/w4ax/piece.cuh"
#include "backend/cuda/kernels/w4ax/sm80.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_s4.cuh"
#include "backend/cuda/ptx/mma_s8.cuh"

// The experts of a layer in blocks of 4 and 8 bits, for sm_80 and up: a block of four warps
// multiplies the rows of a tile by 128 channels of its expert, a piece of 32 for each warp. Blocks
// of 4 bits are products of INT4 where GPUs have them. Copies of all stages but one are under way
// while one is multiplied, as experts of few rows wait for memory alone.
namespace nibble::cuda {

/// kTokens: the most rows of a tile. kResident: blocks that a multiprocessor shall have registers
/// for.
template <int kTokens_, int kStages_, int kResident_>
struct W4AxExpertsTile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kResident = kResident_;
};

inline constexpr int kExpertThreads = 128;
inline constexpr int kExpertChannels = 128;  // of a block

struct W4AxExpertsArgs {
  const uint8_t* packed = nullptr;  // of the first expert
  int64_t expert_bytes = 0;         // to the next one's
  const uint8_t* x = nullptr;       // [slots, k]
  const float* x_scales = nullptr;
  int64_t x_scale_stride = 0;
  ExpertBlocks blocks;
  const float* bias = nullptr;  // [experts, n]
  void* y = nullptr;
  int64_t y_stride = 0;
  GemmResult result = GemmResult::kBf16;
  const ExpertTile* tiles = nullptr;  // null: the tiles of m rows of one matrix
  const int32_t* tile_count = nullptr;
  bool beside = false;  // GroupedLaunch::beside
  int m = 0, n = 0, k = 0;
  int row_pieces = 0;
  int piece_blocks = 0;  // pieces of 32 rows, those that fill K up too
};

/// A stage of shared memory: a piece for each warp, x [tokens][128], and their scales
/// [blocks of K][tokens].
template <typename Form, typename Tile>
struct W4AxExpertsStage {
  static constexpr int kPieces = 4 * Form::kPieceBytes;
  static constexpr int kX = (kPieces + 127) / 128 * 128;
  static constexpr int kScales = kX + Tile::kTokens * 128;
  static constexpr int kScaleCount = Form::kSubs * Tile::kTokens;
  static constexpr int kBytes = (kScales + 4 * kScaleCount + 127) / 128 * 128;
};

/// What a thread copies of the K blocks of a tile, one after the other. Rows beyond the tile's, and
/// what lies beyond K, become zeros: such copies read nothing, wherever they point.
template <typename Form, typename Tile>
class W4AxExpertsCopies {
 public:
  __device__ __forceinline__ W4AxExpertsCopies(const W4AxExpertsArgs& args, const ExpertTile& tile)
      : rows_(tile.rows), k_(args.k), scale_stride_(args.x_scale_stride) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    // Channels beyond the last piece are not stored.
    const int piece = min(static_cast<int>(blockIdx.x) * 4 + warp, args.row_pieces - 1);
    piece_ = args.packed + tile.expert * args.expert_bytes +
             int64_t{piece} * args.piece_blocks * Form::kPieceBytes + lane * 16;
    x_ = args.x + int64_t{tile.first + thread / 8} * args.k + thread % 8 * 16;
    scales_ = args.x_scales + tile.first + thread % Tile::kTokens +
              thread / Tile::kTokens * scale_stride_;
  }

  /// Those of the next one, `block`, to a stage.
  __device__ __forceinline__ void start(int block, uint32_t stage) {
    const int thread = static_cast<int>(threadIdx.x);
    copy_piece(stage + (thread >> 5) * Form::kPieceBytes, thread & 31);
    copy_x(block, stage + Stage::kX, thread);
    copy_scales(stage + Stage::kScales, thread);
  }

 private:
  using Stage = W4AxExpertsStage<Form, Tile>;
  static constexpr int kXRows = kExpertThreads / 8;               // of x at once
  static constexpr int kBlocks = kExpertThreads / Tile::kTokens;  // whose scales are copied at once

  __device__ __forceinline__ void copy_piece(uint32_t to, int lane) {
    constexpr int kChunks = Form::kPieceBytes / 16;
#pragma unroll
    for (int i = 0; i < kChunks / 32; ++i) {
      ptx::copy_async16(to + lane * 16 + i * 512, piece_ + i * 512);
    }
    if (lane < kChunks % 32) {
      ptx::copy_async16(to + lane * 16 + kChunks / 32 * 512, piece_ + kChunks / 32 * 512);
    }
    piece_ += Form::kPieceBytes;
  }

  __device__ __forceinline__ void copy_x(int block, uint32_t to, int thread) {
    const int row = thread / 8, chunk = thread % 8;
    const int rows = block * 128 + chunk * 16 < k_ ? rows_ : 0;
    const uint32_t place = to + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < (Tile::kTokens + kXRows - 1) / kXRows; ++i) {
      if (Tile::kTokens >= kXRows || row < Tile::kTokens) {
        ptx::copy_async16(place + i * kXRows * 128, x_ + i * kXRows * int64_t{k_},
                          row + i * kXRows < rows ? 16 : 0);
      }
    }
    x_ += 128;
  }

  __device__ __forceinline__ void copy_scales(uint32_t to, int thread) {
    const uint32_t valid = thread % Tile::kTokens < rows_ ? 4 : 0;
#pragma unroll
    for (int i = 0; i < (Form::kSubs + kBlocks - 1) / kBlocks; ++i) {
      if (Form::kSubs >= kBlocks || thread < Stage::kScaleCount) {
        ptx::copy_async4(to + (thread + i * kExpertThreads) * 4,
                         scales_ + i * kBlocks * scale_stride_, valid);
      }
    }
    scales_ += Form::kSubs * scale_stride_;
  }

  int rows_, k_;
  int64_t scale_stride_;
  const uint8_t *piece_ = nullptr, *x_ = nullptr;
  const float* scales_ = nullptr;
};

/// Sums of a warp's 32 channels with the rows of a tile.
template <typename Form, int kTokens>
class W4AxExpertsSums {
 public:
  /// One K block: its stage and a bit for each 32 channels, 1 for 8 bits.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t bits) {
    stage_ = stage;
    load_words();
    if constexpr (!sm80::kHasInt4) {  // no precision changes what is done
      if constexpr (Form::kSubs == 1) {
        add_blocks<0, 4, false>();
      } else {
        add_blocks<0, 2, false>();
        add_blocks<2, 2, false>();
      }
    } else {
      of_block<0>(bits);
      if constexpr (Form::kSubs > 1) {
        of_block<kSteps>(bits);
      }
      if constexpr (Form::kSubs > 2) {
        of_block<2 * kSteps>(bits);
        of_block<3 * kSteps>(bits);
      }
    }
  }

  __device__ __forceinline__ void store(const W4AxExpertsArgs& args, const ExpertTile& tile) const;

 private:
  using Stage = W4AxExpertsStage<Form, W4AxExpertsTile<kTokens, 1, 1>>;
  static constexpr int kOctets = kTokens / 8;
  static constexpr int kSteps = 4 / Form::kSubs;  // of 32 of K, of a block

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x & 31); }
  __device__ __forceinline__ uint32_t piece() const {
    return stage_ + (threadIdx.x >> 5) * Form::kPieceBytes;
  }
  __device__ __forceinline__ void load_words() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const W4AxWords fetched = W4AxWords::fetch(piece(), h, lane());
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words_[h][4 * i] = fetched.halves[i].x;
        words_[h][4 * i + 1] = fetched.halves[i].y;
        words_[h][4 * i + 2] = fetched.halves[i].z;
        words_[h][4 * i + 3] = fetched.halves[i].w;
      }
    }
  }

  // Two words of eight rows for each of kCount steps.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void load_x(int octet, uint32_t (&b)[kCount][2]) const {
    const int row = lane() & 7;
#pragma unroll
    for (int pair = kFirst / 2; pair < (kFirst + kCount + 1) / 2; ++pair) {
      uint32_t v[4];
      const int chunk = 4 * pair + (lane() >> 3);
      ptx::load_matrix4(v, stage_ + Stage::kX + (octet * 8 + row) * 128 + ((chunk ^ row) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = 2 * pair + i / 2 - kFirst;
        if (step >= 0 && step < kCount) {
          b[step][i % 2] = v[i];
        }
      }
    }
  }

  // d += products of kCount steps from kFirst on, of INT4, or of INT8, which are 16 times as large.
  template <int kFirst, int kCount, bool kFour>
  __device__ __forceinline__ void products(int h, const uint32_t (*b)[2], int32_t (&d)[4]) const {
    if constexpr (!kFour) {
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        const uint32_t first = words_[h][2 * (kFirst + s)];
        const uint32_t second = words_[h][2 * (kFirst + s) + 1];
        const uint32_t a[4] = {(first << 4) & 0xf0f0f0f0U, first & 0xf0f0f0f0U,
                               (second << 4) & 0xf0f0f0f0U, second & 0xf0f0f0f0U};
        ptx::warp_mma_s8(d, a, b[s]);
      }
    } else if constexpr (kCount == 1) {
      const uint32_t first = words_[h][2 * kFirst], second = words_[h][2 * kFirst + 1];
      const uint32_t a[2] = {sm80::w4ax_narrow(first, second),
                             sm80::w4ax_narrow(first >> 4, second >> 4)};
      ptx::warp_mma_s4_half(d, a, sm80::w4ax_narrow(b[0][0], b[0][1]));
    } else {
#pragma unroll
      for (int s = 0; s < kCount; s += 2) {
        const uint32_t* word = words_[h] + 2 * (kFirst + s);
        const uint32_t a[4] = {
            sm80::w4ax_narrow(word[0], word[1]), sm80::w4ax_narrow(word[0] >> 4, word[1] >> 4),
            sm80::w4ax_narrow(word[2], word[3]), sm80::w4ax_narrow(word[2] >> 4, word[3] >> 4)};
        const uint32_t narrow[2] = {sm80::w4ax_narrow(b[s][0], b[s][1]),
                                    sm80::w4ax_narrow(b[s + 1][0], b[s + 1][1])};
        ptx::warp_mma_s4(d, a, narrow);
      }
    }
  }

  // On GPUs with INT4, the block that begins at a step.
  template <int kFirst>
  __device__ __forceinline__ void of_block(uint32_t bits) {
    if (bits >> kFirst & 1U) {
      add_blocks<kFirst, kSteps, false>();
    } else {
      add_blocks<kFirst, kSteps, true>();
    }
  }

  // Adds the sums of the blocks in kCount steps from kFirst on, each in the order of K.
  template <int kFirst, int kCount, bool kFour>
  __device__ __forceinline__ void add_blocks() {
    constexpr int kBlocks = kCount / kSteps, kSub = kFirst / kSteps;
    float2 w[kBlocks][2];  // scales of two channels
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int sub = kSub + i / 2, h = i % 2;
      w[i / 2][h] = w4ax_scales(
          ptx::load_shared4(piece() + Form::kCodeBytes + sub * 64 + h * 32 + (lane() >> 2) * 4));
    }
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      uint32_t b[kCount][2];
      load_x<kFirst, kCount>(octet, b);
      add_block<kFirst, kFour>(octet, b, w[0]);
      if constexpr (kBlocks > 1) {
        add_block<kFirst + kSteps, kFour>(octet, b + kSteps, w[kBlocks - 1]);
      }
    }
  }
  template <int kFirst, bool kFour>
  __device__ __forceinline__ void add_block(int octet,
                                            const uint32_t (*b)[2],
                                            const float2 (&w)[2]) {
    const uint2 x = ptx::load_shared8(stage_ + Stage::kScales + kFirst / kSteps * (kTokens * 4) +
                                      octet * 32 + (lane() & 3) * 8);
    const float x0 = __uint_as_float(x.x), x1 = __uint_as_float(x.y);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int32_t d[4] = {};
      products<kFirst, kSteps, kFour>(h, b, d);
      if constexpr (kFour) {
#pragma unroll
        for (int32_t& sum : d) {
          sum *= 16;
        }
      }
      auto& to = v_[h][octet];
      to[0] = w4ax_add(d[0], w[h].x, x0, to[0]);
      to[1] = w4ax_add(d[1], w[h].x, x1, to[1]);
      to[2] = w4ax_add(d[2], w[h].y, x0, to[2]);
      to[3] = w4ax_add(d[3], w[h].y, x1, to[3]);
    }
  }

  uint32_t stage_ = 0;
  uint32_t words_[2][8];
  float v_[2][kOctets][4] = {};  // [16 channels][8 rows][register]
};

/// Two neighbouring channels of a row: y as it becomes, of which `both` are there.
__device__ __forceinline__ void store_two(const W4AxExpertsArgs& args,
                                          int64_t index,
                                          float2 y,
                                          bool both) {
  if (args.result == GemmResult::kBf16) {
    auto* to = static_cast<__nv_bfloat16*>(args.y) + index;
    if (both && index % 2 == 0) {
      *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(y.x, y.y);
    } else {
      to[0] = __float2bfloat16_rn(y.x);
      if (both) {
        to[1] = __float2bfloat16_rn(y.y);
      }
    }
    return;
  }
  auto* to = static_cast<float*>(args.y) + index;
  const bool adds = args.result == GemmResult::kAddF32;
  if (both && index % 2 == 0) {
    auto* two = reinterpret_cast<float2*>(to);
    const float2 there = adds ? *two : float2{};
    *two = adds ? float2{__fadd_rn(y.x, there.x), __fadd_rn(y.y, there.y)} : y;
  } else {
    to[0] = adds ? __fadd_rn(y.x, to[0]) : y.x;
    if (both) {
      to[1] = adds ? __fadd_rn(y.y, to[1]) : y.y;
    }
  }
}

template <typename Form, int kTokens>
__device__ __forceinline__ void W4AxExpertsSums<Form, kTokens>::store(
    const W4AxExpertsArgs& args, const ExpertTile& tile) const {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const float* bias = args.bias == nullptr ? nullptr : args.bias + int64_t{tile.expert} * args.n;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row =
        static_cast<int>(blockIdx.x) * kExpertChannels + warp * 32 + 16 * h + 2 * (lane() >> 2);
    if (row >= args.n) {
      continue;
    }
    const bool both = row + 1 < args.n;
    float2 add{};
    if (bias != nullptr) {
      add = {bias[row], both ? bias[row + 1] : 0.0F};
    }
#pragma unroll
    for (int at = 0; at < 2 * kOctets; ++at) {
      const int octet = at / 2, i = at % 2;
      const int within = 8 * octet + 2 * (lane() & 3) + i;
      if (within >= tile.rows) {
        continue;
      }
      const int64_t token = int64_t{tile.first} + within;
      float2 y = {v_[h][octet][i], v_[h][octet][2 + i]};
      if (bias != nullptr) {
        y = {__fadd_rn(y.x, add.x), __fadd_rn(y.y, add.y)};
      }
      store_two(args, token * args.y_stride + row, y, both);
    }
  }
}

/// Of a K block, where products depend on them.
__device__ __forceinline__ uint32_t w4ax_bits(const uint8_t* masks, int block) {
  return sm80::kHasInt4 ? __ldg(masks + block) : 0U;
}

template <typename Form, typename Tile>
__device__ __forceinline__ void multiply_expert_tile(const W4AxExpertsArgs& args,
                                                     const ExpertTile& tile,
                                                     uint32_t shared) {
  constexpr int kBytes = W4AxExpertsStage<Form, Tile>::kBytes, kStages = Tile::kStages;
  const int blocks = (args.k + 127) / 128;
  W4AxExpertsCopies<Form, Tile> copies(args, tile);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < blocks) {
      copies.start(i, shared + i * kBytes);
    }
    ptx::copy_commit();
  }
  const uint8_t* masks =
      args.blocks.each != nullptr ? args.blocks.each[tile.expert].masks : args.blocks.all.masks;
  uint32_t bits = w4ax_bits(masks, 0);
  W4AxExpertsSums<Form, Tile::kTokens> sums;
  uint32_t stage = shared, next = shared + (kStages - 1) * kBytes;
  const uint32_t end = shared + kStages * kBytes;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    ptx::copy_wait<kStages - 2>();
    __syncthreads();  // the block has come for all, and all have left the one before
    if (block + kStages - 1 < blocks) {
      copies.start(block + kStages - 1, next);
    }
    ptx::copy_commit();
    const uint32_t ahead = w4ax_bits(masks, min(block + 1, blocks - 1));
    sums.multiply(stage, bits);
    bits = ahead;
    next = stage;
    stage = stage + kBytes == end ? shared : stage + kBytes;
  }
  sums.store(args, tile);
}

/// A row of the grid has the tiles from its own on, as many apart as there are rows.
template <typename Form, typename Tile>
__global__ __launch_bounds__(kExpertThreads,
                             Tile::kResident) void w4ax_experts(const W4AxExpertsArgs args) {
  extern __shared__ __align__(128) uint8_t stages[];
  const uint32_t shared = ptx::shared_address(stages);
  // What it is beside began when it had seen all that both read. Whoever waits for this launch
  // waits for both.
  if (!args.beside) {
    ptx::wait_for_predecessor();
  }
  ptx::allow_successor();
  const int count =
      args.tiles != nullptr ? *args.tile_count : (args.m + Tile::kTokens - 1) / Tile::kTokens;
  for (int i = static_cast<int>(blockIdx.y); i < count; i += static_cast<int>(gridDim.y)) {
    const int first = i * Tile::kTokens;
    const ExpertTile tile = args.tiles != nullptr
                                ? args.tiles[i]
                                : ExpertTile{0, first, min(Tile::kTokens, args.m - first)};
    if (tile.rows > 0) {
      multiply_expert_tile<Form, Tile>(args, tile, shared);
      __syncthreads();  // the next tile's copies begin when all have left the last block
    }
  }
  if (args.beside) {
    ptx::wait_for_predecessor();
  }
}

}  // namespace nibble::cuda
