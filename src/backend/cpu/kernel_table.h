#pragma once

#include <cstdint>

#include "backend/cpu/attention_task.h"
#include "core/gemm_input.h"
#include "ops/silu_form.h"

namespace nibble::cpu {

// What the backend hands to code compiled for one instruction set: plain structs without inline
// functions, so that no symbol compiled for a newer CPU can be picked by the linker for an older
// one.

constexpr int64_t kTileRows = 16;    // output channels of one weight tile: the lanes of a vector
constexpr int64_t kStepColumns = 8;  // input channels of one step of a tile
constexpr int64_t kRowPanel = 96;    // most rows of a GemmTask: they stay in the second-level cache
constexpr int64_t kMaxBlock = 32;    // input channels summed before a scale is applied
constexpr int64_t kLevelBytes = 32;  // of a tile's group in two levels, beside its codes

/// In which type scales and minimums are packed.
enum class ScaleType : uint8_t { kF32, kBf16, kF16 };

/// Weights in tiles of 16 output channels; a tile is k/8 (rounded up) steps of 8 input channels:
///   f32, f16   [8][16] elements            int8 for f32 activations, fp8   [8][16] bytes
///   bf16   [4][16][2] elements (two neighbours of k per lane: a row of an AMX tile)
///   int8 for int8 activations: [2][16][4] bytes  (four neighbours of k per lane)
///   int4, fp4   [16] words. For int8 activations column c of the step is nibble 2c (c < 4) or
///   2(c-4)+1:
///          masking the word gives four neighbouring columns as bytes, shifting it by 4 the other
///          four. Else the lower half holds the even columns, the upper the odd ones: shifting both
///          gives two neighbouring columns in the low bits of the halves.
/// Rows past n and columns past k are zero. Scales, zero points and minimums are
/// [tile][group][16]. Groups in two levels (quant/levels.h), of 64 or 128 columns, have a scale per
/// row like channels, and [tile][group][2][16] bytes of steps and zero points, those as codes of 0
/// to 15.
struct PackedWeights {
  const uint8_t* codes = nullptr;
  int64_t tile_bytes = 0;
  const void* scales = nullptr;
  ScaleType scale_type = ScaleType::kF32;
  int64_t n = 0;
  int64_t k = 0;
  int64_t groups = 0;      // scales per row; 0: none
  int64_t group_size = 0;  // k when one scale covers the row
  int64_t block = kMaxBlock;
  const uint8_t* zeros = nullptr;     // zero points, int8 in the order of scales; null: none
  const void* minimums = nullptr;     // in the type and the order of scales; null: none
  const uint8_t* levels = nullptr;    // steps and zero points of groups in two levels
  int64_t level_columns = 0;          // of such a group
  const int32_t* row_sums = nullptr;  // int8 x int8: sum of the codes of each (padded) row
  bool fetch_far = true;              // see CpuFeatures
};

/// What products of rows and of tiles have in common.
struct ProductTask {
  PackedWeights w;
  const float* x_scales = nullptr;  // per row, for quantized activations
  const int32_t* x_sums = nullptr;
  int64_t m = 0;
  Numbers y;  // F32 when added to
  int64_t y_stride = 0;
  bool add = false;
  const float* bias = nullptr;  // [n] or null
  // Of rows in blocks with several scales: columns of a block, and the bits of each.
  int64_t x_block = 0;
  const uint8_t* x_bits = nullptr;
  int64_t x_code_bytes = 0;  // of a row, whose groups follow
};

struct GemmTask : ProductTask {
  const float* x = nullptr;  // f32 activations, or bf16 or E4M3 values widened to f32
  int64_t x_stride = 0;
  // int8 activations, rows padded with 0 to a multiple of 64; or those of FixedRow, BlocksRow or
  // WideBlocksRow.
  const uint8_t* xq = nullptr;
  int64_t xq_stride = 0;
};

/// Of a group of activations in fixed point, or of rows in blocks: x = unit * code.
struct FixedGroup {
  float unit;    // of fixed point a power of two; NaN when a value is not finite
  int32_t bias;  // -8 times the sum of the codes: weights are multiplied as 0 to 15
};

/// A row to round to bf16 and then, in each group of the weights, to multiples of 2^-13 of the
/// power of two in the group's largest magnitude, or of 2^-113 where that is more. These are still
/// bf16 numbers, and in these units integers of at most 2^14, so that a group's products with int4
/// sum exactly in f32 and in int32 alike. A group with a magnitude of 2^104 or more becomes NaN.
struct FixedRow {
  ConstNumbers x;
  int64_t k = 0;  // a multiple of group_size
  int64_t group_size = 0;
  uint8_t* out = nullptr;  // k codes of 16 bits, then a FixedGroup for each group
};

constexpr int64_t kTileSumRows = 512;     // most rows of a tile task
constexpr int64_t kTileSumColumns = 256;  // output channels whose sums are kept at once
constexpr int64_t kTilePanelBytes = 72 << 10;
constexpr int64_t kTileScratchBytes = kTilePanelBytes + kTileSumRows * kTileSumColumns * 4;

constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
constexpr int64_t kSlabPieces = 8;

/// For AMX. Activations come in tiles: pieces of 64 bytes (64 int8 or 32 bf16 columns) of 16 rows,
/// [slab of 8 pieces][m/16][8][16][64], the last piece padded with zeros. Rows of a slab follow
/// each other, so that a slab takes all sets of a cache alike.
/// Of rows in blocks of 32 the pieces are bf16 codes, each eight columns in the order 0, 2, 4, 6,
/// 1, 3, 5, 7: that in which int4 for int8 activations become pairs.
struct TileGemmTask : ProductTask {
  const uint8_t* x = nullptr;
  int64_t x_pieces = 0;
  int64_t slab_stride = 0;
  const float* x_group_scales = nullptr;  // of rows in blocks: [m/16][blocks][16]
  uint8_t* scratch = nullptr;             // kTileScratchBytes, 64-byte aligned
};

/// A row to round to int8: its codes plus `offset`, in pieces of 64 bytes (see TileGemmTask), the
/// last one padded with zeros.
struct Int8Row {
  ConstNumbers x;
  int64_t k = 0;
  int32_t offset = 0;
  float largest = 0.0F;  // magnitude that becomes 127, of a row that has none above; 0: its own
  uint8_t* out = nullptr;
  int64_t piece_stride = 64;
  int64_t slab_stride = 512;   // of kSlabPieces pieces
  const void* next = nullptr;  // BF16 row to fetch meanwhile, or null
};

/// A row to round to blocks of 4 and 8 bits (quant/block_precision.h): its codes, in pieces as
/// those of Int8Row but without padding, and a unit and a bias for each block.
struct BlocksRow {
  ConstNumbers x;
  int64_t k = 0;      // a multiple of the block
  int64_t block = 0;  // 32, 64 or 128
  const uint8_t* bits = nullptr;
  float clip = 0.0F;
  uint8_t* out = nullptr;
  int64_t piece_stride = 64;
  int64_t slab_stride = 512;     // of kSlabPieces pieces
  FixedGroup* groups = nullptr;  // [k / block]; null: only scales are wanted
  float* scales = nullptr;       // of the blocks, 16 apart; null: groups are wanted
};

/// A row to round to blocks of 8 and 16 bits, round_wide_blocks() in quant/block_rounding.h: its
/// codes one block after the other, those of 16 bits for each 32 columns first the even, then the
/// odd ones, as int4 for int8 activations has pairs of them.
struct WideBlocksRow {
  ConstNumbers x;
  int64_t k = 0;      // a multiple of the block
  int64_t block = 0;  // 32, 64 or 128
  const uint8_t* bits = nullptr;
  uint8_t* out = nullptr;
  FixedGroup* groups = nullptr;  // of all blocks of 8 bits, then of each of 16
};

/// A row of x, and what is done to it.
struct InputRow {
  ConstNumbers x;
  int64_t k = 0;  // of the result
  GemmInput input;
  SiluForm silu;
};

struct Int8RowResult {
  float scale;  // what a code counts: absmax / 127; NaN when the row is not finite
  int32_t sum;  // of the codes
};

// Kernels of one instruction set by family: each is compiled on its own, and is a constant, so that
// no code compiled for a newer CPU runs to make it.

struct GemmKernels {
  int32_t int8_offset = 128;  // of INT8 activations for INT8 weights
  // Tiles tile_begin .. tile_end of a product.
  using Gemm = void (*)(const GemmTask& task, int64_t tile_begin, int64_t tile_end);
  Gemm gemm_f32 = nullptr;
  Gemm gemm_f16 = nullptr;
  Gemm gemm_bf16 = nullptr;
  Gemm gemm_int8 = nullptr;
  Gemm gemm_fp8 = nullptr;
  Gemm gemm_int4 = nullptr;
  Gemm gemm_fp4 = nullptr;
  Gemm gemm_int8_zeros = nullptr;  // weights with zero points
  Gemm gemm_int4_zeros = nullptr;
  Gemm gemm_int4_minimums = nullptr;
  Gemm gemm_int8_int8 = nullptr;
  Gemm gemm_int4_int8 = nullptr;
  Gemm gemm_levels_int8 = nullptr;  // int4 in groups of two levels
  Gemm gemm_int4_fixed = nullptr;   // in groups of 32, 64 or 128
  Gemm gemm_int4_fixed_zeros = nullptr;
  Gemm gemm_int4_fixed_minimums = nullptr;
  Gemm gemm_int4_blocks = nullptr;  // of rows in blocks, weights in groups of as many columns
  Gemm gemm_int4_wide = nullptr;    // of rows in blocks of 8 and 16 bits, weights per channel
};

/// Products in AMX tiles, for bf16 and fp8 activations and int8 ones; null without AMX.
struct TileKernels {
  using TileGemm = void (*)(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end);
  TileGemm tiles_bf16 = nullptr;
  TileGemm tiles_int8 = nullptr;
  TileGemm tiles_fp8 = nullptr;
  TileGemm tiles_int4 = nullptr;
  TileGemm tiles_fp4 = nullptr;
  TileGemm tiles_int8_int8 = nullptr;
  TileGemm tiles_int4_int8 = nullptr;
  TileGemm tiles_levels_int8 = nullptr;
  TileGemm tiles_int4_blocks = nullptr;
  // A row rounded to bf16, as pieces of TileGemmTask; the same rounded again as FixedRow says.
  void (*round_pieces)(ConstNumbers row, int64_t k, uint8_t* out, int64_t slab_stride) = nullptr;
  void (*fixed_pieces)(const FixedRow& row, int64_t slab_stride) = nullptr;
  // int8 codes [k], a multiple of 32, as TileGemmTask has those of rows in blocks of 32.
  void (*bf16_pieces)(const int8_t* codes, int64_t k, uint8_t* out, int64_t slab_stride) = nullptr;
};

/// Codes are (x - offset) * inverse, clamped to 0..15, of each channel.
struct CodeGrid {
  int64_t dim = 0;
  const float* inverses = nullptr;
  const float* offsets = nullptr;
};

struct RowKernels {
  void (*round_fixed)(const FixedRow& row) = nullptr;
  Int8RowResult (*quantize_int8)(const Int8Row& row) = nullptr;
  void (*quantize_blocks)(const BlocksRow& row) = nullptr;
  // The same with one scale for all blocks, padded as Int8Row is: rows of INT8 to products.
  Int8RowResult (*quantize_classes)(const BlocksRow& row) = nullptr;
  void (*quantize_wide_blocks)(const WideBlocksRow& row) = nullptr;
  // k values rounded to E4M3 after division by the scale that is returned, or to BF16, as f32.
  // `largest` is that of Int8Row.
  float (*quantize_fp8)(const float* x, int64_t k, float largest, float* out) = nullptr;
  void (*round_bf16)(const float* x, int64_t k, float* out) = nullptr;
  void (*make_input)(const InputRow& row, float* y) = nullptr;  // y [k], which may be row.x
  void (*rms_norm)(const float* x, int64_t n, const float* weight, float eps, float* y) = nullptr;
  void (*load)(ConstNumbers x, int64_t n, float* y) = nullptr;
  void (*store)(const float* x, int64_t n, Numbers y) = nullptr;  // rounded where y is BF16
  void (*add_weighted)(ConstNumbers x,
                       int64_t n,
                       float weight,
                       float* y) = nullptr;  // y += weight x
  // Rotates one head in place by the angles whose cosines and sines are given [dim/2].
  void (*rotate)(float* head, int64_t dim, const float* cosine, const float* sine) = nullptr;
  // Rounds a row to multiples of 2^-places of the power of two in its largest magnitude.
  void (*round_row)(float* x, int64_t n, int places) = nullptr;
  // Writes one head's keys or values of one token.
  void (*write_kv)(const KvLayout& kv, const float* x, uint8_t* row, float* params) = nullptr;
  // The scale and the offset that INT4 codes of x [n] should have; NaN where one is not finite.
  void (*fit_int4)(const float* x, int64_t n, float* line) = nullptr;
  // INT4 codes of x [grid.dim], two in a byte.
  void (*code_int4)(const float* x, const CodeGrid& grid, uint8_t* row) = nullptr;
};

struct AttentionKernels {
  int64_t attention_rows = 0;  // query rows that a task should have where there are enough
  void (*attention)(const AttentionTask& task) = nullptr;
  // Adds the sums of pieces, `stride` floats apart, to those of the first and writes the results.
  void (*merge_attention)(const AttentionTask& task,
                          float* partials,
                          int64_t pieces,
                          int64_t stride) = nullptr;
};

struct KernelTable : GemmKernels, RowKernels, AttentionKernels, TileKernels {
  const char* name = nullptr;
};

}  // namespace nibble::cpu
