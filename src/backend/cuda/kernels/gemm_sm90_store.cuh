#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/gemm_sm90_tile.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/memory.cuh"

// What follows the main loop of gemm_sm90.cuh: sums of tiles that several blocks shared are added,
// scaled and stored.
namespace nibble::cuda {

// Of one warpgroup of at most four; the numbers of barriers are constants, so that only these are
// taken.
__device__ __forceinline__ void sync_group(int group) {
  switch (group % 4) {
    case 0:
      return ptx::group_sync(1, 128);
    case 1:
      return ptx::group_sync(2, 128);
    case 2:
      return ptx::group_sync(3, 128);
    default:
      return ptx::group_sync(4, 128);
  }
}

// Four sums of a thread as a word of 16 bytes, and such a word added to four.
template <typename Sum>
__device__ __forceinline__ uint4 sum_word(const Sum* four) {
  return {__builtin_bit_cast(uint32_t, four[0]), __builtin_bit_cast(uint32_t, four[1]),
          __builtin_bit_cast(uint32_t, four[2]), __builtin_bit_cast(uint32_t, four[3])};
}
template <typename Sum>
__device__ __forceinline__ void add_word(Sum* four, const uint4& word) {
  four[0] += __builtin_bit_cast(Sum, word.x);
  four[1] += __builtin_bit_cast(Sum, word.y);
  four[2] += __builtin_bit_cast(Sum, word.z);
  four[3] += __builtin_bit_cast(Sum, word.w);
}

// Leaves this warpgroup's sums of a split tile in memory; the warpgroup that comes last gets true
// and the sums of all parts, added in the order of the blocks.
template <typename Codec, typename Tile>
__device__ __forceinline__ bool combine(
    ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const GemmPart& part,
    int own,
    int group,
    int thread,
    volatile uint32_t* flags) {
  using Sum = ptx::MmaSum<Codec::kType>;
  using Sum4 = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;
  constexpr int kWords = Tile::kTokens / 8;  // 16-byte words of a row block
  const GemmSchedule& schedule = args.schedule;
  const int first = schedule.block_of(part.split * schedule.steps);
  const int last = schedule.block_of((part.split + 1) * schedule.steps - 1);
  if (first == last) {
    return true;
  }
  // A block's run holds the end of one split tile, whole ones, and the start of another: where it
  // began before the tile, these sums are the start.
  const auto slot = [&](int block) {
    const int start = schedule.run_begin(block) < part.split * schedule.steps ? 1 : 0;
    return static_cast<Sum4*>(args.parts) +
           ((block * 2 + start) * Tile::kGroups + group) * (Tile::kBlocks * kWords * 128) + thread;
  };
  Sum4* mine = slot(own);
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      Sum4 word;
      word.x = sums[b][4 * i];
      word.y = sums[b][4 * i + 1];
      word.z = sums[b][4 * i + 2];
      word.w = sums[b][4 * i + 3];
      __stcg(mine + (b * kWords + i) * 128, word);
    }
  }
  sync_group(group);
  if (thread == 0) {
    uint32_t* counter = args.counters + part.split * Tile::kGroups + group;
    const bool done = ptx::add_acquire_release(counter, 1) == static_cast<uint32_t>(last - first);
    if (done) {
      *counter = 0;
    }
    flags[group] = done ? 1 : 0;
  }
  sync_group(group);
  if (flags[group] == 0) {
    return false;
  }
  // The order of integers does not matter, nor that of two numbers.
  const bool keeps = !std::is_same_v<Sum, float> || last - first == 1;
  if (!keeps) {
    clear(sums);
  }
  // Parts read at once, so that their latencies overlap.
  constexpr int kAtOnce = Tile::kBlocks * kWords <= 2 ? 4 : Tile::kBlocks * kWords <= 4 ? 2 : 1;
  for (int block = first; block <= last; block += kAtOnce) {
    Sum4 words[kAtOnce][Tile::kBlocks * kWords];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const bool added = block + p <= last && (!keeps || block + p != own);
      const Sum4* theirs = slot(block + p);
#pragma unroll
      for (int w = 0; w < Tile::kBlocks * kWords; ++w) {
        words[p][w] = added ? __ldcg(theirs + w * 128) : Sum4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
      for (int w = 0; w < Tile::kBlocks * kWords; ++w) {
        auto& own_sums = sums[w / kWords];
        const int i = w % kWords;
        own_sums[4 * i] += words[p][w].x;
        own_sums[4 * i + 1] += words[p][w].y;
        own_sums[4 * i + 2] += words[p][w].z;
        own_sums[4 * i + 3] += words[p][w].w;
      }
    }
  }
  return true;
}

// Scales and bias of a thread's channels, read while the products run.
template <int kBlocks>
struct ChannelTerms {
  float2 scale[kBlocks];
  float2 bias[kBlocks];
};

template <typename Codec, typename Tile>
__device__ __forceinline__ int first_channel(const GemmPart& part, int group, int thread, int b) {
  const int block = part.row_tile * Tile::kRowBlocks + group * Tile::kBlocks + b;
  return 64 * block + 16 * (thread >> 5) + 2 * ((thread & 31) >> 2);
}

template <typename Codec, typename Tile>
__device__ __forceinline__ ChannelTerms<Tile::kBlocks> load_terms(const GemmSm90Args& args,
                                                                  const GemmPart& part,
                                                                  int group,
                                                                  int thread) {
  ChannelTerms<Tile::kBlocks> terms;
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
    const int row = first_channel<Codec, Tile>(part, group, thread, b);
    const bool inside = row < args.n;
    const float* scales = args.weight_scales + (inside ? row : 0);  // filled up to whole blocks
    terms.scale[b] = float2{__ldg(scales), __ldg(scales + 1)};
    terms.bias[b] = float2{0.0F, 0.0F};
    if (args.bias != nullptr && inside) {
      terms.bias[b].x = __ldg(args.bias + row);
      terms.bias[b].y = row + 1 < args.n ? __ldg(args.bias + row + 1) : 0.0F;
    }
  }
  return terms;
}

// Scales of a thread's tokens; of small tiles, read while the products run.
template <int kTokens>
struct TokenTerms {
  static constexpr bool kEarly = kTokens <= 32;
  float scale[kEarly ? kTokens / 4 : 1];
};

template <typename Tile>
__device__ __forceinline__ TokenTerms<Tile::kTokens> load_terms(const GemmSm90Args& args,
                                                                const GemmPart& part,
                                                                int thread) {
  TokenTerms<Tile::kTokens> terms{};
  if constexpr (TokenTerms<Tile::kTokens>::kEarly) {
    const int token0 = part.token_tile * Tile::kTokens + 2 * (thread & 3);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 4; ++i) {
      const int token = token0 + 8 * (i / 2) + i % 2;
      terms.scale[i] = __ldcg(args.x_scales + min(token, args.m - 1));  // L1 may hold older ones
    }
  }
  return terms;
}

// How results leave: pairs of channels at once where n and the rows' distance are even.
template <GemmResult kResult, bool kPairs>
__device__ __forceinline__ void store_pair(void* y, bool both, float first, float second) {
  if constexpr (kResult == GemmResult::kBf16) {
    if constexpr (kPairs) {
      *static_cast<uint32_t*>(y) = ptx::pack_bf16(first, second);
    } else {
      auto* values = static_cast<__nv_bfloat16*>(y);
      values[0] = __float2bfloat16(first);
      if (both) {
        values[1] = __float2bfloat16(second);
      }
    }
  } else {
    constexpr bool kAdd = kResult == GemmResult::kAddF32;
    auto* values = static_cast<float*>(y);
    if constexpr (kPairs && kAdd) {
      ptx::add_pair(values, first, second);
    } else if constexpr (kPairs) {
      *static_cast<float2*>(y) = float2{first, second};
    } else {
      values[0] = first + (kAdd ? values[0] : 0.0F);
      if (both) {
        values[1] = second + (kAdd ? values[1] : 0.0F);
      }
    }
  }
}

// Calls f<result>().
template <typename F>
__device__ __forceinline__ void with_result(GemmResult result, const F& f) {
  if (result == GemmResult::kBf16) {
    f.template operator()<GemmResult::kBf16>();
  } else if (result == GemmResult::kF32) {
    f.template operator()<GemmResult::kF32>();
  } else {
    f.template operator()<GemmResult::kAddF32>();
  }
}

template <typename Codec, typename Tile, GemmResult kResult, bool kPairs>
__device__ __forceinline__ void store_tile(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& token_terms,
    const GemmPart& part,
    int group,
    int thread) {
  // Scales of tokens read before the stores that follow: their latencies overlap.
  constexpr int kAtOnce = Tile::kTokens < 32 ? Tile::kTokens / 4 : 8;
  constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
  const int token0 = part.token_tile * Tile::kTokens + 2 * (thread & 3);
  const int tokens = args.m - token0;
  const int64_t stride = args.y_stride * kBytes;
  const int row0 = first_channel<Codec, Tile>(part, group, thread, 0);
  uint8_t* y =
      static_cast<uint8_t*>(args.y) + token0 * stride + static_cast<int64_t>(row0) * kBytes;
#pragma unroll
  for (int start = 0; start < Tile::kTokens / 4; start += kAtOnce) {
    float x_scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if constexpr (TokenTerms<Tile::kTokens>::kEarly) {
        x_scales[i] = token_terms.scale[start + i];
      } else {
        const int token = token0 + 8 * ((start + i) / 2) + i % 2;
        x_scales[i] = __ldcg(args.x_scales + min(token, args.m - 1));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = 8 * ((start + i) / 2) + i % 2;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        const int at = 4 * ((start + i) / 2) + i % 2;
        const float scale = Codec::kScale * x_scales[i];
        const float first = static_cast<float>(sums[b][at]) * (terms.scale[b].x * scale);
        const float second = static_cast<float>(sums[b][at + 2]) * (terms.scale[b].y * scale);
        if (token < tokens && row0 + 64 * b < args.n) {
          store_pair<kResult, kPairs>(y + token * stride + 64 * kBytes * b,
                                      row0 + 64 * b + 1 < args.n, first + terms.bias[b].x,
                                      second + terms.bias[b].y);
        }
      }
    }
  }
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void store(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& tokens,
    const GemmPart& part,
    int group,
    int thread) {
  const bool pairs = args.n % 2 == 0 && args.y_stride % 2 == 0;
  const auto with = [&]<GemmResult kResult>() {
    if (pairs) {
      store_tile<Codec, Tile, kResult, true>(sums, args, terms, tokens, part, group, thread);
    } else {
      store_tile<Codec, Tile, kResult, false>(sums, args, terms, tokens, part, group, thread);
    }
  };
  with_result(args.result, with);
}

// The sums of a tile whose steps the blocks of a cluster shared: each leaves its own in its ring,
// which is used up, and adds and stores a part of all of them.
template <typename Codec, typename Tile, GemmResult kResult>
__device__ __forceinline__ void store_cluster(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const GemmPart& part,
    int group,
    int thread,
    uint32_t base) {
  using Sum = ptx::MmaSum<Codec::kType>;
  constexpr int kOctets = Tile::kTokens / 8;
  constexpr int kWords = Tile::kBlocks * kOctets;  // 16-byte words of a thread: 2 tokens' pairs
  constexpr int kChunk = kWords < 16 ? (kWords + 1) / 2 : 8;  // of them in registers
  constexpr int kPeers = kChunk < 4 ? 4 : 8 / kChunk;         // read at once
  constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
  static_assert(kWords * 2048 * Tile::kGroups <= GemmShared<Codec, Tile>::kBarriers);
  const uint32_t mine = base + (group * kWords * 128 + thread) * 16;
  ptx::group_sync(5, 128 * Tile::kGroups);  // both warpgroups have left the ring
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    ptx::store_shared16(mine + w * 2048, sum_word(sums[w / kOctets] + 4 * (w % kOctets)));
  }
  ptx::cluster_arrive();
  const int blocks = args.schedule.cluster;
  const int share = (kWords + blocks - 1) / blocks;
  const int own = static_cast<int>(ptx::cluster_rank()) * share;
  const int end = min(own + share, kWords);
  const auto token_of = [&](int word) {
    return part.token_tile * Tile::kTokens + 8 * (word % kOctets) + 2 * (thread & 3);
  };
  for (int first = own; first < own + share; first += kChunk) {
    float x_scales[kChunk][2];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        x_scales[j][t] = __ldcg(args.x_scales + min(token_of(first + j) + t, args.m - 1));
      }
    }
    if (first == own) {
      ptx::cluster_wait();
    }
    Sum total[kChunk][4];
    clear(total);
    for (int peer = 0; peer < blocks; peer += kPeers) {
      uint4 words[kPeers][kChunk] = {};
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        const uint32_t from = ptx::peer_address(mine + first * 2048, peer + p);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          if (first + j < end && peer + p < blocks) {
            words[p][j] = ptx::load_cluster16(from + j * 2048);
          }
        }
      }
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          add_word(total[j], words[p][j]);
        }
      }
    }
    if (first + kChunk >= own + share) {
      ptx::cluster_arrive();
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const int b = (first + j) / kOctets;
      const int row = first_channel<Codec, Tile>(part, group, thread, b);
      const float2 scale = b == 0 ? terms.scale[0] : terms.scale[Tile::kBlocks - 1];
      const float2 bias = b == 0 ? terms.bias[0] : terms.bias[Tile::kBlocks - 1];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int token = token_of(first + j) + t;
        const float x_scale = Codec::kScale * x_scales[j][t];
        if (first + j < end && token < args.m && row < args.n) {
          store_pair<kResult, true>(
              static_cast<uint8_t*>(args.y) + (token * args.y_stride + row) * kBytes, true,
              static_cast<float>(total[j][t]) * (scale.x * x_scale) + bias.x,
              static_cast<float>(total[j][2 + t]) * (scale.y * x_scale) + bias.y);
        }
      }
    }
  }
  ptx::cluster_wait();  // nobody leaves while others read
}

}  // namespace nibble::cuda
