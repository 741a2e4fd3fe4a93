#pragma once

// Chunks of the cache for attention/prefill_sm90.cuh: how its third warpgroup fetches them, and
// widens those that are not bf16.

#include "backend/cuda/kernels/attention/prefill_passes.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda {

constexpr int kSm90Stages = 4;
constexpr int kSm90RawSlots = 3;  // chunks as the cache has them, to be widened

/// A chunk in shared memory: 64 K rows, then 64 V rows, in groups of 8 tokens, each group in
/// columns of 64 elements (1024 bytes, 128-byte swizzle).
template <int kDim>
struct Sm90Chunk {
  static constexpr uint32_t kGroup = kDim * 16;  // bytes of 8 tokens
  static constexpr uint32_t kRows = 8 * kGroup;  // bytes of K, as many of V
  static constexpr uint32_t kBytes = 2 * kRows;

  /// Operand of elements 16 step..+15 of all keys.
  static __device__ __forceinline__ uint64_t keys(uint32_t slot, int step) {
    const auto at = slot + static_cast<uint32_t>(step / 4 * 1024 + step % 4 * 32);
    return describe(at, 16);
  }
  /// Operand of the values of tokens 16 step..+15; its columns are contiguous.
  static __device__ __forceinline__ uint64_t values(uint32_t slot, int step) {
    return describe(slot + kRows + static_cast<uint32_t>(step) * 2 * kGroup, 1024);
  }

 private:
  /// `leading`: bytes from 64 columns to the next, where columns are contiguous.
  static __device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t leading) {
    return static_cast<uint64_t>((address & 0x3ffffU) >> 4) |
           (static_cast<uint64_t>(leading >> 4) << 16) |
           (static_cast<uint64_t>(kGroup >> 4) << 32) | (1ULL << 62);
  }
};

struct Sm90Barriers {
  uint32_t full;   // [kSm90Stages]
  uint32_t empty;  // [kSm90Stages]
  uint32_t raw;    // [kSm90RawSlots]
};

/// The fetching warp: all chunks of the task, in order.
template <int kDim>
__device__ __forceinline__ void fetch_chunks(const PrefillArgs& args,
                                             const PrefillTask& task,
                                             uint32_t slots,
                                             const Sm90Barriers& barriers,
                                             int lane) {
  using Chunk = Sm90Chunk<kDim>;
  using Tile = KvTile<KvCode::kBf16, kDim>;
  for (int32_t i = 0; i < task.end_chunk - task.first_chunk; ++i) {
    const auto stage = static_cast<uint32_t>(i % kSm90Stages);
    const uint32_t slot = slots + stage * Chunk::kBytes;
    const uint32_t full = barriers.full + 8 * stage;
    if (i >= kSm90Stages) {
      ptx::barrier_wait(barriers.empty + 8 * stage, static_cast<uint32_t>(i / kSm90Stages - 1) % 2);
    }
    const int32_t first_tile = (task.first_chunk + i) * (kPrefillChunk / Tile::kTokens);
    const int32_t known = task.known - (task.first_chunk + i) * kPrefillChunk;
    const int32_t tiles =
        min(kPrefillChunk / Tile::kTokens, (known + Tile::kTokens - 1) / Tile::kTokens);
    const bool whole = known >= kPrefillChunk;
    const uint32_t barrier = whole ? full : barriers.raw;
    if (lane == 0) {
      ptx::barrier_arrive_expect(barrier, static_cast<uint32_t>(tiles * Tile::kBytes));
    }
    __syncwarp();
    if (lane < tiles) {
      const uint8_t* source = tile_of_task(args, task, first_tile + lane, Tile::kBytes);
      const uint32_t to = slot + static_cast<uint32_t>(lane * Tile::kRowsBytes);
      ptx::bulk_copy(to, source, Tile::kRowsBytes, barrier);
      ptx::bulk_copy(to + Chunk::kRows, source + Tile::kRowsBytes, Tile::kRowsBytes, barrier);
    }
    __syncwarp();
    if (!whole) {  // the last chunk: values past the end must be finite
      ptx::barrier_wait(barriers.raw, 0);
      for (int token = max(0, known); token < kPrefillChunk; ++token) {
        if (lane < Tile::kChunks) {
          const int offset = kv_row_offset(Tile::kRow, token, lane * 16);
          ptx::store_shared16(slot + Chunk::kRows + static_cast<uint32_t>(offset),
                              make_uint4(0, 0, 0, 0));
        }
      }
      ptx::fence_shared_to_async();
      __syncwarp();
      if (lane == 0) {
        ptx::barrier_arrive(full);
      }
    }
  }
}

/// Asks for a chunk's tiles as they are. One warp.
template <typename Tile>
__device__ __forceinline__ void fetch_raw(const PrefillArgs& args,
                                          const PrefillTask& task,
                                          int32_t chunk,
                                          uint32_t slot,
                                          uint32_t barrier,
                                          int lane) {
  constexpr int kTiles = kPrefillChunk / Tile::kTokens;
  const int32_t first = chunk * kTiles;
  const int32_t tiles = min(kTiles, (task.known + Tile::kTokens - 1) / Tile::kTokens - first);
  if (lane == 0) {
    ptx::barrier_arrive_expect(barrier, static_cast<uint32_t>(tiles * Tile::kBytes));
  }
  __syncwarp();
  if (lane < tiles) {
    ptx::fence_before_refill();
    ptx::bulk_copy(slot + static_cast<uint32_t>(lane * Tile::kBytes),
                   tile_of_task(args, task, first + lane, Tile::kBytes), Tile::kBytes, barrier);
  }
  __syncwarp();
}

/// Eight elements of K or V as bf16. `code`: their codes, 4 or 8 bytes; `parameters`: the token's.
template <KvCode kCode>
__device__ __forceinline__ uint4 widen(uint2 code, uint32_t parameters) {
  float v[8];
  KvForm<kCode>::widen(code, parameters, v);
  return make_uint4(ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]),
                    ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
}

/// The lines of the eight channels that a lane widens, of a code plus 128.
struct ChannelLines {
  float scale[8];
  float offset[8];

  template <typename Tile>
  static __device__ __forceinline__ ChannelLines load(uint32_t parameters, int unit) {
    const ChannelWords<Tile::kHeadDim> words(parameters, unit / 4, unit % 4);
    ChannelLines lines;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto number = [&](uint32_t two) {
          return __half2float(__ushort_as_half(static_cast<uint16_t>(two >> (16 * e))));
        };
        lines.scale[i + 4 * e] = number(words.scales[i]);
        lines.offset[i + 4 * e] = fmaf(-128.0F, number(words.scales[i]), number(words.offsets[i]));
      }
    }
    return lines;
  }
};

/// Widens 32 tokens of the keys of a full chunk whose lines are of channels, as widen_rows() does.
template <typename Tile>
__device__ __forceinline__ void widen_channels(uint32_t raw, uint32_t slot, int warp, int lane) {
  using Chunk = Sm90Chunk<Tile::kHeadDim>;
  constexpr int kUnits = Tile::kHeadDim / 8;
  constexpr int kPhases = 8 * kUnits / 32;
  const int unit = lane % kUnits;
  const ChannelLines lines = ChannelLines::load<Tile>(raw + 2 * Tile::kRowsBytes, unit);
  uint32_t from[kPhases];
  uint32_t to[kPhases];
#pragma unroll
  for (int j = 0; j < kPhases; ++j) {
    const int token = j * (32 / kUnits) + lane / kUnits;  // of the 8
    from[j] = raw + static_cast<uint32_t>(kv_row_offset(Tile::kRow, token, unit * 4));
    to[j] = slot + static_cast<uint32_t>(kv_row_offset(2 * Tile::kHeadDim, token, unit * 16));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto group = static_cast<uint32_t>(warp * 4 + i);
    uint32_t code[kPhases];
#pragma unroll
    for (int j = 0; j < kPhases; ++j) {
      code[j] = ptx::load_shared4(from[j] + group * (8 * Tile::kRow));
    }
#pragma unroll
    for (int j = 0; j < kPhases; ++j) {
      float v[8];
      KvForm<Tile::kFormat>::widen_channels(code[j], lines.scale, lines.offset, v);
      ptx::store_shared16(to[j] + group * Chunk::kGroup,
                          make_uint4(ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]),
                                     ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7])));
    }
  }
}

/// Widens 32 tokens of K or of V of a chunk: the share of one of four warps. Tokens from `known` on
/// become zero.
template <typename Tile>
__device__ __forceinline__ void widen_rows(
    uint32_t raw, uint32_t slot, int warp, int known, int lane) {
  using Chunk = Sm90Chunk<Tile::kHeadDim>;
  constexpr int kUnits = Tile::kHeadDim / 8;  // of a row, 8 elements each
  constexpr int kUnitBytes = Tile::kRow / kUnits;
  constexpr int kPhases = 8 * kUnits / 32;  // steps of the warp over 8 tokens
  constexpr int kParameter = 2 * kv_parameters(Tile::kFormat);
  const bool values = warp >= 2;
  const int first = warp % 2 * 32;
  const uint32_t tile = raw + static_cast<uint32_t>(first / Tile::kTokens * Tile::kBytes);
  const int inside = first % Tile::kTokens;
  const uint32_t from =
      tile + static_cast<uint32_t>((values ? Tile::kRowsBytes : 0) + inside * Tile::kRow);
  const uint32_t to =
      slot + (values ? Chunk::kRows : 0) + static_cast<uint32_t>(first / 8) * Chunk::kGroup;
  const uint32_t parameters_at =
      tile + static_cast<uint32_t>(2 * Tile::kRowsBytes + (values ? Tile::kParameterBytes : 0) +
                                   inside / 8 * kParameter);
  uint32_t from_offset[kPhases];
  uint32_t to_offset[kPhases];
  uint32_t parameter_offset[kPhases];
#pragma unroll
  for (int j = 0; j < kPhases; ++j) {
    const int token = j * (32 / kUnits) + lane / kUnits;  // of the 8
    const int unit = lane % kUnits;
    from_offset[j] = static_cast<uint32_t>(kv_row_offset(Tile::kRow, token, unit * kUnitBytes));
    to_offset[j] = static_cast<uint32_t>(kv_row_offset(2 * Tile::kHeadDim, token, unit * 16));
    parameter_offset[j] =
        static_cast<uint32_t>(kv_parameter_index(Tile::kFormat, token) * kParameter);
  }
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    uint2 code[kPhases];
    uint32_t parameters[kPhases] = {};
#pragma unroll
    for (int j = 0; j < kPhases; ++j) {
      const uint32_t at = from + static_cast<uint32_t>(group * 8 * Tile::kRow) + from_offset[j];
      if constexpr (kUnitBytes == 4) {
        code[j] = make_uint2(ptx::load_shared4(at), 0);
      } else {
        code[j] = ptx::load_shared8(at);
      }
      if constexpr (Tile::kHasScale) {
        const uint32_t own =
            parameters_at + static_cast<uint32_t>(group * kParameter) + parameter_offset[j];
        parameters[j] = kParameter == 4 ? ptx::load_shared4(own) : ptx::load_shared2(own);
      }
    }
#pragma unroll
    for (int j = 0; j < kPhases; ++j) {
      const int token = first + group * 8 + j * (32 / kUnits) + lane / kUnits;
      const uint4 wide = widen<Tile::kFormat>(code[j], parameters[j]);
      ptx::store_shared16(to + static_cast<uint32_t>(group) * Chunk::kGroup + to_offset[j],
                          token < known ? wide : make_uint4(0, 0, 0, 0));
    }
  }
}

/// Makes a chunk's keys and values what wgmma reads: the share of one of four warps, which then has
/// arrived at `full`. Keys as they are lie so in the cache; what of them was never written is
/// masked.
template <typename Tile>
__device__ __forceinline__ void widen_chunk(const PrefillArgs& args,
                                            const PrefillTask& task,
                                            const PrefillPass& pass,
                                            uint32_t raw,
                                            uint32_t slot,
                                            uint32_t full,
                                            int warp,
                                            int lane) {
  using Chunk = Sm90Chunk<Tile::kHeadDim>;
  const int32_t known = task.known - pass.chunk * kPrefillChunk;
  if constexpr (Tile::kChannelKeys) {
    if (warp < 2 && pass.coded) {
      widen_channels<Tile>(raw, slot, warp, lane);
    } else if (warp >= 2) {
      widen_rows<Tile>(raw, slot, warp, known, lane);
    } else if (warp == 0 && lane == 0) {
      ptx::fence_before_refill();
      ptx::barrier_arrive_expect(full, Chunk::kRows);
      ptx::bulk_copy(slot, residual_tile<Tile>(args, task.sequence, pass.chunk, task.kv_head),
                     Chunk::kRows, full);
      return;
    }
  } else {
    widen_rows<Tile>(raw, slot, warp, known, lane);
  }
  ptx::fence_shared_to_async();
  ptx::warp_arrive(full);
}

/// The fetching warpgroup, for caches that are not bf16.
template <typename Tile>
__device__ __forceinline__ void widen_chunks(const PrefillArgs& args,
                                             const PrefillTask& task,
                                             uint32_t slots,
                                             const Sm90Barriers& barriers,
                                             int warp,
                                             int lane) {
  using Chunk = Sm90Chunk<Tile::kHeadDim>;
  constexpr uint32_t kRaw = kPrefillChunk / Tile::kTokens * Tile::kBytes;
  const uint32_t raw = slots + kSm90Stages * Chunk::kBytes;
  const PrefillPasses<Tile> passes(task);
  const auto fetch = [&](int32_t i) {
    if (warp == 0 && i < passes.count) {
      const auto at = static_cast<uint32_t>(i % kSm90RawSlots);
      fetch_raw<Tile>(args, task, passes.at(i).chunk, raw + at * kRaw, barriers.raw + 8 * at, lane);
    }
  };
  for (int32_t i = 0; i < kSm90RawSlots - 1; ++i) {
    fetch(i);
  }
  for (int32_t i = 0; i < passes.count; ++i) {
    const PrefillPass pass = passes.at(i);
    const auto stage = static_cast<uint32_t>(i % kSm90Stages);
    const auto at = static_cast<uint32_t>(i % kSm90RawSlots);
    ptx::group_sync(1, 128);  // chunk i - 1 has been read: its slot is free
    fetch(i + kSm90RawSlots - 1);
    ptx::barrier_wait(barriers.raw + 8 * at, static_cast<uint32_t>(i / kSm90RawSlots) % 2);
    if (i >= kSm90Stages) {
      ptx::barrier_wait(barriers.empty + 8 * stage, static_cast<uint32_t>(i / kSm90Stages - 1) % 2);
    }
    widen_chunk<Tile>(args, task, pass, raw + at * kRaw, slots + stage * Chunk::kBytes,
                      barriers.full + 8 * stage, warp, lane);
  }
}

}  // namespace nibble::cuda
