#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/store.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/memory.cuh"

// How the sums of w4a16_sm90/w4a16_sm90.cuh leave. A thread's words are four sums each: two tokens
// of two neighbouring channels (ptx/wgmma.cuh and Int4GroupLayout).
namespace nibble::cuda {

// One of a pair of channels' results, or both, as args.result says.
template <bool kPairs>
__device__ __forceinline__ void store_result(
    const GemmSm90Args& args, int64_t at, bool both, float first, float second) {
  if (args.result == GemmResult::kBf16) {
    store_pair<GemmResult::kBf16, kPairs>(static_cast<uint16_t*>(args.y) + at, both, first, second);
  } else if (args.result == GemmResult::kF32) {
    store_pair<GemmResult::kF32, kPairs>(static_cast<float*>(args.y) + at, both, first, second);
  } else {
    store_pair<GemmResult::kAddF32, kPairs>(static_cast<float*>(args.y) + at, both, first, second);
  }
}

// Biases of the channels `row` and `row` + 1.
__device__ __forceinline__ float2 load_bias(const GemmSm90Args& args, int row) {
  float2 bias{0.0F, 0.0F};
  if (args.bias != nullptr && row < args.n) {
    bias.x = __ldg(args.bias + row);
    bias.y = row + 1 < args.n ? __ldg(args.bias + row + 1) : 0.0F;
  }
  return bias;
}

// Sums of a whole tile, bias added. first_block: this warpgroup's first row block.
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_sums(const float (&sums)[kBlocks][kSums],
                                           const GemmSm90Args& args,
                                           int first_block,
                                           int first_token,
                                           int thread) {
  const int lane = thread & 31;
  const int token0 = first_token + 2 * (lane & 3);
  const auto with = [&]<bool kPairs>() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int row = 64 * (first_block + b) + 16 * (thread >> 5) + 2 * (lane >> 2);
      if (row >= args.n) {
        continue;
      }
      const float2 bias = load_bias(args, row);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int token = token0 + 2 * i + t;
          if (token < args.m) {
            store_result<kPairs>(args, token * args.y_stride + row, row + 1 < args.n,
                                 sums[b][i + t] + bias.x, sums[b][i + 2 + t] + bias.y);
          }
        }
      }
    }
  };
  if (args.n % 2 == 0 && args.y_stride % 2 == 0) {
    with.template operator()<true>();
  } else {
    with.template operator()<false>();
  }
}

// Sums of whole tiles can leave as 16-byte words of BF16: 64 rows of a token side by side, 16
// tokens at a time.
constexpr int kStagedBytes = 16 * 128;  // of shared memory, for each warpgroup

// Whether rows and their places are whole words.
__device__ __forceinline__ bool stores_words(const GemmSm90Args& args) {
  return args.result == GemmResult::kBf16 && args.n % 64 == 0 && args.y_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
}

// store_sums() where stores_words(), by way of `room` in shared memory: chunk c of 16 bytes of a
// token's rows lies at chunk c ^ (token & 6).
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_words(const float (&sums)[kBlocks][kSums],
                                            const GemmSm90Args& args,
                                            int first_block,
                                            int first_token,
                                            int group,
                                            int thread,
                                            uint32_t room) {
  const int lane = thread & 31, warp = thread >> 5;
  const uint32_t to = room + 2 * (lane & 3) * 128 +
                      ((2 * warp + (lane >> 4)) ^ 2 * (lane & 3)) * 16 + (lane >> 2 & 3) * 4;
  const int token = thread >> 3, chunk = thread & 7;
  const uint32_t from = room + token * 128 + (chunk ^ (token & 6)) * 16;
  auto* y = static_cast<uint16_t*>(args.y) + (first_token + token) * args.y_stride +
            64 * first_block + 8 * chunk;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float2 bias = load_bias(args, 64 * (first_block + b) + 16 * warp + 2 * (lane >> 2));
#pragma unroll
    for (int i = 0; i < kSums; i += 8) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          ptx::store_shared4(
              to + (2 * j + t) * 128,
              ptx::pack_bf16(sums[b][i + j + t] + bias.x, sums[b][i + j + 2 + t] + bias.y));
        }
      }
      sync_group(group);
      if (first_token + token + 2 * i < args.m && 64 * (first_block + b) < args.n) {
        *reinterpret_cast<uint4*>(y + 2 * i * args.y_stride + 64 * b) = ptx::load_shared16(from);
      }
      sync_group(group);
    }
  }
}

// Sums of a whole tile. room: kStagedBytes for this warpgroup alone.
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_whole(const float (&sums)[kBlocks][kSums],
                                            const GemmSm90Args& args,
                                            int first_block,
                                            int first_token,
                                            int group,
                                            int thread,
                                            uint32_t room) {
  if (stores_words(args)) {
    store_words(sums, args, first_block, first_token, group, thread, room);
  } else {
    store_sums(sums, args, first_block, first_token, thread);
  }
}

// Adds the parts of a split tile in the order of the blocks that summed them: leaves these sums in
// memory, or, if it comes last, has the sums of all and returns true. own: number of this block's
// cluster; kGroups: warpgroups of a cluster, of which this is `group`.
template <int kGroups, int kBlocks, int kSums>
__device__ __forceinline__ bool add_parts(float (&sums)[kBlocks][kSums],
                                          const GemmSm90Args& args,
                                          const GemmPart& part,
                                          int own,
                                          int group,
                                          int thread,
                                          volatile uint32_t* flags) {
  constexpr int kOctets = kSums / 4;
  constexpr int kWords = kBlocks * kOctets;  // of 16 bytes
  const GemmSchedule& schedule = args.schedule;
  const int first = schedule.block_of(part.split * schedule.steps);
  const int last = schedule.block_of((part.split + 1) * schedule.steps - 1);
  if (first == last) {
    return true;
  }
  // A block's run holds the end of one split tile and the start of another: where it began before
  // the tile, these sums are the start.
  const auto slot = [&](int block) {
    const int start = schedule.run_begin(block) < part.split * schedule.steps ? 1 : 0;
    return static_cast<float4*>(args.parts) +
           ((block * 2 + start) * kGroups + group) * (kWords * 128) + thread;
  };
  uint32_t* counter = args.counters + part.split * kGroups + group;
  const uint32_t others = last - first;
  const auto arrived = [&](uint32_t count) {  // parts left by others, this one counted as `count`
    if (thread == 0) {
      const uint32_t before = ptx::add_acquire_release(counter, count);
      if (before == others) {
        *counter = 0;
      }
      flags[group] = before;
    }
    sync_group(group);
    return flags[group] == others;
  };
  // The start of a tile is the last part of its block's run; most often the end, another's first,
  // has long been left in memory, and these sums need not be.
  const bool two = others == 1;  // whose order does not matter
  bool done =
      two && part.begin == 0 && schedule.split_blocks % schedule.split_tiles != 0 && arrived(0);
  if (!done) {
    float4* mine = slot(own);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* four = sums[w / kOctets] + 4 * (w % kOctets);
      __stcg(mine + w * 128, float4{four[0], four[1], four[2], four[3]});
    }
    sync_group(group);
    if (!arrived(1)) {
      return false;
    }
  }
  if (!two) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums[b][i] = 0.0F;
      }
    }
  }
  constexpr int kAtOnce = kGroups >= 4 || kWords > 16 ? 1 : kWords > 8 ? 2 : 4;  // parts
  for (int block = first; block <= last; block += kAtOnce) {
    float4 words[kAtOnce][kWords];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const bool added = block + p <= last && !(two && block + p == own);
      const float4* theirs = slot(block + p);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[p][w] = added ? __ldcg(theirs + w * 128) : float4{0.0F, 0.0F, 0.0F, 0.0F};
      }
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        float* four = sums[w / kOctets] + 4 * (w % kOctets);
        four[0] += words[p][w].x;
        four[1] += words[p][w].y;
        four[2] += words[p][w].z;
        four[3] += words[p][w].w;
      }
    }
  }
  return true;
}

// What the blocks of a cluster left of their sums at `mine` (in this block and, at the same place,
// in the others): this block adds and stores a part of them. n and the rows' distance are even.
template <int kPeers, int kBlocks, int kSums>
__device__ __forceinline__ void add_peers(
    const GemmSm90Args& args, int first_block, int first_token, int thread, uint32_t mine) {
  constexpr int kOctets = kSums / 4;
  constexpr int kWords = kBlocks * kOctets;
  constexpr int kShare = (kWords + kPeers - 1) / kPeers;
  constexpr int kFit = (kBlocks * kSums > 64 ? 16 : 8) / kPeers;  // read at once
  constexpr int kChunk = kShare < kFit ? kShare : kFit > 0 ? kFit : 1;
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int lane = thread & 31;
  const int row0 = 64 * first_block + 16 * (thread >> 5) + 2 * (lane >> 2);
  float2 bias[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    bias[b] = load_bias(args, row0 + 64 * b);
  }
  const int end = min((rank + 1) * kShare, kWords);
  for (int first = rank * kShare; first < end; first += kChunk) {
    uint4 words[kPeers][kChunk];
#pragma unroll
    for (int p = 0; p < kPeers; ++p) {
      const uint32_t from = ptx::peer_address(mine + first * 2048, p);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        words[p][j] = uint4{0, 0, 0, 0};
        if (first + j < end) {
          words[p][j] = ptx::load_cluster16(from + j * 2048);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      float total[4] = {};
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        add_word(total, words[p][j]);
      }
      const int b = (first + j) / kOctets;
      const int row = row0 + 64 * b;
      const float2 own = b == 0 ? bias[0] : bias[kBlocks - 1];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int token = first_token + 8 * ((first + j) % kOctets) + 2 * (lane & 3) + t;
        if (first + j < end && token < args.m && row < args.n) {
          store_result<true>(args, token * args.y_stride + row, true, total[t] + own.x,
                             total[2 + t] + own.y);
        }
      }
    }
  }
}

// Sums of a tile whose steps the blocks of a cluster shared. ring: where kGroups warpgroups have
// room for their sums, in a ring of stages that is used up.
template <int kGroups, int kBlocks, int kSums>
__device__ __forceinline__ void store_shared_sums(const float (&sums)[kBlocks][kSums],
                                                  const GemmSm90Args& args,
                                                  int first_block,
                                                  int first_token,
                                                  int group,
                                                  int thread,
                                                  uint32_t ring) {
  constexpr int kOctets = kSums / 4;
  constexpr int kWords = kBlocks * kOctets;
  const uint32_t mine = ring + (group * kWords * 128 + thread) * 16;
  ptx::group_sync(5, 128 * kGroups);  // all warpgroups have left the ring
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    ptx::store_shared16(mine + w * 2048, sum_word(sums[w / kOctets] + 4 * (w % kOctets)));
  }
  ptx::cluster_sync();
  switch (args.schedule.cluster) {
    case 2:
      add_peers<2, kBlocks, kSums>(args, first_block, first_token, thread, mine);
      break;
    case 3:
      add_peers<3, kBlocks, kSums>(args, first_block, first_token, thread, mine);
      break;
    case 4:
      add_peers<4, kBlocks, kSums>(args, first_block, first_token, thread, mine);
      break;
    default:
      add_peers<8, kBlocks, kSums>(args, first_block, first_token, thread, mine);
      break;
  }
  ptx::cluster_sync();  // nobody leaves while others read
}

}  // namespace nibble::cuda
