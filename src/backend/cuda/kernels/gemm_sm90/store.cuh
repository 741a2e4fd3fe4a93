#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/gemm_sm90/tile.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/memory.cuh"

// What follows the main loop of gemm_sm90/gemm_sm90.cuh: sums are scaled and stored. A line of
// memory is best written whole by one warp: in pairs of channels, as a warp holds them, it takes
// many times longer.
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

// What a warpgroup has of shared memory to store by.
struct StoreRooms {
  uint32_t scales, words;
  template <typename Shared>
  static __device__ __forceinline__ StoreRooms of_group(uint32_t base, int group) {
    return {base + Shared::kScales + group * Shared::kScaleBytes,
            base + Shared::kWords + group * Shared::kWordBytes};
  }
};

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
    terms.scale[b] = float2{1.0F, 1.0F};
    if constexpr (Codec::kRowScales) {
      const float* scales = args.weight_scales + (inside ? row : 0);  // filled up to whole blocks
      terms.scale[b] = float2{__ldg(scales), __ldg(scales + 1)};
    }
    terms.bias[b] = float2{0.0F, 0.0F};
    if (args.bias != nullptr && inside) {
      terms.bias[b].x = __ldg(args.bias + row);
      terms.bias[b].y = row + 1 < args.n ? __ldg(args.bias + row + 1) : 0.0F;
    }
  }
  return terms;
}

// Scale of a token, which L1 may hold an older one of; of activations that are as they were, 1.
template <typename Codec>
__device__ __forceinline__ float token_scale(const GemmSm90Args& args, int token) {
  if constexpr (Codec::kType == ptx::MmaType::kBf16) {
    return 1.0F;
  } else {
    return __ldcg(args.x_scales + min(token, args.m - 1));
  }
}

// Scales of tokens, read while the products run: of small tiles those of a thread's tokens, of
// others those that it gives its warpgroup through shared memory.
template <int kTokens>
struct TokenTerms {
  static constexpr bool kOwn = kTokens <= 32;
  float scale[kOwn ? kTokens / 4 : (kTokens + 127) / 128];
};

template <typename Codec, typename Tile>
__device__ __forceinline__ TokenTerms<Tile::kTokens> load_token_terms(const GemmSm90Args& args,
                                                                      const GemmPart& part,
                                                                      int thread) {
  using Terms = TokenTerms<Tile::kTokens>;
  Terms terms;
  const int token0 = part.token_tile * Tile::kTokens;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(terms.scale) / sizeof(float)); ++i) {
    const int token = Terms::kOwn ? 8 * (i / 2) + 2 * (thread & 3) + i % 2 : 128 * i + thread;
    terms.scale[i] = token_scale<Codec>(args, token0 + token);
  }
  return terms;
}

// Scales of tiles that are not small, given to the warpgroup at `scales`. All of it has left what
// lies there and behind it from the tile before.
template <int kTokens>
__device__ __forceinline__ void share_terms(const TokenTerms<kTokens>& terms,
                                            int group,
                                            int thread,
                                            uint32_t scales) {
  if constexpr (!TokenTerms<kTokens>::kOwn) {
    sync_group(group);
#pragma unroll
    for (int i = 0; i < (kTokens + 127) / 128; ++i) {
      if (128 * i + thread < kTokens) {
        ptx::store_shared4(scales + 4 * (128 * i + thread),
                           __builtin_bit_cast(uint32_t, terms.scale[i]));
      }
    }
    sync_group(group);
  }
}

// Those of a thread's two tokens of eight.
template <int kTokens>
__device__ __forceinline__ float2
terms_of(const TokenTerms<kTokens>& terms, int octet, int thread, uint32_t scales) {
  if constexpr (TokenTerms<kTokens>::kOwn) {
    return {terms.scale[2 * octet], terms.scale[2 * octet + 1]};
  } else {
    const uint2 two = ptx::load_shared8(scales + 32 * octet + 8 * (thread & 3));
    return {__builtin_bit_cast(float, two.x), __builtin_bit_cast(float, two.y)};
  }
}

// Results of two channels of a token, the first or second (t) of two: scaled sums, then bias. The
// CPU's numbers, whatever way they leave: nothing is fused.
template <typename Codec, typename Sum>
__device__ __forceinline__ float2
result_pair(const Sum* four, int t, float2 scale, float2 bias, float2 x_scales) {
  const float x_scale = Codec::kScale * (t == 0 ? x_scales.x : x_scales.y);
  const auto result = [x_scale](Sum sum, float row_scale, float row_bias) {
    const float scaled = __fmul_rn(static_cast<float>(sum), __fmul_rn(row_scale, x_scale));
    return __fadd_rn(scaled, row_bias);
  };
  return {result(four[t], scale.x, bias.x), result(four[2 + t], scale.y, bias.y)};
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

// Calls f<result>(); without kAdds the result is not kAddF32.
template <bool kAdds = true, typename F>
__device__ __forceinline__ void with_result(GemmResult result, const F& f) {
  if (result == GemmResult::kBf16) {
    f.template operator()<GemmResult::kBf16>();
  } else if (!kAdds || result == GemmResult::kF32) {
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
    int thread,
    uint32_t scales) {
  constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
  const int token0 = part.token_tile * Tile::kTokens + 2 * (thread & 3);
  const int tokens = args.m - token0;
  const int64_t stride = args.y_stride * kBytes;
  const int row0 = first_channel<Codec, Tile>(part, group, thread, 0);
  uint8_t* y =
      static_cast<uint8_t*>(args.y) + token0 * stride + static_cast<int64_t>(row0) * kBytes;
#pragma unroll
  for (int octet = 0; octet < Tile::kTokens / 8; ++octet) {
    const float2 both = terms_of(token_terms, octet, thread, scales);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int token = 8 * octet + t;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        const float2 pair =
            result_pair<Codec>(sums[b] + 4 * octet, t, terms.scale[b], terms.bias[b], both);
        if (token < tokens && row0 + 64 * b < args.n) {
          store_pair<kResult, kPairs>(y + token * stride + 64 * kBytes * b,
                                      row0 + 64 * b + 1 < args.n, pair.x, pair.y);
        }
      }
    }
  }
}

// Whether rows of results and their places are whole words of 16 bytes of BF16, or of F32.
__device__ __forceinline__ bool in_words(const GemmSm90Args& args) {
  return args.result == GemmResult::kBf16 && args.n % 64 == 0 && args.y_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
}
__device__ __forceinline__ bool in_float_words(const GemmSm90Args& args) {
  return args.result == GemmResult::kF32 && args.n % 64 == 0 && args.y_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
}

// Results where in_words(), on their way from a thread's fragments to 64 channels of a token side
// by side, 32 tokens at a time by way of one of two rooms in shared memory, in which chunk c of 16
// bytes of a token lies at chunk c ^ (token & 6).
struct WordPlaces {
  static constexpr int kTokens = 32;
  static constexpr int kRoomBytes = kTokens * 128;
  uint32_t to, from;  // of this thread in the first room
  int token, chunk;   // that it takes from there

  __device__ __forceinline__ WordPlaces(uint32_t rooms, int thread)
      : token(thread >> 3), chunk(thread & 7) {
    const int lane = thread & 31, warp = thread >> 5;
    to = rooms + 2 * (lane & 3) * 128 + ((2 * warp + (lane >> 4)) ^ 2 * (lane & 3)) * 16 +
         (lane >> 2 & 3) * 4;
    from = rooms + token * 128 + (chunk ^ (token & 6)) * 16;
  }
  // Two tokens of eight, number `octet` of the room.
  template <typename Codec, typename Sum>
  __device__ __forceinline__ void put(
      int room, int octet, const Sum* four, float2 scale, float2 bias, float2 x_scales) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float2 pair = result_pair<Codec>(four, t, scale, bias, x_scales);
      ptx::store_shared4(to + room * kRoomBytes + (8 * octet + t) * 128,
                         ptx::pack_bf16(pair.x, pair.y));
    }
  }
  // `count` tokens from first_token on, of this row block.
  __device__ __forceinline__ void take(
      const GemmSm90Args& args, int room, int row_block, int first_token, int count) const {
    auto* y = static_cast<uint16_t*>(args.y) + (first_token + token) * args.y_stride +
              64 * row_block + 8 * chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = token + 16 * h;
      if (at < count && first_token + at < args.m && 64 * row_block < args.n) {
        *reinterpret_cast<uint4*>(y + 16 * h * args.y_stride) =
            ptx::load_shared16(from + room * kRoomBytes + h * 2048);
      }
    }
  }
};

// The same where in_float_words(), 16 tokens at a time.
struct FloatPlaces {
  static constexpr int kTokens = 16;
  static constexpr int kRoomBytes = kTokens * 256;
  uint32_t to, from;
  int token, chunk;

  __device__ __forceinline__ FloatPlaces(uint32_t rooms, int thread)
      : token(thread >> 4), chunk(thread & 15) {
    const int lane = thread & 31, warp = thread >> 5;
    to = rooms + 2 * (lane & 3) * 256 + ((4 * warp + (lane >> 3)) ^ 2 * (lane & 3)) * 16 +
         (lane >> 2 & 1) * 8;
    from = rooms + token * 256 + (chunk ^ (token & 6)) * 16;
  }
  template <typename Codec, typename Sum>
  __device__ __forceinline__ void put(
      int room, int octet, const Sum* four, float2 scale, float2 bias, float2 x_scales) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float2 pair = result_pair<Codec>(four, t, scale, bias, x_scales);
      ptx::store_shared8(to + room * kRoomBytes + (8 * octet + t) * 256,
                         {__float_as_uint(pair.x), __float_as_uint(pair.y)});
    }
  }
  __device__ __forceinline__ void take(
      const GemmSm90Args& args, int room, int row_block, int first_token, int count) const {
    auto* y = static_cast<float*>(args.y) + (first_token + token) * args.y_stride + 64 * row_block +
              4 * chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = token + 8 * h;
      if (at < count && first_token + at < args.m && 64 * row_block < args.n) {
        *reinterpret_cast<uint4*>(y + 8 * h * args.y_stride) =
            ptx::load_shared16(from + room * kRoomBytes + h * 2048);
      }
    }
  }
};

// store_tile() in words, by Places.
template <typename Codec, typename Tile, typename Places>
__device__ __forceinline__ void store_tile_in_words(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& token_terms,
    const GemmPart& part,
    int group,
    int thread,
    const StoreRooms& rooms) {
  constexpr int kAtOnce = Places::kTokens, kTurns = Tile::kTokens / kAtOnce;
  const Places places(rooms.words, thread);
  const int first_block = part.row_tile * Tile::kRowBlocks + group * Tile::kBlocks;
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int room = (b * kTurns + i) % 2;
#pragma unroll
      for (int j = 0; j < kAtOnce / 8; ++j) {
        const int octet = kAtOnce / 8 * i + j;
        places.template put<Codec>(room, j, sums[b] + 4 * octet, terms.scale[b], terms.bias[b],
                                   terms_of(token_terms, octet, thread, rooms.scales));
      }
      sync_group(group);
      places.take(args, room, first_block + b, part.token_tile * Tile::kTokens + kAtOnce * i,
                  kAtOnce);
    }
  }
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void store_rows(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& tokens,
    const GemmPart& part,
    int group,
    int thread,
    const StoreRooms& rooms) {
  share_terms(tokens, group, thread, rooms.scales);
  if constexpr (Tile::kStoresWords) {
    if (in_words(args)) {
      return store_tile_in_words<Codec, Tile, WordPlaces>(sums, args, terms, tokens, part, group,
                                                          thread, rooms);
    }
  }
  if constexpr (Tile::kStoresWords && Tile::kOfExperts) {
    if (in_float_words(args)) {
      return store_tile_in_words<Codec, Tile, FloatPlaces>(sums, args, terms, tokens, part, group,
                                                           thread, rooms);
    }
  }
  const bool pairs = args.n % 2 == 0 && args.y_stride % 2 == 0;
  const auto with = [&]<GemmResult kResult>() {
    if (pairs) {
      store_tile<Codec, Tile, kResult, true>(sums, args, terms, tokens, part, group, thread,
                                             rooms.scales);
    } else {
      store_tile<Codec, Tile, kResult, false>(sums, args, terms, tokens, part, group, thread,
                                              rooms.scales);
    }
  };
  with_result<!Tile::kOfExperts>(args.result, with);
}

template <typename Codec, typename Tile>
__device__ __forceinline__ void store(
    const ptx::MmaSum<Codec::kType> (&sums)[Tile::kBlocks][Tile::kTokens / 2],
    const GemmSm90Args& args,
    const ChannelTerms<Tile::kBlocks>& terms,
    const TokenTerms<Tile::kTokens>& tokens,
    const GemmPart& part,
    int group,
    int thread,
    uint32_t base) {
  store_rows<Codec, Tile>(sums, args, terms, tokens, part, group, thread,
                          StoreRooms::of_group<GemmShared<Codec, Tile>>(base, group));
}

}  // namespace nibble::cuda
