#pragma once

#include <cstdint>

#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"
#include "backend/cuda/kernels/rows/activations.cuh"
#include "backend/cuda/kernels/w4a16_sm90/store.cuh"

// How the sums of experts_sm90/loop.cuh leave. Where packed rows are gate and up in turns, a
// thread's two neighbouring channels are a gate and its up.
namespace nibble::cuda {

__device__ __forceinline__ float through_bf16(float x) {
  return __uint_as_float(ptx::pack_bf16(0.0F, x));
}

// What the activation makes of a gate and its up, which are rounded to BF16 first, as where
// another kernel reads them.
__device__ __forceinline__ float gated(const ExpertsSm90Args& args, float gate, float up) {
  const float g = through_bf16(gate), u = through_bf16(up);
  return args.activation == GemmInput::Kind::kClampedSwiglu
             ? clamped_swiglu<ActFormat::kBf16>(g, u, args.limit)
             : u * silu<GemmInput::Kind::kSiluMul, ActFormat::kBf16>(g, g);
}

// Biases of gate and up number `channel` of an expert.
__device__ __forceinline__ float2 load_gate_bias(const ExpertsSm90Args& args,
                                                 int expert,
                                                 int channel) {
  if (args.bias == nullptr || channel >= args.width) {
    return {0.0F, 0.0F};
  }
  const float* bias = args.bias + static_cast<int64_t>(expert) * args.n + channel;
  return {__ldg(bias), __ldg(bias + args.width)};
}

// Products of gate and up through the activation, y [slots, width] bf16, by way of `room` in shared
// memory: 32 rows of 32 channels at a time, where chunk c of 16 bytes of a row lies at chunk
// c ^ (row / 2 & 3).
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_gated(const float (&sums)[kBlocks][kSums],
                                            const ExpertsSm90Args& args,
                                            const ExpertTile& tile,
                                            int first_block,
                                            int group,
                                            int thread,
                                            uint32_t room) {
  constexpr int kOctets = kSums / 4 < 4 ? kSums / 4 : 4;  // of rows, at a time
  const int lane = thread & 31, warp = thread >> 5;
  const uint32_t to = room + 2 * (lane & 3) * 64 + (warp ^ (lane & 3)) * 16 + (lane >> 2) * 2;
  const int row = thread >> 2, chunk = thread & 3;
  const uint32_t from = room + row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int channel = 32 * (first_block + b);
    const float2 bias = load_gate_bias(args, tile.expert, channel + 8 * warp + (lane >> 2));
    auto* y = static_cast<uint16_t*>(args.y) + channel + 8 * chunk;
#pragma unroll
    for (int first = 0; first < kSums / 4; first += kOctets) {
      if (8 * first >= tile.rows) {
        break;
      }
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float* four = sums[b] + 4 * (first + o);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const float value = gated(args, four[t] + bias.x, four[2 + t] + bias.y);
          ptx::store_shared2(to + (8 * o + t) * 64,
                             static_cast<uint16_t>(ptx::pack_bf16(value, 0.0F)));
        }
      }
      sync_group(group);
      const int r = 8 * first + row;
      if (row < 8 * kOctets && r < tile.rows && channel + 8 * chunk < args.width) {
        *reinterpret_cast<uint4*>(y + (tile.first + r) * args.y_stride) = ptx::load_shared16(from);
      }
      sync_group(group);
    }
  }
}

// The same without an activation: gates, then ups, y [slots, 2 width].
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_turns(const float (&sums)[kBlocks][kSums],
                                            const ExpertsSm90Args& args,
                                            const ExpertTile& tile,
                                            int first_block,
                                            int thread) {
  const int lane = thread & 31;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int channel = 32 * (first_block + b) + 8 * (thread >> 5) + (lane >> 2);
    if (channel >= args.width) {
      continue;
    }
    const float2 bias = load_gate_bias(args, tile.expert, channel);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int row = 2 * i + 2 * (lane & 3) + t;
        if (row < tile.rows) {
          const int64_t at = (tile.first + row) * args.y_stride + channel;
          const float gate = sums[b][i + t] + bias.x, up = sums[b][i + 2 + t] + bias.y;
          with_result(args.result, [&]<GemmResult kResult>() {
            constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
            auto* y = static_cast<uint8_t*>(args.y) + at * kBytes;
            store_pair<kResult, false>(y, false, gate, 0.0F);
            store_pair<kResult, false>(y + int64_t{args.width} * kBytes, false, up, 0.0F);
          });
        }
      }
    }
  }
}

// A lane's two channels of a slice of 16, neighbours or a gate and its up, and their biases.
struct ChannelPair {
  int channel;
  bool there, both;
  float2 bias{0.0F, 0.0F};

  __device__ __forceinline__ ChannelPair(const ExpertsSm90Args& args,
                                         const ExpertTile& tile,
                                         int slice) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const bool turns = args.width > 0;
    channel = turns ? 8 * slice + (lane >> 2) : 16 * slice + 2 * (lane >> 2);
    there = channel < (turns ? args.width : args.n);
    both = there && (turns || channel + 1 < args.n);
    if (args.bias != nullptr && there) {
      const float* own = args.bias + static_cast<int64_t>(tile.expert) * args.n + channel;
      bias.x = __ldg(own);
      bias.y = both ? __ldg(own + (turns ? args.width : 1)) : 0.0F;
    }
  }

  // Their sums for a row of the tile.
  __device__ __forceinline__ void store(const ExpertsSm90Args& args,
                                        const ExpertTile& tile,
                                        int row,
                                        float first,
                                        float second) const {
    if (!there || row >= tile.rows) {
      return;
    }
    const int64_t at = (tile.first + row) * args.y_stride + channel;
    first += bias.x;
    second += bias.y;
    if (args.activation != GemmInput::Kind::kPlain) {
      static_cast<uint16_t*>(args.y)[at] =
          static_cast<uint16_t>(ptx::pack_bf16(gated(args, first, second), 0.0F));
      return;
    }
    const int64_t next = args.width > 0 ? args.width : 1;
    with_result(args.result, [&]<GemmResult kResult>() {
      constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
      auto* y = static_cast<uint8_t*>(args.y) + at * kBytes;
      store_pair<kResult, false>(y, false, first, 0.0F);
      if (both) {
        store_pair<kResult, false>(y + next * kBytes, false, second, 0.0F);
      }
    });
  }
};

// Sums of an item's rows and this warpgroup's row blocks. room: kStagedBytes for it alone.
template <int kBlocks, int kSums>
__device__ __forceinline__ void store_item(const float (&sums)[kBlocks][kSums],
                                           const ExpertsSm90Args& args,
                                           const ExpertTile& tile,
                                           int first_block,
                                           int group,
                                           int thread,
                                           uint32_t room) {
  if (args.activation != GemmInput::Kind::kPlain) {
    return store_gated(sums, args, tile, first_block, group, thread, room);
  }
  if (args.width > 0) {
    return store_turns(sums, args, tile, first_block, thread);
  }
  GemmSm90Args plain;
  plain.bias =
      args.bias == nullptr ? nullptr : args.bias + static_cast<int64_t>(tile.expert) * args.n;
  plain.y = args.y;
  plain.y_stride = args.y_stride;
  plain.m = tile.first + tile.rows;
  plain.n = args.n;
  plain.result = args.result;
  store_whole(sums, plain, first_block, tile.first, group, thread, room);
}

}  // namespace nibble::cuda
