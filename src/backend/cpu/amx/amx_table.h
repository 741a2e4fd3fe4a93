#pragma once

// The AMX kernels as entries of a kernel table.

#include "backend/cpu/amx/amx_few.h"
#include "backend/cpu/kernels/row_kernels.h"

namespace nibble::cpu {
namespace {

template <typename Panel>
void tile_gemm_float(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if constexpr (!Panel::kDirect) {
    const int64_t products = task.w.groups > 1 ? task.w.group_size / 32 : 0;
    if (products == 1) {
      return tile_gemm_grouped<Panel, 1>(task, tile_begin, tile_end);
    }
    if (products == 2) {
      return tile_gemm_grouped<Panel, 2>(task, tile_begin, tile_end);
    }
    if (products == 4) {
      return tile_gemm_grouped<Panel, 4>(task, tile_begin, tile_end);
    }
  }
  tile_gemm<Panel, FloatSums>(task, tile_begin, tile_end);
}

void tile_gemm_int4(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.m > 16 || task.w.groups <= 1) {
    return tile_gemm_float<Int4Pairs>(task, tile_begin, tile_end);
  }
  switch (task.w.group_size) {
    case 32:
      return tile_gemm_few<1>(task, tile_begin, tile_end);
    case 64:
      return tile_gemm_few<2>(task, tile_begin, tile_end);
    default:
      return tile_gemm_few<4>(task, tile_begin, tile_end);
  }
}

/// A row rounded to bf16, as the pieces of TileGemmTask, padded with zeros.
void round_pieces(ConstNumbers row, int64_t k, uint8_t* out, int64_t slab_stride) {
  const auto* given = static_cast<const uint8_t*>(row.data);
  const bool is_bf16 = row.type == Element::kBf16;
  for (int64_t i = 0; i < k; i += 32) {
    const int64_t left = k - i;
    if (is_bf16 && left >= 32) {
      Simd::store_int(out, Simd::load_int(given + 2 * i));
    } else {
      const F32x16 low = load_numbers(row, i, left < 16 ? left : 16);
      const F32x16 high =
          left > 16 ? load_numbers(row, i + 16, left < 32 ? left - 16 : 16) : Simd::set(0.0F);
      Simd::store_bf16(out, low);
      Simd::store_bf16(out + 32, high);
    }
    const bool slab_ends = i / 32 % kSlabPieces == kSlabPieces - 1;
    out += slab_ends ? slab_stride - (kSlabPieces - 1) * kTileBytes : kTileBytes;
  }
}

/// The same, rounded as FixedRow says.
template <Element kType>
void fixed_pieces(const FixedRow& row, int64_t slab_stride) {
  uint8_t* out = row.out;
  in_groups<kType>(
      row, [&](int64_t first, float unit) __attribute__((always_inline)) {
        const F32x16 shift = Simd::set(unit * rounding_shift(0));
        for (int64_t i = first; i < first + row.group_size; i += 32) {
          const F32x16 low = load_as_bf16<kType>(row, i);
          const F32x16 high = load_as_bf16<kType>(row, i + 16);
          Simd::store_bf16(out, Simd::sub(Simd::add(low, shift), shift));
          Simd::store_bf16(out + 32, Simd::sub(Simd::add(high, shift), shift));
          const bool slab_ends = i / 32 % kSlabPieces == kSlabPieces - 1;
          out += slab_ends ? slab_stride - (kSlabPieces - 1) * kTileBytes : kTileBytes;
        }
      });
}

void fixed_pieces(const FixedRow& row, int64_t slab_stride) {
  return row.x.type == Element::kF32 ? fixed_pieces<Element::kF32>(row, slab_stride)
                                     : fixed_pieces<Element::kBf16>(row, slab_stride);
}

constexpr KernelTable with_tiles(KernelTable table) {
  table.tiles_bf16 = tile_gemm_float<DirectPanel>;
  table.tiles_int8 = tile_gemm_float<CodecPairs<CodecInt8>>;
  table.tiles_fp8 = tile_gemm_float<CodecPairs<CodecFp8>>;
  table.tiles_int4 = tile_gemm_int4;
  table.tiles_int8_int8 = tile_gemm<DirectPanel, Int8Sums>;
  table.tiles_int4_int8 = tile_gemm<Int4Bytes, Int4Sums>;
  table.round_pieces = round_pieces;
  table.fixed_pieces = fixed_pieces;
  return table;
}

}  // namespace
}  // namespace nibble::cpu
