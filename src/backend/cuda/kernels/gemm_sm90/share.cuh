#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/kernels/gemm_sm90/store.cuh"
#include "backend/cuda/ptx/cluster.cuh"

// Tiles of gemm_sm90/gemm_sm90.cuh that several blocks shared: their sums are added, by way of
// memory or, in a cluster, of shared memory.
namespace nibble::cuda {

// Leaves this warpgroup's sums of a split tile in memory; the warpgroup that comes last gets true
// and the sums of all parts, added in the order of the blocks. own: number of this block's cluster.
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
  constexpr int kMembers = Tile::kCluster * Tile::kGroups;
  const int member = static_cast<int>(blockIdx.x) % Tile::kCluster * Tile::kGroups + group;
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
           ((block * 2 + start) * kMembers + member) * (Tile::kBlocks * kWords * 128) + thread;
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
    uint32_t* counter = args.counters + part.split * kMembers + member;
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

// What a block adds and stores of a tile that a cluster shares: at most kMost 16-byte words of each
// thread, each of two neighbouring channels and two of eight tokens.
template <typename Tile>
struct ClusterShare {
  static constexpr int kWords = Tile::kTokens / 8;
  static constexpr int kMost = (kWords + 1) / 2;
  int first, count;

  __device__ __forceinline__ explicit ClusterShare(int blocks) {
    const int share = (kWords + blocks - 1) / blocks;
    first = static_cast<int>(ptx::cluster_rank()) * share;
    count = min(share, kWords - first);
  }
};

// Adds this block's share of what the blocks of a cluster left of their sums at `mine`, in this
// block and, at the same place, in the others.
template <typename Tile, typename Sum>
__device__ __forceinline__ void add_shares(Sum (&total)[ClusterShare<Tile>::kMost][4],
                                           const ClusterShare<Tile>& share,
                                           int blocks,
                                           uint32_t mine) {
  constexpr int kMost = ClusterShare<Tile>::kMost;
  constexpr int kPeers = kMost < 4 ? 4 : 8 / kMost;  // read at once
  clear(total);
  for (int peer = 0; peer < blocks; peer += kPeers) {
    uint4 words[kPeers][kMost] = {};
#pragma unroll
    for (int p = 0; p < kPeers; ++p) {
      const uint32_t from = ptx::peer_address(mine + share.first * 2048, peer + p);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (j < share.count && peer + p < blocks) {
          words[p][j] = ptx::load_cluster16(from + j * 2048);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPeers; ++p) {
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        add_word(total[j], words[p][j]);
      }
    }
  }
}

// Stores a share of a tile's sums. x_scales: of each word's tokens.
template <typename Codec, typename Tile, GemmResult kResult, int kMost>
__device__ __forceinline__ void store_share(const ptx::MmaSum<Codec::kType> (&total)[kMost][4],
                                            const float2 (&x_scales)[kMost],
                                            const GemmSm90Args& args,
                                            const ChannelTerms<Tile::kBlocks>& terms,
                                            const GemmPart& part,
                                            const ClusterShare<Tile>& share,
                                            int group,
                                            int thread,
                                            uint32_t rooms) {
  constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
  const int token0 = part.token_tile * Tile::kTokens + 8 * share.first;
  const float2 scale = terms.scale[0], bias = terms.bias[0];
  if constexpr (Tile::kStoresWords && kResult == GemmResult::kBf16) {
    if (in_words(args)) {
      const WordPlaces places(rooms, thread);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        places.put<Codec>(j / 4 % 2, j % 4, total[j], scale, bias, x_scales[j]);
        if (j % 4 == 3 || j == kMost - 1) {
          sync_group(group);
          places.take(args, j / 4 % 2, part.row_tile * Tile::kRowBlocks + group,
                      token0 + 32 * (j / 4), 8 * min(share.count - j / 4 * 4, 4));
        }
      }
      return;
    }
  }
  const int row = first_channel<Codec, Tile>(part, group, thread, 0);
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int token = token0 + 8 * j + 2 * (thread & 3) + t;
      const float2 pair = result_pair<Codec>(total[j], t, scale, bias, x_scales[j]);
      if (j < share.count && token < args.m && row < args.n) {
        store_pair<kResult, true>(
            static_cast<uint8_t*>(args.y) + (token * args.y_stride + row) * kBytes, true, pair.x,
            pair.y);
      }
    }
  }
}

// The sums of a tile whose steps the blocks of a cluster shared: each leaves its own in its ring,
// which is used up, and adds and stores a part of all of them.
template <typename Codec, typename Tile, GemmResult kResult>
__device__ __forceinline__ void store_cluster(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& token_terms,
    const GemmPart& part,
    int group,
    int thread,
    uint32_t base) {
  using Shared = GemmShared<Codec, Tile>;
  using Share = ClusterShare<Tile>;
  static_assert(Tile::kBlocks == 1);
  static_assert(Share::kWords * 2048 * Tile::kGroups <= Shared::kBarriers);
  const uint32_t mine = base + (group * Share::kWords * 128 + thread) * 16;
  ptx::group_sync(5, 128 * Tile::kGroups);  // both warpgroups have left the ring
#pragma unroll
  for (int w = 0; w < Share::kWords; ++w) {
    ptx::store_shared16(mine + w * 2048, sum_word(sums[0] + 4 * w));
  }
  ptx::cluster_arrive();
  const uint32_t scales = base + Shared::kScales + group * Shared::kScaleBytes;
  share_terms(token_terms, group, thread, scales);
  const Share share(args.schedule.cluster);
  float2 x_scales[Share::kMost];
#pragma unroll
  for (int j = 0; j < Share::kMost; ++j) {
    const int octet = min(share.first + j, Share::kWords - 1);
    if constexpr (TokenTerms<Tile::kTokens>::kOwn) {  // its registers have no index
      const int token = part.token_tile * Tile::kTokens + 8 * octet + 2 * (thread & 3);
      x_scales[j] = {token_scale<Codec>(args, token), token_scale<Codec>(args, token + 1)};
    } else {
      x_scales[j] = terms_of(token_terms, octet, thread, scales);
    }
  }
  ptx::cluster_wait();
  ptx::MmaSum<Codec::kType> total[Share::kMost][4];
  add_shares<Tile>(total, share, args.schedule.cluster, mine);
  ptx::cluster_arrive();
  store_share<Codec, Tile, kResult>(total, x_scales, args, terms, part, share, group, thread,
                                    base + Shared::kWords + group * Shared::kWordBytes);
  ptx::cluster_wait();  // nobody leaves while others read
}

}  // namespace nibble::cuda
