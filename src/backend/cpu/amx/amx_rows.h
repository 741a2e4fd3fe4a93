#pragma once

// Rows of activations as pieces of TileGemmTask.

#include "backend/cpu/kernels/fixed_rows.h"

namespace nibble::cpu {
namespace {

/// A row rounded to bf16, as the pieces of TileGemmTask, padded with zeros.
inline void round_pieces(ConstNumbers row, int64_t k, uint8_t* out, int64_t slab_stride) {
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
          const F32x16 low = load_as_bf16<kType>(row.x, i);
          const F32x16 high = load_as_bf16<kType>(row.x, i + 16);
          Simd::store_bf16(out, Simd::sub(Simd::add(low, shift), shift));
          Simd::store_bf16(out + 32, Simd::sub(Simd::add(high, shift), shift));
          const bool slab_ends = i / 32 % kSlabPieces == kSlabPieces - 1;
          out += slab_ends ? slab_stride - (kSlabPieces - 1) * kTileBytes : kTileBytes;
        }
      });
}

/// Codes of rows in blocks of 32: eight columns are a quarter of a piece, whose order is that of
/// the weights' pairs.
inline void bf16_pieces(const int8_t* codes, int64_t k, uint8_t* out, int64_t slab_stride) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  for (int64_t i = 0; i < k; i += 32) {
    const auto* at = reinterpret_cast<const uint8_t*>(codes + i);
    Simd::store_bf16(out, Simd::to_float(Simd::load_s8(at)));
    Simd::store_bf16(out + 32, Simd::to_float(Simd::load_s8(at + 16)));
    _mm512_store_si512(out, _mm512_shuffle_epi8(_mm512_load_si512(out), order));
    const bool slab_ends = i / 32 % kSlabPieces == kSlabPieces - 1;
    out += slab_ends ? slab_stride - (kSlabPieces - 1) * kTileBytes : kTileBytes;
  }
}

inline void fixed_pieces(const FixedRow& row, int64_t slab_stride) {
  return row.x.type == Element::kF32 ? fixed_pieces<Element::kF32>(row, slab_stride)
                                     : fixed_pieces<Element::kBf16>(row, slab_stride);
}

}  // namespace
}  // namespace nibble::cpu
