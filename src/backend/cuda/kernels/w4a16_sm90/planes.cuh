#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/w4a16_sm90/layout.cuh"
#include "backend/cuda/kernels/w4a16_sm90/planes.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma_sum.cuh"

// yᵀ = w · xᵀ of very few tokens and INT4 weights in groups, by tensor cores for INT8: the columns
// of one product, eight, hold three planes of each of two tokens.
//
// The activations of a token become, 128 of K at a time, integers of 23 bits under one power of
// two: all that lie less than 2^14 below the largest keep every bit, smaller ones an error of 2^-22
// of the largest, as a sum in f32 has it. Three planes of signed bytes hold such an integer as
// p2 2^16 + p1 2^8 + p0; products of weights with planes are exact, and groups are added in f32
// under the scale of weights times that of activations times the plane's power. Weights take three
// integer operations for eight: the codes of one row, alternate nibbles of a word, become 16 times
// the weight where they lie. Infinities and NaN make all results of their token NaN.
//
// Rows are dealt to the multiprocessors in slices of 16, so that all have nearly the same to read
// and no sums cross between them (or within a cluster at most), and warps of a block share K. The
// warps make the planes of all activations while the copy engine fills the ring with weights.
namespace nibble::cuda {

template <int kGroupSize, int kTokens>
struct W4A16PlanesLoop {
  using Layout = Int4GroupLayout<kGroupSize>;
  static constexpr int kOctets = (kTokens + 1) / 2;
  static constexpr int kPairBytes = kTokens * kW4A16RecordBytes;  // of activations
  using Sums = float[2][kOctets][2];  // of two rows of each of a warp's two slices
  // A token alone has columns for two groups: each has its planes there and zeros in the other's,
  // and one sum is all that is to be scaled.
  static constexpr bool kTwoGroups = kTokens == 1 && kGroupSize == 32;
  static constexpr auto kHint = ptx::CacheHint::kEvictFirst;  // weights are read once

  // Where things lie in shared memory: a ring of weights, activations [pair][token], sums, those of
  // the other block of a cluster, barriers (full, empty, of those sums). Of a token's 128 of K
  // there are planes [unit of 64][plane][t][16 of K], in words of four elements, and scales [t % 2]
  // of the two columns of lanes with this t, with an offset.
  struct Place {
    uint32_t weights, x, sums, others, barriers;
    __device__ __forceinline__ Place(uint32_t base, const W4A16PlanesPlan& plan)
        : weights(base),
          x(weights + plan.stages * plan.weight_bytes),
          sums(x + plan.x_bytes),
          others(sums + 2 * kW4A16PlanesWarps * kTokens * 64),
          barriers(others + kW4A16PlanesWarps / 2 * kTokens * 64) {}
    __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ uint32_t empty(int slot) const {
      return barriers + 8 * (kW4A16PlanesStages + slot);
    }
    __device__ __forceinline__ uint32_t others_there() const {
      return barriers + 16 * kW4A16PlanesStages;
    }
  };

  // This block's part of the work: tiles `tile`, `tile + step`, ... and pairs [begin, end) of K.
  struct Share {
    int tile, tile_step, begin, end, steps;
    __device__ __forceinline__ explicit Share(const W4A16PlanesArgs& args) {
      const W4A16PlanesPlan& plan = args.plan;
      const int rank = rank_of(plan);
      tile = static_cast<int>(blockIdx.x) >> plan.cluster_shift;
      tile_step = plan.blocks >> plan.cluster_shift;
      begin = args.pairs * rank >> plan.cluster_shift;
      end = args.pairs * (rank + 1) >> plan.cluster_shift;
      steps = (end - begin + (1 << plan.step_shift) - 1) >> plan.step_shift;
    }
  };

  // Number of this block in its cluster.
  static __device__ __forceinline__ int rank_of(const W4A16PlanesPlan& plan) {
    return static_cast<int>(blockIdx.x) & ((1 << plan.cluster_shift) - 1);
  }

  // First slice of a tile, and how many it has.
  static __device__ __forceinline__ int first_slice(const W4A16PlanesPlan& plan, int tile) {
    return tile * plan.tile_slices + min(tile, plan.larger_tiles);
  }
  static __device__ __forceinline__ int slices_of(const W4A16PlanesPlan& plan, int tile) {
    return plan.tile_slices + (tile < plan.larger_tiles ? 1 : 0);
  }

  // Where the weights of a tile begin in a line of 128 bytes; a row of slices begins with a line.
  static __device__ __forceinline__ uint32_t in_line(int first_slice) {
    return static_cast<uint32_t>(first_slice * Layout::kSliceBytes) % kW4A16LineBytes;
  }

  // --- the copying thread ---

  // Weights are constant: it need not wait for the predecessor. They are copied in whole lines:
  // others take a tenth longer.
  static __device__ __forceinline__ void fill_ring(const W4A16PlanesArgs& args,
                                                   const Place& place,
                                                   const Share& share) {
    const int64_t row_bytes = static_cast<int64_t>(args.packed_slices) * Layout::kSliceBytes;
    const int step_pairs = 1 << args.plan.step_shift;
    if (args.plan.cluster_shift > 0) {  // has one tile
      const int own = (slices_of(args.plan, share.tile) + 1 - rank_of(args.plan)) / 2;
      ptx::barrier_arrive_expect(place.others_there(), own * kTokens * 64);
    }
    int slot = 0, round = 0;  // the first waits for nothing
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      const int first = first_slice(args.plan, tile);
      const uint32_t bytes = (in_line(first) + slices_of(args.plan, tile) * Layout::kSliceBytes +
                              kW4A16LineBytes - 1) /
                             kW4A16LineBytes * kW4A16LineBytes;
      const uint8_t* from = args.weights + share.begin * row_bytes +
                            first * static_cast<int64_t>(Layout::kSliceBytes) - in_line(first);
      for (int pair = share.begin; pair < share.end; pair += step_pairs) {
        const int pairs = min(step_pairs, share.end - pair);
        const uint32_t full = place.full(slot);
        uint32_t to = place.weights + slot * args.plan.weight_bytes;
        if (round > 0) {
          ptx::barrier_wait_to_refill(place.empty(slot), (round - 1) & 1);
        }
        ptx::barrier_arrive_expect(full, pairs * bytes);
#pragma unroll 1
        for (int i = 0; i < pairs; ++i) {
          ptx::bulk_copy(to, from, bytes, full, kHint);
          to += args.plan.pair_bytes;
          from += row_bytes;
        }
        if (++slot == args.plan.stages) {
          slot = 0;
          ++round;
        }
      }
    }
  }

  // --- activations ---

  // A token's 128 of K is made into a record by eight lanes; a warp makes four at once. All blocks
  // read the same activations at the same time: in whole lines, or the L2 cache is long at it.
  static constexpr int kAtOnce = 4;
  using Lines = uint4[2];  // a lane's part of four times 256 bytes

  static __device__ __forceinline__ void load_lines(
      Lines& lines, const W4A16PlanesArgs& args, const Share& share, int first, int count) {
    const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int record = first + 2 * i + lane / 16;
      const int k = (share.begin + record / kTokens) * 128 + lane % 16 * 8;
      lines[i] = uint4{0, 0, 0, 0};
      if (record < count && k < args.k) {
        const auto* x = static_cast<const __nv_bfloat16*>(args.x) +
                        record % kTokens * static_cast<int64_t>(args.k) + k;
        lines[i] = __ldcg(reinterpret_cast<const uint4*>(x));
      }
    }
  }

  // What a lane makes planes of: of 16 of K, four times, the elements 2t, 2t + 1, 2t + 8, 2t + 9.
  using Piece = uint32_t[4][2];

  // Piece `lane` of eight of a record, by way of where the record will be.
  static __device__ __forceinline__ void exchange(
      Piece& piece, const Lines& lines, uint32_t records, int first, int count) {
    const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + 2 * i + lane / 16 < count) {
        ptx::store_shared16(records + (2 * i + lane / 16) * kW4A16RecordBytes + lane % 16 * 16,
                            lines[i]);
      }
    }
    __syncwarp();
    const uint32_t from =
        records + lane / 8 * kW4A16RecordBytes + lane / 4 % 2 * 128 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        piece[j][i] = first + lane / 8 < count ? ptx::load_shared4(from + 32 * j + 16 * i) : 0U;
      }
    }
    __syncwarp();
  }

  // Added to an integer of less than 2^22 it makes the number 1.5 * 2^23 + integer.
  static constexpr int32_t kNumber = 0x4b400000;

  // Writes a piece's part of the record of a token's 128 of K.
  static __device__ __forceinline__ void make_planes(const Piece& piece,
                                                     uint32_t record,
                                                     bool there,
                                                     int lane) {
    constexpr uint32_t kTop = 0x80808080U;
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      largest = __vmaxu2(largest, __vmaxu2(piece[j][0] & 0x7fff7fffU, piece[j][1] & 0x7fff7fffU));
    }
#pragma unroll
    for (int i = 1; i < 8; i *= 2) {
      largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffU, largest, i));
    }
    // The largest's power of two, biased by 127: below 2^-101 it counts as that; from 2^110 on, as
    // of infinities and NaN, the scale is NaN.
    const uint32_t exponent = max(max(largest & 0xffffU, largest >> 16) >> 7, 26U);
    const float multiplier = __uint_as_float((275U - exponent) << 23);  // to less than 2^22
    const float number = __int_as_float(kNumber);
    uint32_t words[3][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int32_t y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 0x8080 makes bytes signed
        const uint32_t two = piece[j][i % 2];
        const float x = __uint_as_float(i < 2 ? two << 16 : two & 0xffff0000U);
        y[i] = __float_as_int(fmaf(x, multiplier, number)) - (kNumber - 0x8080);
      }
      const uint32_t low0 = __byte_perm(y[0], y[1], 0x5140);
      const uint32_t low1 = __byte_perm(y[2], y[3], 0x5140);
      const uint32_t high0 = __byte_perm(y[0], y[1], 0x0062);
      const uint32_t high1 = __byte_perm(y[2], y[3], 0x6200);
      words[0][j] = __byte_perm(low0, low1, 0x5410) ^ kTop;
      words[1][j] = __byte_perm(low0, low1, 0x7632) ^ kTop;
      words[2][j] = __byte_perm(high0, high1, 0x7610);
    }
    if (!there) {
      return;
    }
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      ptx::store_shared16(record + lane / 4 * 192 + p * 64 + lane % 4 * 16,
                          uint4{words[p][0], words[p][1], words[p][2], words[p][3]});
    }
    if (lane < 2) {  // of p0 and p1, or of p2 and nothing; also undoes the 16 of the weights
      const float scale = __uint_as_float(exponent < 237 ? (exponent - 25U) << 23 : 0x7fc00000U);
      const float first = lane == 0 ? scale : scale * 65536.0F;
      const float second = lane == 0 ? scale * 256.0F : scale * 0.0F;
      ptx::store_shared16(record + kW4A16PlaneBytes + lane * 16,
                          uint4{__float_as_uint(first), __float_as_uint(second),
                                __float_as_uint((first + second) * -number), 0});
    }
  }

  // This block's part of the activations, by all warps.
  static __device__ __forceinline__ void convert(const W4A16PlanesArgs& args,
                                                 const Place& place,
                                                 const Share& share) {
    constexpr int kStep = kAtOnce * kW4A16PlanesWarps;
    const int count = (share.end - share.begin) * kTokens;
    const int own = static_cast<int>(threadIdx.x >> 3 & 3),
              lane = static_cast<int>(threadIdx.x & 7);
    const auto make = [&](const Lines& lines, int first) {
      if (first < count) {
        Piece piece;
        const uint32_t records = place.x + first * kW4A16RecordBytes;
        exchange(piece, lines, records, first, count);
        make_planes(piece, records + own * kW4A16RecordBytes, first + own < count, lane);
      }
    };
    Lines lines[2];  // their latencies overlap
    int first = static_cast<int>(threadIdx.x >> 5) * kAtOnce;
    load_lines(lines[0], args, share, first, count);
    load_lines(lines[1], args, share, first + kStep, count);
#pragma unroll 1
    for (; first < count; first += 2 * kStep) {
      make(lines[0], first);
      load_lines(lines[0], args, share, first + 2 * kStep, count);
      make(lines[1], first + kStep);
      load_lines(lines[1], args, share, first + 3 * kStep, count);
    }
  }

  // --- products ---

  // 16 times the weights of 32 of K: the codes of two words as a fragment.
  static __device__ __forceinline__ void place_codes(const uint32_t (&words)[2], uint32_t (&a)[4]) {
    constexpr uint32_t kHigh = 0xf0f0f0f0U, kSigns = 0x80808080U;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = ptx::lop3<0x78>(kSigns, words[i] << 4, kHigh);
      a[2 * i + 1] = ptx::lop3<0x78>(kSigns, words[i], kHigh);
    }
  }

  // What a lane reads of a pair: codes and scales of two slices, planes and scales of the columns
  // that it has in fragments and in sums.
  struct Pointers {
    uint32_t codes[2], w_scales[2], planes[kOctets], x_scales[kOctets];
  };

  // Planes of two groups, of which a lane reads one: registers of the other stay zero.
  using Halves = uint32_t[2][2][2];

  // Planes of 64 of K as fragments of each half.
  static __device__ __forceinline__ void load_planes(uint32_t (&b)[4],
                                                     uint32_t (&halves)[2][2],
                                                     uint32_t at,
                                                     bool second) {
    if constexpr (!kTwoGroups) {
      const uint4 four = ptx::load_shared16(at);
      b[0] = four.x, b[1] = four.y, b[2] = four.z, b[3] = four.w;
      return;
    }
    if (second) {
      const uint2 two = ptx::load_shared8(at);
      halves[1][0] = two.x, halves[1][1] = two.y;
    } else {
      const uint2 two = ptx::load_shared8(at);
      halves[0][0] = two.x, halves[0][1] = two.y;
    }
    b[0] = halves[0][0], b[1] = halves[0][1], b[2] = halves[1][0], b[3] = halves[1][1];
  }

  // Of a lane's two columns: what makes numbers of sums, and the offset of both together.
  struct Columns {
    float scale[2], offset;
  };

  // sums += group, in numbers of the columns, times the scales of the two rows. With the second
  // column first, whose scale is 2^8 of the other's, nothing is rounded but the sum of both.
  static __device__ __forceinline__ void scale_sums(float (&sums)[2],
                                                    const int32_t (&group)[4],
                                                    const Columns& columns,
                                                    uint32_t w_scales) {
    const float rows[2] = {__uint_as_float(w_scales << 16),
                           __uint_as_float(w_scales & 0xffff0000U)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float second = fmaf(__int_as_float(group[2 * r + 1]), columns.scale[1], columns.offset);
      const float both = fmaf(__int_as_float(group[2 * r]), columns.scale[0], second);
      sums[r] = fmaf(both, rows[r], sums[r]);
    }
  }

  // One pair.
  static __device__ __forceinline__ void multiply_pair(Sums& sums,
                                                       Halves& halves,
                                                       const Pointers& at,
                                                       bool second) {
    constexpr int32_t kStart[4] = {kNumber, kNumber, kNumber, kNumber};
    constexpr int kHalvesInSum = kGroupSize == 128 ? 4 : kTwoGroups ? 2 : 1;
    Columns columns[kOctets];
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const uint4 four = ptx::load_shared16(at.x_scales[o]);
      columns[o] = {{__uint_as_float(four.x), __uint_as_float(four.y)}, __uint_as_float(four.z)};
    }
    int32_t group[2][kOctets][4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t b[kOctets][4];
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        load_planes(b[o], halves[u], at.planes[o] + u * 192, second);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint4 four = ptx::load_shared16(at.codes[s] + Layout::codes(u));
        const uint32_t words[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          place_codes(words[half], a);
          const int in_sum = (2 * u + half) % kHalvesInSum;
#pragma unroll
          for (int o = 0; o < kOctets; ++o) {
            if (in_sum == 0) {
              ptx::warp_mma_s8_sum(group[s][o], a, b[o][2 * half], b[o][2 * half + 1], kStart);
            } else {
              ptx::warp_mma_s8_sum(group[s][o], a, b[o][2 * half], b[o][2 * half + 1], group[s][o]);
            }
          }
          if (in_sum == kHalvesInSum - 1) {
            const uint32_t w_scales =
                ptx::load_shared4(at.w_scales[s] + Layout::scales(u) +
                                  (kHalvesInSum == 1 ? half * Layout::kGroupBytes : 0));
#pragma unroll
            for (int o = 0; o < kOctets; ++o) {
              scale_sums(sums[s][o], group[s][o], columns[o], w_scales);
            }
          }
        }
      }
    }
  }

  // Where this warp reads. Sets of warps take the steps in turn, a warp of each for every pair of a
  // step and two slices.
  struct Reader {
    int row_warp, set, sets, pair, stride;
    uint32_t codes, w_scales, planes, x_scales;
    __device__ __forceinline__ Reader(const W4A16PlanesPlan& plan, const Place& place) {
      const int warp = static_cast<int>(threadIdx.x >> 5);
      const int k_warp = warp & ((1 << plan.k_shift) - 1);
      const int of = k_warp & ((1 << plan.step_shift) - 1);
      row_warp = warp >> plan.k_shift;
      set = k_warp >> plan.step_shift;
      sets = 1 << (plan.k_shift - plan.step_shift);
      stride = 1 << plan.k_shift;
      pair = k_warp;
      const uint32_t lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
      const uint32_t weights =
          place.weights + of * plan.pair_bytes + 2 * row_warp * Layout::kSliceBytes;
      codes = weights + lane * 16;
      w_scales = weights + g * 4 + (kTwoGroups ? t / 2 * Layout::kGroupBytes : 0);
      planes = place.x + pair * kPairBytes + g / 4 % kTokens * kW4A16RecordBytes +
               min(g % 4, 2) * 64 + t * 16;  // the fourth column of a token counts nothing
      if (kTwoGroups) {
        planes += g / 4 * 8;
      }
      x_scales = place.x + pair * kPairBytes + t / 2 % kTokens * kW4A16RecordBytes +
                 kW4A16PlaneBytes + t % 2 * 16;
    }
  };

  // This warp's steps of a tile, whose first is the `count`th of the block.
  static __device__ __forceinline__ void accumulate(Sums& sums,
                                                    const W4A16PlanesPlan& plan,
                                                    const Place& place,
                                                    const Share& share,
                                                    const Reader& reader,
                                                    int tile,
                                                    int count) {
    const int slices = slices_of(plan, tile);
    int slot = reader.set;
    uint32_t parity = 0;
    if (count > 0) {
      slot = (count + reader.set) % plan.stages;
      parity = (count + reader.set) / plan.stages & 1;
    }
    const uint32_t end = ptx::keep(place.full(plan.stages));
    const uint32_t ring_bytes = ptx::keep(plan.stages * plan.weight_bytes);
    const uint32_t stage_step = ptx::keep(reader.sets * plan.weight_bytes);
    const uint32_t x_step = ptx::keep(reader.stride * kPairBytes);
    const uint32_t second =
        ptx::keep(2 * reader.row_warp + 1 < slices ? uint32_t{Layout::kSliceBytes} : 0U);
    const uint32_t to_scales = ptx::keep(reader.w_scales - reader.codes);
    // Steps of the set, and those that hold a pair of this warp: of a tile that is a slice smaller
    // the last warps may have no rows, and of the last step some no pair.
    int steps = (share.steps - reader.set + reader.sets - 1) >> (plan.k_shift - plan.step_shift);
    int pairs = 2 * reader.row_warp < slices
                    ? (share.end - share.begin - reader.pair + reader.stride - 1) >> plan.k_shift
                    : 0;
    steps -= pairs;
    uint32_t full = place.full(slot),
             codes = reader.codes + in_line(first_slice(plan, tile)) + slot * plan.weight_bytes;
    uint32_t planes = reader.planes, x_scales = reader.x_scales;
    Halves halves = {};
    const auto release = [&] {
      ptx::warp_arrive(full + 8 * kW4A16PlanesStages);  // the stage has been read
      codes += stage_step;
      full += 8 * reader.sets;
      if (full >= end) {
        codes -= ring_bytes;
        full -= 8 * plan.stages;
        parity ^= 1;
      }
    };
#pragma unroll 1
    for (; pairs > 0; --pairs) {
      ptx::barrier_wait(full, parity);
      Pointers at;
      at.codes[0] = codes, at.w_scales[0] = codes + to_scales;
      at.codes[1] = at.codes[0] + second, at.w_scales[1] = at.w_scales[0] + second;
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        at.planes[o] = planes + o * 2 * kW4A16RecordBytes;
        at.x_scales[o] = x_scales + o * 2 * kW4A16RecordBytes;
      }
      multiply_pair(sums, halves, at, (threadIdx.x & 16) != 0);
      planes += x_step;
      x_scales += x_step;
      release();
    }
#pragma unroll 1
    for (; steps > 0; --steps) {
      ptx::barrier_wait(full, parity);
      release();
    }
  }

  // --- results ---

  static __device__ __forceinline__ void store(const W4A16PlanesArgs& args,
                                               int token,
                                               int row,
                                               float value) {
    const int64_t at = token * args.y_stride + row;
    if (args.result == GemmResult::kBf16) {
      static_cast<__nv_bfloat16*>(args.y)[at] = __float2bfloat16_rn(value);
    } else if (args.result == GemmResult::kF32) {
      static_cast<float*>(args.y)[at] = value;
    } else {
      atomicAdd(static_cast<float*>(args.y) + at, value);
    }
  }

  // Sums of four numbers over the lanes of equal lane % kWords: lane / kWords * 4 / (32 / kWords)
  // tells which of the four a lane gets.
  template <int kWords>
  static __device__ __forceinline__ float add_parts(const float (&numbers)[4]) {
    const auto lane = threadIdx.x;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = (lane & 16) != 0 ? numbers[2 + i] : numbers[i];
      const float other = (lane & 16) != 0 ? numbers[i] : numbers[2 + i];
      two[i] = mine + __shfl_xor_sync(0xffffffffU, other, 16);
    }
    const float mine = (lane & 8) != 0 ? two[1] : two[0];
    const float other = (lane & 8) != 0 ? two[0] : two[1];
    float sum = mine + __shfl_xor_sync(0xffffffffU, other, 8);
#pragma unroll
    for (int i = kWords; i < 8; i *= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, i);
    }
    return sum;
  }

  // Adds up what the warps of this block, or of both of its cluster, have of the tile, always in
  // the same order, and stores it.
  static __device__ __forceinline__ void finish(const Sums& sums,
                                                const W4A16PlanesArgs& args,
                                                const Place& place,
                                                int first,
                                                int slices,
                                                bool last) {
    constexpr int kWords = 4 * kTokens;  // of four channels of a token, in a slice
    constexpr int kParts = 32 / kWords;  // of the sums to be added, each by other lanes
    constexpr int kSliceBytes = 16 * kWords;
    const W4A16PlanesPlan& plan = args.plan;
    const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31);
    // Planes of a token lie in two neighbouring lanes: t even has two, t odd the third.
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        float2 two{sums[s][o][0], sums[s][o][1]};
        two.x += __shfl_xor_sync(0xffffffffU, two.x, 1);
        two.y += __shfl_xor_sync(0xffffffffU, two.y, 1);
        if (kTwoGroups) {
          two.x += __shfl_xor_sync(0xffffffffU, two.x, 2);
          two.y += __shfl_xor_sync(0xffffffffU, two.y, 2);
        }
        const int token = 2 * o + lane % 4 / 2;
        if (lane % 2 == 0 && token < kTokens) {
          ptx::store_shared8(place.sums + (2 * warp + s) * kSliceBytes + token * 64 + lane / 4 * 8,
                             uint2{__float_as_uint(two.x), __float_as_uint(two.y)});
        }
      }
    }
    // Each warp adds up a slice. Of two blocks one stores the even slices, to the other it sends
    // the odd ones.
    const int rank = rank_of(plan), word = lane % kWords, part = lane / kWords;
    const bool own = plan.cluster_shift == 0 || warp % 2 == rank;
    const int token = word / 4, column = word % 4 * 4 + part * 4 / kParts;
    const int row = 16 * (first + warp) + column;
    const bool stores = own && part % (kParts / 4) == 0 && token < args.m && row < args.n;
    float bias = 0.0F;
    if (args.bias != nullptr && warp < slices && stores) {
      bias = args.bias[row];
    }
    if (plan.cluster_shift > 0) {
      ptx::cluster_wait();  // the other block's barriers are there
    }
    ptx::group_sync(1, 32 * kW4A16PlanesWarps);
    if (warp < slices) {
      float total[4] = {};
      const uint32_t from =
          place.sums + ((warp / 2 << plan.k_shift) * 2 + warp % 2) * kSliceBytes + word * 16;
#pragma unroll
      for (int k_warp = 0; k_warp < kW4A16PlanesWarps; k_warp += kParts) {
        if (k_warp + part < 1 << plan.k_shift) {
          const uint4 four = ptx::load_shared16(from + 2 * (k_warp + part) * kSliceBytes);
          total[0] += __uint_as_float(four.x);
          total[1] += __uint_as_float(four.y);
          total[2] += __uint_as_float(four.z);
          total[3] += __uint_as_float(four.w);
        }
      }
      float sum = add_parts<kWords>(total);
      const uint32_t others = place.others + warp / 2 * kSliceBytes + token * 64 + column * 4;
      if (plan.cluster_shift > 0) {
        if (own) {
          ptx::barrier_wait(place.others_there(), 0);
          sum += __uint_as_float(ptx::load_shared4(others));
        } else {
          if (part % (kParts / 4) == 0) {
            ptx::store_async4(ptx::peer_address(others, 1 - rank), __float_as_uint(sum),
                              ptx::peer_address(place.others_there(), 1 - rank));
          }
        }
      }
      if (stores) {
        store(args, token, row, sum + bias);
      }
    }
    if (!last) {
      ptx::group_sync(1, 32 * kW4A16PlanesWarps);
    }
  }

  static __device__ __forceinline__ void multiply_tiles(const W4A16PlanesArgs& args,
                                                        const Place& place,
                                                        const Share& share) {
    const Reader reader(args.plan, place);
    const bool works = static_cast<int>(threadIdx.x >> 5) < args.plan.row_warps
                                                                << args.plan.k_shift;
    ptx::wait_for_predecessor();
    convert(args, place, share);
    ptx::group_sync(2, kW4A16PlanesThreads);  // barriers have been initialised, too
    int count = 0;
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      const int slices = slices_of(args.plan, tile);
      Sums sums = {};
      if (works) {
        accumulate(sums, args.plan, place, share, reader, tile, count);
      }
      count += share.steps;
      finish(sums, args, place, first_slice(args.plan, tile), slices,
             tile + share.tile_step >= args.plan.tiles);
    }
  }
};

/// y of the tiles that args.plan gives to this block.
template <int kGroupSize, int kTokens>
__global__ void __launch_bounds__(kW4A16PlanesThreads, 1)
    gemm_w4a16_planes_sm90(const __grid_constant__ W4A16PlanesArgs args) {
  using Loop = W4A16PlanesLoop<kGroupSize, kTokens>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 127U) & ~127U;
  const typename Loop::Share share(args);
  const typename Loop::Place place(base, args.plan);
  ptx::allow_successor();
  const bool shares = args.plan.cluster_shift > 0;
  const int lane = static_cast<int>(threadIdx.x) - 32 * kW4A16PlanesWarps;
  if (lane < 0) {
    if (shares) {
      ptx::cluster_arrive_relaxed();
    }
    Loop::multiply_tiles(args, place, share);
    return;
  }
  if (lane == 0) {  // several lanes would take turns, too, and longer
#pragma unroll 1
    for (int slot = 0; slot < args.plan.stages; ++slot) {
      ptx::barrier_init(place.full(slot), 1);
      ptx::barrier_init(place.empty(slot),
                        (args.plan.row_warps << args.plan.step_shift) * ptx::kWarpArrivals);
    }
    if (shares) {
      ptx::barrier_init(place.others_there(), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncwarp();
  ptx::group_arrive(2, kW4A16PlanesThreads);
  if (lane == 0) {  // the other lanes end: this one alone arrives, and waits, for the warp
    if (shares) {
      ptx::cluster_arrive_relaxed();
    }
    Loop::fill_ring(args, place, share);
    if (shares) {
      ptx::cluster_wait();
    }
  }
}

}  // namespace nibble::cuda
