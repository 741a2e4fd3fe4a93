#pragma once

#include "backend/cuda/kernels/attention/kv_forms.cuh"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/ptx/barrier.cuh"

// From a tile of cached rows in shared memory to operands of m16n8k16. Eight rows of K or V, as
// ldmatrix hands them out, are one word per lane and 16-byte chunk; a word becomes kPairs registers
// of two 16-bit elements. Pair P = chunk * kPairs + p of lane l, with g = l / 4 and t = l % 4, is
//   of K: token g, two elements of d for matrix step P / 2, half P % 2 (dim of K: key_dim)
//   of V: tokens 2 t and 2 t + 1, one element d (value_dim)
// Integer codes u stand as fp16 subnormals, u 2^-24: masking is all the conversion there is; int4
// codes of odd p lie four bits higher and so are 16 times as large.
namespace nibble::cuda {

constexpr float kWeightUnit = 64.0F;  // weights times V's scale are fp16 in units of 1/64
constexpr float kWeightUnitLog2 = 6.0F;

template <KvCode kCode, int kDim>
struct KvTile {
  static constexpr KvCode kFormat = kCode;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTokens = kv_tile_tokens(kCode);
  static constexpr int kRow = static_cast<int>(kv_row_bytes(kCode, kDim));
  static constexpr int kRowsBytes = kv_tile_rows_bytes(kCode, kDim);
  static constexpr int kParameterBytes = kv_key_parameter_bytes(kCode, kDim);  // of K; V's follow
  static constexpr int kBytes = kv_tile_bytes(kCode, kDim);
  static constexpr int kChunks = kRow / 16;
  static constexpr int kPairs = 16 / kv_format(kCode).bits;
  static constexpr int kSteps = kDim / 16;
  static constexpr bool kBf16Operands = KvForm<kCode>::kBf16Operands;
  static constexpr bool kHasScale = kv_parameters(kCode) > 0;   // of each token
  static constexpr bool kChannelKeys = kv_has_residual(kCode);  // but K's are of channels
  static constexpr bool kHasOffset = kv_parameters(kCode) == 2;
  static constexpr bool kBiased = kHasScale && !kHasOffset;  // codes are stored plus 128
  static constexpr bool kStatic = kv_format(kCode).per == KvParameters::kPerChannel;
  static constexpr bool kInteger = kHasScale || kStatic;
  /// What a stored code is multiplied by on its way into fp16.
  static constexpr float kCodeUnit = kInteger ? 0x1p-24F : 1.0F;

  /// Element d of lane's half-register e (0 low, 1 high) of pair P of K; q's operands follow it.
  static __device__ __forceinline__ int key_dim(int pair, int t, int e) {
    const int chunk = pair / kPairs;
    const int p = pair % kPairs;
    if constexpr (kPairs == 1) {
      return 8 * chunk + 2 * t + e;
    } else if constexpr (kPairs == 4) {
      return 32 * chunk + 8 * t + p + 4 * e;
    } else {
      return 16 * chunk + 4 * t + 2 * p + e;
    }
  }

  /// Element d of pair P of V for row (or column) g of the operand.
  static __device__ __forceinline__ int value_dim(int pair, int g) {
    const int chunk = pair / kPairs;
    const int p = pair % kPairs;
    if constexpr (kPairs == 1) {
      return 8 * chunk + g;
    } else if constexpr (kPairs == 4) {
      return 32 * chunk + 4 * g + p;
    } else {
      return 16 * chunk + 2 * g + p;
    }
  }

  /// How many times too large the codes of pair P are.
  static constexpr __host__ __device__ float pair_factor(int pair) {
    return kPairs == 4 && pair % 2 == 1 ? 16.0F : 1.0F;
  }
};

template <typename Tile>
__device__ __forceinline__ void warp_mma(float (&d)[4],
                                         const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  if constexpr (Tile::kBf16Operands) {
    ptx::warp_mma_bf16(d, a, b);
  } else {
    ptx::warp_mma_f16(d, a, b);
  }
}

/// Two floats in the operands' type, a in the low half.
template <typename Tile>
__device__ __forceinline__ uint32_t pack_operand(float a, float b) {
  return Tile::kBf16Operands ? ptx::pack_bf16(a, b) : ptx::pack_f16(a, b);
}

/// This lane's share of the addresses of load_words, to be computed once.
struct LaneOffsets {
  uint32_t even = 0;  // 64-byte pieces 0, 2, ... of a row
  uint32_t odd = 0;
};

template <typename Tile>
__device__ __forceinline__ LaneOffsets lane_offsets(int lane) {
  if constexpr (Tile::kRow == 32) {
    const int offset = lane / 16 * 8 * 32 + kv_row_offset(32, lane % 8, lane / 8 % 2 * 16);
    return {static_cast<uint32_t>(offset), 0};
  } else {
    const int offset = kv_row_offset(Tile::kRow, lane % 8, lane / 8 * 16);
    return {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset ^ 64)};
  }
}

/// Words of 16 tokens from `rows` on, [token / 8][chunk].
template <typename Tile, bool kTransposed>
__device__ __forceinline__ void load_words(uint32_t rows,
                                           const LaneOffsets& offsets,
                                           uint32_t (&w)[2][Tile::kChunks]) {
  const auto load = [](uint32_t(&v)[4], uint32_t address) {
    if constexpr (kTransposed) {
      ptx::load_matrix4_transposed(v, address);
    } else {
      ptx::load_matrix4(v, address);
    }
  };
  uint32_t v[4];
  if constexpr (Tile::kRow == 32) {
    load(v, rows + offsets.even);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i / 2][i % 2] = v[i];
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int piece = 0; piece < Tile::kRow / 64; ++piece) {
        const uint32_t start = rows + half * 8 * Tile::kRow + piece / 2 * 1024;
        load(v, start + (piece % 2 == 0 ? offsets.even : offsets.odd));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[half][piece * 4 + i] = v[i];
        }
      }
    }
  }
}

/// The operand's registers for the pairs of one chunk of q: elements of `row` [head_dim] bf16 at
/// key_dim. A null row is zeros. Adds the elements to `sum`.
template <typename Tile, bool kShared = false>
__device__ __forceinline__ void load_query_chunk(
    const uint16_t* row, int chunk, int t, uint32_t (&q)[Tile::kPairs], float& sum) {
  constexpr int kWords = Tile::kPairs;  // each two consecutive elements
  uint32_t word[kWords] = {};
  if (row != nullptr) {
    const uint16_t* start = row + Tile::key_dim(chunk * Tile::kPairs, t, 0);
    if constexpr (kShared) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        word[i] = *reinterpret_cast<const uint32_t*>(start + 2 * i);
      }
    } else if constexpr (kWords == 4) {
      const uint4 v = __ldcg(reinterpret_cast<const uint4*>(start));
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else if constexpr (kWords == 2) {
      const uint2 v = __ldcg(reinterpret_cast<const uint2*>(start));
      word[0] = v.x, word[1] = v.y;
    } else {
      word[0] = __ldcg(reinterpret_cast<const unsigned*>(start));
    }
  }
  if constexpr (Tile::kBf16Operands) {
    q[0] = word[0];
  } else {
    float e[2 * kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      e[2 * i] = __uint_as_float(word[i] << 16);
      e[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000U);
      sum += e[2 * i] + e[2 * i + 1];
    }
#pragma unroll
    for (int p = 0; p < Tile::kPairs; ++p) {
      const float factor = 1.0F / Tile::pair_factor(p);
      const bool apart = Tile::kPairs == 4;  // elements p and p + 4
      q[p] = ptx::pack_f16(factor * e[apart ? p : 2 * p], factor * e[apart ? p + 4 : 2 * p + 1]);
    }
  }
}

/// fp16 parameters of this lane's tokens of a tile, [16 tokens][half], K's or V's.
template <typename Tile>
struct TileParameters {
  static constexpr int kCount = Tile::kTokens / 8;
  static constexpr int kWords = Tile::kHasOffset ? kCount : kCount / 2;
  uint32_t words[kWords];

  __device__ void load(uint32_t address, int g) {
    const uint32_t own = address + static_cast<uint32_t>(g * kWords * 4);
    if constexpr (kWords == 8) {
      const uint4 a = ptx::load_shared16(own);
      const uint4 b = ptx::load_shared16(own + 16);
      words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
      words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
    } else {
      const uint2 a = ptx::load_shared8(own);
      words[0] = a.x, words[1] = a.y;
    }
  }
  [[nodiscard]] __device__ float scale(int i) const {
    const uint32_t bits = Tile::kHasOffset ? words[i] : words[i / 2] >> (i % 2 * 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
  /// What a code of zero stands for, in units of the scale for int8.
  [[nodiscard]] __device__ float offset(int i) const {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
  }
};

/// The keys as they are of a tile of a sequence: a group of the residual.
template <typename Tile>
__device__ __forceinline__ const uint8_t* residual_tile(const PagedArgs& args,
                                                        int32_t sequence,
                                                        int32_t tile,
                                                        int kv_head) {
  const int32_t in_table = tile / args.tiles_per_page;
  const int64_t page =
      max(0, __ldg(args.residual_table + sequence * args.page_table_stride + in_table));
  const int64_t head = page * args.kv_heads + kv_head;
  return args.residual + (head * args.tiles_per_page + tile - in_table * args.tiles_per_page) *
                             (Tile::kTokens * Tile::kHeadDim * 2);
}

/// Scales and offsets of the channels that a lane's words of chunk `chunk` of K stand for: those of
/// pair p are register p.
///   parameters  of the tile's K
template <int kDim>
struct ChannelWords {
  uint32_t scales[4];
  uint32_t offsets[4];

  __device__ __forceinline__ ChannelWords(uint32_t parameters, int chunk, int t) {
    const auto inside = static_cast<uint32_t>(64 * chunk + 16 * t);
    const uint4 s = ptx::load_shared16(parameters + inside);
    const uint4 o = ptx::load_shared16(parameters + 2 * kDim + inside);
    scales[0] = s.x, scales[1] = s.y, scales[2] = s.z, scales[3] = s.w;
    offsets[0] = o.x, offsets[1] = o.y, offsets[2] = o.z, offsets[3] = o.w;
  }
};

constexpr uint32_t kSixteens = 0x4c004c00U;  // of odd pairs q is a sixteenth

/// Eight elements of a row of 32-element chunks, as both operands of m16n8k16 take them where lanes
/// hold neighbouring elements: words 0 and 1 are of one step, 2 and 3 of the next.
__device__ __forceinline__ uint4 row_words(const uint16_t* row, int chunk, int t) {
  return row == nullptr ? make_uint4(0, 0, 0, 0)
                        : __ldcg(reinterpret_cast<const uint4*>(row + 32 * chunk + 8 * t));
}
/// The same of the key of `slot` of a group.
template <int kDim>
__device__ __forceinline__ uint4 key_words(const uint8_t* keys, int slot, int chunk, int t) {
  return __ldcg(
      reinterpret_cast<const uint4*>(keys + kv_residual_offset(kDim, slot, 64 * chunk + 16 * t)));
}

/// Zeroes what a tile holds outside of its tokens low..high-1 (V rows, or V's parameters): memory
/// that was never written may hold NaN, which a weight of zero does not silence.
template <typename Tile>
__device__ __noinline__ void clear_unused(uint32_t tile, int low, int high, int lane) {
  if constexpr (Tile::kStatic) {
    return;  // all codes are finite
  }
  const uint32_t values = tile + Tile::kRowsBytes;
#pragma unroll 1
  for (int token = 0; token < Tile::kTokens; ++token) {
    if (token >= low && token < high) {
      continue;
    }
    if constexpr (Tile::kHasScale) {
      constexpr int kBytes = 2 * kv_parameters(Tile::kFormat);
      const uint32_t at = values + Tile::kRowsBytes + Tile::kParameterBytes +
                          static_cast<uint32_t>(kv_parameter_index(Tile::kFormat, token) * kBytes);
      if (lane < kBytes / 2) {
        ptx::store_shared2(at + static_cast<uint32_t>(lane) * 2, 0);
      }
    } else if (lane < Tile::kChunks) {
      const int offset = kv_row_offset(Tile::kRow, token, lane * 16);
      ptx::store_shared16(values + static_cast<uint32_t>(offset), make_uint4(0, 0, 0, 0));
    }
  }
  ptx::fence_shared_to_async();  // before the copy engine fills the slot again
  __syncwarp();
}

}  // namespace nibble::cuda
