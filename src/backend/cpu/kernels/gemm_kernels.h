#pragma once

// Matrix products over packed weights; see PackedWeights for the layouts. Needs one simd_*.h
// included before. A row's sum is taken in the same order for every m: blocks of at most 32
// columns, in each the even and the odd columns apart, then even + odd (what one AMX tile product
// does); blocks are added within a group, then the group's scale is applied.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

/// How far ahead weights are fetched into the second level.
inline int64_t far_ahead(const PackedWeights& w) {
  return w.fetch_far ? Simd::kFarBytes : Simd::kNearBytes;
}

/// Fetches what one step of weights, `bytes` long, will need later.
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* codes, int64_t bytes, int64_t far) {
#pragma GCC unroll 8
  for (int64_t b = 0; b < bytes; b += 64) {
    __builtin_prefetch(codes + Simd::kNearBytes + b);
    if constexpr (Simd::kFarBytes > 0) {
      __builtin_prefetch(codes + far + b, 0, 2);
    }
  }
}

// Each codec decodes columns of a step of 16 rows, for kRows rows of activations.
struct CodecF32 {
  static constexpr int64_t kStepBytes = 512;
  struct Step {
    const uint8_t* p;
  };
  static Step step(const uint8_t* p) { return {p}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::load(reinterpret_cast<const float*>(s.p) + kColumn * 16);
  }
};

struct CodecF16 {
  static constexpr int64_t kStepBytes = 256;
  using Step = CodecF32::Step;
  static Step step(const uint8_t* p) { return {p}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::load_f16(s.p + kColumn * 32);
  }
};

struct CodecBf16 {  // a lane's word is two neighbours of k, the lower one low
  static constexpr int64_t kStepBytes = 256;
  using Step = CodecF32::Step;
  static Step step(const uint8_t* p) { return {p}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    const I32x16 pair = Simd::load_int(s.p + kColumn / 2 * 64);
    return Simd::from_bits(kColumn % 2 == 0
                               ? Simd::shift_left<16>(pair)
                               : Simd::and_int(pair, Simd::set_int(static_cast<int>(0xffff0000U))));
  }
};

struct CodecInt8 {
  static constexpr int64_t kStepBytes = 128;
  using Step = CodecF32::Step;
  static Step step(const uint8_t* p) { return {p}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::to_float(Simd::load_s8(s.p + kColumn * 16));
  }
};

struct CodecFp8 {  // values times 2^-8; the scales carry the 2^8
  static constexpr int64_t kStepBytes = 128;
  using Step = CodecF32::Step;
  static Step step(const uint8_t* p) { return {p}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::load_fp8(s.p + kColumn * 16);
  }
};

struct CodecInt4 {
  static constexpr int64_t kStepBytes = 64;
  struct Step {
    I32x16 word;
  };
  static Step step(const uint8_t* p) { return {Simd::load_int(p)}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    constexpr int kIndex = kColumn / 2 + kColumn % 2 * 4;
    if constexpr (Simd::kFewRegisters && kRows > 1) {  // needs four constants fewer
      const I32x16 code = Simd::and_int(Simd::shift_right<4 * kIndex>(s.word), Simd::set_int(15));
      return Simd::sub(Simd::to_float(code), Simd::set(8.0F));
    } else {
      return Simd::nibble<kIndex>(s.word);
    }
  }
};

struct CodecFp4 {
  static constexpr int64_t kStepBytes = 64;
  using Step = CodecInt4::Step;
  static Step step(const uint8_t* p) { return {Simd::load_int(p)}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::fp4<kColumn / 2 + kColumn % 2 * 4>(s.word);
  }
};

/// Codes minus the zero points of their group, which the step has from its block.
template <typename Codec>
struct WithZeros {
  static constexpr int64_t kStepBytes = Codec::kStepBytes;
  struct Step {
    typename Codec::Step codes;
    F32x16 zeros;
  };
  static Step step(const uint8_t* p, F32x16 zeros) { return {Codec::step(p), zeros}; }
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    return Simd::sub(Codec::template column<kColumn, kRows>(s.codes), s.zeros);
  }
};

/// Scales or minimums of 16 rows in one group, which lie as those of all groups at `numbers`.
[[gnu::always_inline]] inline F32x16 load_group(ScaleType type,
                                                const void* numbers,
                                                int64_t index) {
  const auto* halves = static_cast<const uint8_t*>(numbers) + index * 32;
  switch (type) {
    case ScaleType::kBf16:
      return load_bf16(halves);
    case ScaleType::kF16:
      return Simd::load_f16(halves);
    case ScaleType::kF32:
      break;
  }
  return Simd::load(static_cast<const float*>(numbers) + index * 16);
}

inline F32x16 load_scales(const PackedWeights& w, int64_t index) {
  return load_group(w.scale_type, w.scales, index);
}

inline F32x16 load_minimums(const PackedWeights& w, int64_t index) {
  return load_group(w.scale_type, w.minimums, index);
}

/// Weights with minimums, to the bit of a file's: each is rounded once, after its scale. Sums need
/// no scale then.
struct CodecInt4Minimums {
  static constexpr int64_t kStepBytes = 64;
  static constexpr bool kScaled = true;
  struct Step {
    I32x16 word;
    F32x16 scales;
    F32x16 minimums;
  };
  template <int kColumn, int kRows>
  static F32x16 column(const Step& s) {
    constexpr int kIndex = kColumn / 2 + kColumn % 2 * 4;
    const I32x16 code = Simd::and_int(Simd::shift_right<4 * kIndex>(s.word), Simd::set_int(15));
    return Simd::fma(Simd::to_float(code), s.scales, s.minimums);
  }
};

/// The zero points of 16 rows in one group.
inline F32x16 load_zeros(const PackedWeights& w, int64_t index) {
  return Simd::to_float(Simd::load_s8(w.zeros + index * 16));
}

/// What the steps of the block that begins at column k have in common.
template <typename Codec>
struct BlockOf {
  BlockOf(const PackedWeights&, int64_t, int64_t) {}
  typename Codec::Step step(const uint8_t* p) const { return Codec::step(p); }
};
template <typename Codec>
struct BlockOf<WithZeros<Codec>> {
  F32x16 zeros;
  BlockOf(const PackedWeights& w, int64_t tile, int64_t k)
      : zeros(load_zeros(w, tile * w.groups + k / w.group_size)) {}
  typename WithZeros<Codec>::Step step(const uint8_t* p) const {
    return WithZeros<Codec>::step(p, zeros);
  }
};

template <>
struct BlockOf<CodecInt4Minimums> {
  F32x16 scales;
  F32x16 minimums;
  BlockOf(const PackedWeights& w, int64_t tile, int64_t k) {
    const int64_t index = tile * w.groups + k / w.group_size;
    scales = load_scales(w, index);
    minimums = load_minimums(w, index);
  }
  CodecInt4Minimums::Step step(const uint8_t* p) const {
    return {Simd::load_int(p), scales, minimums};
  }
};

template <int kRows>
struct RowSet {
  const float* p[kRows];
};

template <typename Codec, int kRows, int kColumn>
[[gnu::always_inline]] inline void add_column(const typename Codec::Step& step,
                                              const RowSet<kRows>& x,
                                              int64_t k,
                                              F32x16 (&acc)[kRows][2]) {
  const F32x16 w = Codec::template column<kColumn, kRows>(step);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r][kColumn % 2] = Simd::fma(Simd::set(x.p[r][k + kColumn]), w, acc[r][kColumn % 2]);
  }
}

template <typename Codec, int kRows>
[[gnu::always_inline]] inline void add_step(const BlockOf<Codec>& block,
                                            const uint8_t* codes,
                                            int64_t far,
                                            const RowSet<kRows>& x,
                                            int64_t k,
                                            F32x16 (&acc)[kRows][2]) {
  if constexpr (!requires { Codec::kNear; }) {
    fetch_ahead(codes, Codec::kStepBytes, far);
  }
  const typename Codec::Step step = block.step(codes);
  // In this order two nibbles of one shifted word follow each other.
  add_column<Codec, kRows, 0>(step, x, k, acc);
  add_column<Codec, kRows, 1>(step, x, k, acc);
  add_column<Codec, kRows, 2>(step, x, k, acc);
  add_column<Codec, kRows, 3>(step, x, k, acc);
  add_column<Codec, kRows, 4>(step, x, k, acc);
  add_column<Codec, kRows, 5>(step, x, k, acc);
  add_column<Codec, kRows, 6>(step, x, k, acc);
  add_column<Codec, kRows, 7>(step, x, k, acc);
}

/// The last k % 8 columns: a step whose missing activations are 0.
template <typename Codec, int kRows>
[[gnu::noinline]] void add_tail(const BlockOf<Codec>& block,
                                const uint8_t* codes,
                                const RowSet<kRows>& x,
                                int64_t k,
                                int64_t columns,
                                F32x16 (&acc)[kRows][2]) {
  float padded[kRows][kStepColumns] = {};
  RowSet<kRows> rows;
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(padded[r], x.p[r] + k, static_cast<size_t>(columns) * 4);
    rows.p[r] = padded[r];
  }
  add_step<Codec, kRows>(block, codes, Simd::kNearBytes, rows, 0, acc);
}

template <int kRows>
[[gnu::always_inline]] inline void clear(F32x16 (&acc)[kRows][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = Simd::set(0.0F);
    acc[r][1] = Simd::set(0.0F);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void set_zero(F32x16 (&sums)[kRows]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Simd::set(0.0F);
  }
}

/// How scales lie along k: none, or one per group of one block or of several.
enum class Groups { kNone, kOneBlock, kManyBlocks };

/// What a tile sums beyond one block of columns; a group's scale follows once per group.
template <Groups kGroups, int kRows>
struct TileSums {
  F32x16 (&total)[kRows];
  const PackedWeights& w;
  int64_t scale_index;
  int64_t blocks_of_group;
  int64_t blocks_left;
  F32x16 group[kRows];

  [[gnu::always_inline]] TileSums(const PackedWeights& weights, int64_t tile, F32x16 (&sums)[kRows])
      : total(sums),
        w(weights),
        scale_index(tile * weights.groups),
        blocks_of_group(kGroups == Groups::kManyBlocks ? weights.group_size / weights.block : 1),
        blocks_left(blocks_of_group) {
    set_zero(group);
  }

  /// Before the loop over a block, whose own sums and constants need all registers.
  [[gnu::always_inline]] void leave_registers() { asm volatile("" : "+m"(total), "+m"(group)); }

  [[gnu::always_inline]] void add_block(const F32x16 (&acc)[kRows][2]) {
    const F32x16 scale =
        kGroups == Groups::kOneBlock ? load_scales(w, scale_index++) : Simd::set(1.0F);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32x16 sum = Simd::add(acc[r][0], acc[r][1]);
      if constexpr (kGroups == Groups::kNone) {
        total[r] = Simd::add(total[r], sum);
      } else if constexpr (kGroups == Groups::kOneBlock) {
        total[r] = Simd::fma(sum, scale, total[r]);
      } else {
        group[r] = Simd::add(group[r], sum);
      }
    }
    if (kGroups == Groups::kManyBlocks && --blocks_left == 0) {
      close_group();
    }
  }

  /// After the last block: of a group that the columns end in.
  [[gnu::always_inline]] void finish() {
    if (kGroups == Groups::kManyBlocks && blocks_left < blocks_of_group) {
      close_group();
    }
  }

  [[gnu::always_inline]] void close_group() {
    const F32x16 scale = load_scales(w, scale_index++);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      total[r] = Simd::fma(group[r], scale, total[r]);
    }
    set_zero(group);
    blocks_left = blocks_of_group;
  }
};

/// Adds one tile times kRows rows of x.
template <typename Codec, Groups kGroups, int kRows>
void tile_product(const PackedWeights& w,
                  int64_t tile,
                  const RowSet<kRows>& x,
                  F32x16 (&total)[kRows]) {
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  const int64_t far = far_ahead(w);
  TileSums<kGroups, kRows> sums(w, tile, total);
  int64_t k = 0;
  while (k + w.block <= w.k) {
    if constexpr (Simd::kFewRegisters && (kRows == 1 || kGroups == Groups::kManyBlocks)) {
      sums.leave_registers();
    }
    const BlockOf<Codec> block(w, tile, k);
    F32x16 acc[kRows][2];
    clear(acc);
    for (const int64_t end = k + w.block; k < end; k += kStepColumns) {
      add_step<Codec, kRows>(block, codes, far, x, k, acc);
      codes += Codec::kStepBytes;
    }
    sums.add_block(acc);
  }
  if (k < w.k) {
    const BlockOf<Codec> block(w, tile, k);
    F32x16 acc[kRows][2];
    clear(acc);
    for (; k + kStepColumns <= w.k; k += kStepColumns) {
      add_step<Codec, kRows>(block, codes, far, x, k, acc);
      codes += Codec::kStepBytes;
    }
    if (k < w.k) {
      add_tail<Codec, kRows>(block, codes, x, k, w.k - k, acc);
    }
    sums.add_block(acc);
  }
  sums.finish();
}

inline void write_tile_row(const ProductTask& task, int64_t row, int64_t tile, F32x16 value) {
  const int64_t column = tile * kTileRows;
  const int64_t left = task.w.n - column;
  const int64_t lanes = left < kTileRows ? left : kTileRows;
  const int64_t at = row * task.y_stride + column;
  if (task.bias != nullptr) {
    value = Simd::add(value, load_lanes(task.bias + column, lanes));
  }
  if (task.add) {
    value = Simd::add(load_lanes(static_cast<const float*>(task.y.data) + at, lanes), value);
  }
  store_numbers(task.y, at, lanes, value);
}

/// Sums of a row to which the weights' scales have been applied, with that of the activations, if
/// they have one.
inline F32x16 with_token_scale(const ProductTask& task, int64_t row, F32x16 sums) {
  return task.x_scales == nullptr ? sums : Simd::mul(sums, Simd::set(task.x_scales[row]));
}

/// Writes what kRows rows and one tile sum to; `scaled`: a scale per channel is still due.
template <int kRows>
[[gnu::always_inline]] inline void write_rows(
    const GemmTask& task, int64_t tile, int64_t row, bool scaled, const F32x16 (&sums)[kRows]) {
  const F32x16 scales = scaled ? load_scales(task.w, tile) : Simd::set(1.0F);
  for (int r = 0; r < kRows; ++r) {
    const F32x16 value = scaled ? Simd::mul(sums[r], with_token_scale(task, row + r, scales))
                                : with_token_scale(task, row + r, sums[r]);
    write_tile_row(task, row + r, tile, value);
  }
}

template <int kRows>
[[gnu::always_inline]] inline RowSet<kRows> rows_of(const GemmTask& task, int64_t row, int64_t k) {
  RowSet<kRows> x;
  for (int r = 0; r < kRows; ++r) {
    x.p[r] = task.x + (row + r) * task.x_stride + k;
  }
  return x;
}

template <typename Codec, Groups kGroups, int kRows>
void float_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const RowSet<kRows> x = rows_of<kRows>(task, row, 0);
  F32x16 sums[kRows];
  set_zero(sums);
  tile_product<Codec, kGroups, kRows>(task.w, tile, x, sums);
  constexpr bool kUnscaled = kGroups == Groups::kNone && !requires { Codec::kScaled; };
  write_rows(task, tile, row, kUnscaled && task.w.groups == 1, sums);
}

template <int kRows, typename Body>
[[gnu::always_inline]] inline void in_row_blocks(int64_t m, const Body& body) {
  int64_t row = 0;
  for (; row + kRows <= m; row += kRows) {
    body.template operator()<kRows>(row);
  }
  if constexpr (kRows > 4) {
    for (; row + 4 <= m; row += 4) {
      body.template operator()<4>(row);
    }
  }
  if constexpr (kRows > 2) {
    for (; row + 2 <= m; row += 2) {
      body.template operator()<2>(row);
    }
  }
  for (; row < m; ++row) {
    body.template operator()<1>(row);
  }
}

template <typename Codec, Groups kGroups>
void float_tiles(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    in_row_blocks<Simd::kRows>(task.m, [&]<int kRows>(int64_t row) {
      float_rows<Codec, kGroups, kRows>(task, tile, row);
    });
  }
}

template <typename Codec>
void gemm_float(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.w.groups == 0 || task.w.group_size == task.w.k) {
    return float_tiles<Codec, Groups::kNone>(task, tile_begin, tile_end);
  }
  if (task.w.group_size == task.w.block) {
    return float_tiles<Codec, Groups::kOneBlock>(task, tile_begin, tile_end);
  }
  return float_tiles<Codec, Groups::kManyBlocks>(task, tile_begin, tile_end);
}

// --- int8 activations: exact sums of integer products, one scale at the end ---

/// Sixteen rows by four columns at once; kHalf picks the columns of the step.
struct IntCodecInt8 {  // weights are signed, activations offset
  static constexpr bool kShortSums = false;
  static constexpr int64_t kStepBytes = 128;
  template <int kHalf>
  static I32x16 dot(I32x16 acc, const uint8_t* w, I32x16 x) {
    return Simd::dot_int8(acc, x, Simd::load_int(w + kHalf * 64));
  }
  static I32x16 correction(const ProductTask& task, int64_t tile, int64_t /*row*/) {
    static_assert(Simd::kInt8Offset == 0 || Simd::kInt8Offset == 128);
    return Simd::kInt8Offset == 0
               ? Simd::set_int(0)
               : Simd::shift_left<7>(Simd::load_int(task.w.row_sums + tile * kTileRows));
  }
};

struct IntCodecInt4 {  // weights are offset by 8 and unsigned, activations signed
  static constexpr bool kShortSums = Simd::kShortRows > 0;
  static constexpr int64_t kStepBytes = 64;
  template <int kHalf>
  static I32x16 nibbles(const uint8_t* w) {
    return Simd::and_int(Simd::shift_right<kHalf * 4>(Simd::load_int(w)),
                         Simd::set_int(0x0f0f0f0f));
  }
  template <int kHalf>
  static I32x16 dot(I32x16 acc, const uint8_t* w, I32x16 x) {
    return Simd::dot_u4s8(acc, nibbles<kHalf>(w), x);
  }
  static I32x16 correction(const ProductTask& task, int64_t /*tile*/, int64_t row) {
    return Simd::shift_left<3>(Simd::set_int(task.x_sums[row]));
  }
};

inline I32x16 four_bytes(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return Simd::set_int(word);
}

/// A row of one tile from the sum of its products.
template <typename Codec>
[[gnu::always_inline]] inline F32x16 int_result(
    const ProductTask& task, int64_t row, int64_t tile, F32x16 scales, I32x16 products) {
  const I32x16 sum = Simd::sub_int(products, Codec::correction(task, tile, row));
  return Simd::mul(Simd::to_float(sum), Simd::mul(scales, Simd::set(task.x_scales[row])));
}

/// Sums of products of kRows rows with one tile.
template <typename Codec, int kRows>
[[gnu::always_inline]] inline void int_sums(const GemmTask& task,
                                            const uint8_t* codes,
                                            const uint8_t* x,
                                            I32x16 (&sums)[kRows]) {
  constexpr int kSums = Simd::kFewRegisters ? 1 : 2;
  I32x16 acc[kRows][kSums];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = Simd::set_int(0);
    acc[r][kSums - 1] = Simd::set_int(0);
  }
  const int64_t far = far_ahead(task.w);
  for (int64_t k = 0; k < task.w.k; k += kStepColumns) {
    fetch_ahead(codes, Codec::kStepBytes, far);
    const uint8_t* at = x + k;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* p = at + r * task.xq_stride;
      acc[r][0] = Codec::template dot<0>(acc[r][0], codes, four_bytes(p));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* p = at + r * task.xq_stride + 4;
      acc[r][kSums - 1] = Codec::template dot<1>(acc[r][kSums - 1], codes, four_bytes(p));
    }
    codes += Codec::kStepBytes;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = kSums == 1 ? acc[r][0] : Simd::add_int(acc[r][0], acc[r][kSums - 1]);
  }
}

template <typename V, int kHalf, int kRows>
[[gnu::always_inline]] inline void add_short_half(const uint8_t* codes,
                                                  const uint8_t* x,
                                                  int64_t x_stride,
                                                  I32x16 (&part)[kRows]) {
  const I32x16 nibbles = IntCodecInt4::nibbles<kHalf>(codes);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    part[r] = V::add_short(part[r], nibbles, four_bytes(x + r * x_stride + 4 * kHalf));
  }
}

/// The same of int4, in 16 bits for 32 columns at a time: eight sums of two products of at most
/// 15 * 128 each fit. Columns up to the next multiple of 32 are there, as zeros. V is Simd, where
/// it has such sums.
template <typename V, int kRows>
[[gnu::always_inline]] inline void short_sums(const GemmTask& task,
                                              const uint8_t* codes,
                                              const uint8_t* x,
                                              I32x16 (&sums)[kRows]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = Simd::set_int(0);
  }
  const int64_t far = far_ahead(task.w);
  for (int64_t k = 0; k < task.w.k; k += 4 * kStepColumns) {
    if constexpr (kRows > 2) {
      asm volatile("" : "+m"(sums));  // the 16-bit sums need the registers
    }
    I32x16 part[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      part[r] = Simd::set_int(0);
    }
    const auto next_step = [&]() __attribute__((always_inline)) {
      fetch_ahead(codes, IntCodecInt4::kStepBytes, far);
      add_short_half<V, 0>(codes, x, task.xq_stride, part);
      add_short_half<V, 1>(codes, x, task.xq_stride, part);
      codes += IntCodecInt4::kStepBytes;
      x += kStepColumns;
    };
    if constexpr (kRows == 1) {
      next_step();
      next_step();
      next_step();
      next_step();
    } else {
#pragma GCC unroll 1  // unrolled, gcc runs out of registers
      for (int64_t step = 0; step < 4; ++step) {
        next_step();
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Simd::add_int(sums[r], V::widen_short(part[r]));
    }
  }
}

template <typename Codec, int kRows>
void int_rows(const GemmTask& task, int64_t tile, int64_t row) {
  const uint8_t* codes = task.w.codes + tile * task.w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  I32x16 sums[kRows];
  if constexpr (Codec::kShortSums) {
    short_sums<Simd, kRows>(task, codes, x, sums);
  } else {
    int_sums<Codec, kRows>(task, codes, x, sums);
  }
  const F32x16 scales = load_scales(task.w, tile);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    write_tile_row(task, row + r, tile, int_result<Codec>(task, row + r, tile, scales, sums[r]));
  }
}

template <typename Codec, int kHalf, int kRows>
[[gnu::always_inline]] inline void add_pair_half(const uint8_t* codes,
                                                 int64_t tile_bytes,
                                                 const uint8_t* x,
                                                 int64_t x_stride,
                                                 I32x16 (&acc)[kRows][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const I32x16 four = four_bytes(x + r * x_stride + 4 * kHalf);
    acc[r][0] = Codec::template dot<kHalf>(acc[r][0], codes, four);
    acc[r][1] = Codec::template dot<kHalf>(acc[r][1], codes + tile_bytes, four);
  }
}

/// Two weight tiles times kRows rows: each activation that is loaded is used twice.
template <typename Codec, int kRows>
void int_pair(const GemmTask& task, int64_t tile, int64_t row) {
  const uint8_t* codes = task.w.codes + tile * task.w.tile_bytes;
  const uint8_t* x = task.xq + row * task.xq_stride;
  I32x16 acc[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = Simd::set_int(0);
    acc[r][1] = Simd::set_int(0);
  }
  for (int64_t k = 0; k < task.w.k; k += kStepColumns) {
    add_pair_half<Codec, 0>(codes, task.w.tile_bytes, x + k, task.xq_stride, acc);
    add_pair_half<Codec, 1>(codes, task.w.tile_bytes, x + k, task.xq_stride, acc);
    codes += Codec::kStepBytes;
  }
  for (int64_t t = 0; t < 2; ++t) {
    const F32x16 scales = load_scales(task.w, tile + t);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      write_tile_row(task, row + r, tile + t,
                     int_result<Codec>(task, row + r, tile + t, scales, acc[r][t]));
    }
  }
}

template <typename Codec>
void gemm_int(const GemmTask& task, int64_t tile_begin, int64_t tile_end) {
  int64_t paired = 0;  // rows that pairs of tiles take
  int64_t pairs_end = tile_begin;
  if constexpr (Simd::kPairRows > 0) {
    paired = task.m / Simd::kPairRows * Simd::kPairRows;
    pairs_end = tile_begin + (tile_end - tile_begin) / 2 * 2;
    for (int64_t tile = tile_begin; tile < pairs_end; tile += 2) {
      for (int64_t row = 0; row < paired; row += Simd::kPairRows) {
        int_pair<Codec, Simd::kPairRows>(task, tile, row);
      }
    }
  }
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = tile < pairs_end ? paired : 0;
    constexpr int kMost = Codec::kShortSums     ? Simd::kShortRows
                          : Simd::kFewRegisters ? 4  // of one sum each
                                                : Simd::kRows;
    in_row_blocks<kMost>(task.m - first, [&]<int kRows>(int64_t row) {
      int_rows<Codec, kRows>(task, tile, first + row);
    });
  }
}

}  // namespace
}  // namespace nibble::cpu
