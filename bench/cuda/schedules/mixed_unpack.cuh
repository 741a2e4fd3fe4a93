#pragma once

#include <cstdint>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "bench/cuda/schedules/nibbles.h"

// Activations of 4 bits that are copied two a byte: wgmma reads bytes, so between the copy of a
// stage and its products other warps unpack the stage's tile where it lies.
namespace nibble::cuda {

/// Unpacks the tile at `x` by kThreads threads, all of which call it. What becomes its first half
/// is written where nothing is to be read; the rest over copied chunks of any thread, which all
/// have read by then.
template <int kTokens, int kThreads>
__device__ __forceinline__ void unpack_tile(uint32_t x, int thread) {
  using At = NibbleTile<kTokens>;
  static_assert(kThreads % At::kEvery == 0);
  constexpr int kEach = At::turns(kThreads), kFree = At::free_turns(kThreads);
  const uint32_t from = x + At::copied(thread);
  const uint32_t first = x + At::unpacked(thread, 0), second = x + At::unpacked(thread, 1);
  uint4 words[kEach];
  const auto mine = [&](int i) {
    return (i + 1) * kThreads <= At::kChunks || thread < At::kChunks - i * kThreads;
  };
  const auto load = [&](int i) {
    if (mine(i)) {
      words[i] = ptx::load_shared16(from + i * kThreads * 16);
    }
  };
  const auto store = [&](int i) {
    if (mine(i)) {
      const uint4 four = words[i];
      ptx::store_shared16(first + i * kThreads * 32,
                          {first_of_nibbles(four.x), second_of_nibbles(four.x),
                           first_of_nibbles(four.y), second_of_nibbles(four.y)});
      ptx::store_shared16(second + i * kThreads * 32,
                          {first_of_nibbles(four.z), second_of_nibbles(four.z),
                           first_of_nibbles(four.w), second_of_nibbles(four.w)});
    }
  };
  const auto each = [](int begin, int end, const auto& body) {
#pragma unroll
    for (int i = begin; i < end; ++i) {
      body(i);
    }
  };
  each(0, kFree, load);
  each(0, kFree, store);
  each(kFree, kEach, load);
  ptx::group_sync(6, kThreads);
  each(kFree, kEach, store);
}

}  // namespace nibble::cuda
