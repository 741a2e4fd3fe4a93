#pragma once

// Scores of one query row's heads and a tile of the cache, by one warp, for attention/decode.cuh.

#include "backend/cuda/kernels/attention/ring.cuh"

namespace nibble::cuda {

/// q as the column operand, and its row sums in units of codes.
template <typename Tile, int kColumns>
struct DecodeQuery {
  uint32_t b[Tile::kSteps][kColumns / 8][2];
  float sum[kColumns / 8][2];

  /// `q`: first of `heads` rows [head_dim], in shared memory or not; columns past them are zero.
  template <bool kShared = false>
  __device__ void load(const uint16_t* q, int heads, int lane) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const int head = n * 8 + lane / 4;
      const uint16_t* row = head < heads ? q + head * Tile::kHeadDim : nullptr;
      float own = 0.0F;
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        uint32_t pairs[Tile::kPairs];
        load_query_chunk<Tile, kShared>(row, chunk, lane % 4, pairs, own);
#pragma unroll
        for (int p = 0; p < Tile::kPairs; ++p) {
          const int pair = chunk * Tile::kPairs + p;
          b[pair / 2][n][pair % 2] = pairs[p];
        }
      }
      if constexpr (Tile::kInteger) {
        own += __shfl_xor_sync(~0U, own, 1);
        own += __shfl_xor_sync(~0U, own, 2);
        own *= Tile::kCodeUnit;
        sum[n][0] = __shfl_sync(~0U, own, lane % 4 * 8);
        sum[n][1] = __shfl_sync(~0U, own, lane % 4 * 8 + 4);
      }
    }
  }
};

/// q in the steps of a tile's channels of K, and what the channels' offsets add to all scores of a
/// column, in units of codes.
template <typename Tile, int kColumns>
struct ChannelQuery {
  static constexpr int kTiles = kColumns / 8;
  uint32_t b[Tile::kSteps][kTiles][2];
  float offset[kTiles][4] = {};

  __device__ __forceinline__ ChannelQuery(uint32_t parameters,
                                          const DecodeQuery<Tile, kColumns>& query,
                                          int t) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const ChannelWords<Tile::kHeadDim> words(parameters, chunk, t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * chunk + half;
        const uint32_t even = words.offsets[2 * half], odd = words.offsets[2 * half + 1];
        const uint32_t a[4] = {even, even, odd, odd};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint32_t(&q)[2] = query.b[step][n];
          const uint32_t whole[2] = {q[0], ptx::multiply_f16x2(q[1], kSixteens)};
          warp_mma<Tile>(offset[n], a, whole);
          b[step][n][0] = ptx::multiply_f16x2(q[0], words.scales[2 * half]);
          b[step][n][1] = ptx::multiply_f16x2(q[1], words.scales[2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (float(&sums)[4] : offset) {
#pragma unroll
      for (float& sum : sums) {
        sum *= Tile::kCodeUnit;
      }
    }
  }
};

/// Scores as tile_scores() has them of a tile's keys as they are.
///   keys  residual_tile()
///   q     first of `heads` rows [kHeadDim] bf16
template <typename Tile, int kColumns>
__device__ __forceinline__ void residual_scores(
    const uint8_t* keys,
    const uint16_t* q,
    int heads,
    int lane,
    float (&scores)[Tile::kTokens / 16][kColumns / 8][4]) {
  constexpr int kGroups = Tile::kTokens / 16;
  constexpr int kTiles = kColumns / 8;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[group][n][i] = 0.0F;
      }
    }
  }
#pragma unroll 2
  for (int chunk = 0; chunk < Tile::kHeadDim / 32; ++chunk) {
    uint4 own[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int head = n * 8 + g;
      own[n] = row_words(head < heads ? q + head * Tile::kHeadDim : nullptr, chunk, t);
    }
    uint4 rows[kGroups][2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[group][half] = key_words<Tile::kHeadDim>(keys, group * 16 + half * 8 + g, chunk, t);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint4 low = rows[group][0], high = rows[group][1];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y};
      const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::warp_mma_bf16(scores[group][n], first, {own[n].x, own[n].y});
        ptx::warp_mma_bf16(scores[group][n], second, {own[n].z, own[n].w});
      }
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (float& score : scores[group][n]) {
        score *= Tile::kCodeUnit;
      }
    }
  }
}

/// scores [16-token group][n][i]: this lane's of the tile.
template <typename Tile, int kColumns>
__device__ __forceinline__ void tile_scores(uint32_t tile,
                                            const DecodeQuery<Tile, kColumns>& query,
                                            const LaneOffsets& offsets,
                                            int lane,
                                            float (&scores)[Tile::kTokens / 16][kColumns / 8][4]) {
  constexpr int kGroups = Tile::kTokens / 16;
  constexpr int kTiles = kColumns / 8;
  const auto channels = [&] {
    if constexpr (Tile::kChannelKeys) {
      return ChannelQuery<Tile, kColumns>(tile + 2 * Tile::kRowsBytes, query, lane % 4);
    } else {
      return 0;
    }
  }();
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float second[kTiles][4] = {};  // a chain of its own for odd steps where there is one group
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Tile::kChannelKeys) {
          scores[group][n][i] = channels.offset[n][i];
        } else {
          scores[group][n][i] = Tile::kStatic ? -kStaticMiddle * query.sum[n][i % 2] : 0.0F;
        }
      }
    }
    uint32_t words[2][Tile::kChunks];
    load_words<Tile, false>(tile + static_cast<uint32_t>(group * 16 * Tile::kRow), offsets, words);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = 2 * step + i / 2;
        a[i] =
            KvForm<Tile::kFormat>::key_pair(words[i % 2][pair / Tile::kPairs], pair % Tile::kPairs);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if constexpr (Tile::kChannelKeys) {
          warp_mma<Tile>(scores[group][n], a, channels.b[step][n]);
        } else {
          warp_mma<Tile>(kGroups == 1 && step % 2 == 1 ? second[n] : scores[group][n], a,
                         query.b[step][n]);
        }
      }
    }
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[group][n][i] += second[n][i];
        }
      }
    }
  }
  if constexpr (Tile::kHasScale && !Tile::kChannelKeys) {
    TileParameters<Tile> parameters;
    parameters.load(tile + 2 * Tile::kRowsBytes, lane / 4);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 8; ++i) {
      const float scale = parameters.scale(i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[i / 2][n][i % 2 * 2 + c];
          if constexpr (Tile::kHasOffset) {
            score = fmaf(score, scale, parameters.offset(i) * query.sum[n][c]);
          } else {
            score = fmaf(query.sum[n][c], -128.0F, score) * scale;
          }
        }
      }
    }
  }
}

/// Masks tokens outside of low..high-1 of a tile.
template <typename Tile, int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[Tile::kTokens / 16][kTiles][4],
                                            int low,
                                            int high,
                                            int g) {
#pragma unroll
  for (int i = 0; i < Tile::kTokens / 8; ++i) {
    const int token = i * 8 + g;
    const bool seen = token >= low && token < high;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[i / 2][n][i % 2 * 2 + c];
        score = seen ? score : -INFINITY;
      }
    }
  }
}

}  // namespace nibble::cuda
