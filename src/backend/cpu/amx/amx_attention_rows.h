#pragma once

// Weights of the rows of a row tile: exponents of BF16 products become BF16 weights.

#include "backend/cpu/amx/amx_attention_weights.h"

namespace nibble::cpu {
namespace {

/// Weighs the rows of a row tile, one at a time. kFull: they all see the whole block. kAll: there
/// are 16.
template <int kCode, bool kFull, bool kAll = false>
class RowWeigher {
 public:
  [[gnu::always_inline]] explicit RowWeigher(const TileRows& rows)
      : maker_(rows),
        least_(kept(ExponentRange<kCode>::kLeast)),
        begin_(kept_bits(shared_bits<kCode>())),
        rows_(rows) {
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      score_scale_[g] = rows.score_scale(g);
    }
  }

  /// Weighs the next row, if one is left. Rows with exponents out of range are left for later.
  [[gnu::always_inline]] void next() {
    if (row_ < (kAll ? 16 : rows_.count)) {
      skipped_ |= static_cast<uint32_t>(weigh(row_)) << row_;
      ++row_;
    }
  }

  /// Weighs all that are left; returns the rows with exponents out of range.
  [[gnu::always_inline]] uint32_t finish() {
    while (row_ < (kAll ? 16 : rows_.count)) {
      next();
    }
    return skipped_;
  }

  /// Scores become weights in BF16; their sums are kept. Does nothing and returns true when an
  /// exponent is not within ExponentRange; kSure: those are clamped.
  template <bool kSure = false>
  [[gnu::always_inline]] bool weigh(int64_t row) {
    const uint64_t seen = kFull ? ~uint64_t{0} : rows_.seen_by(row);
    RowExponents<kCode> exponents = find_exponents(row, seen);
    if (kSure) {
      exponents.clamp();
    } else if (__builtin_expect(exponents.out_of_range(least_, begin_), 0) != 0) {
      return true;
    }
    __m512i pairs[kKeyGroups / 2];
    maker_.make(exponents, seen, rows_.tile.sums[row], pairs);
    for (int64_t i = 0; i < kKeyGroups / 2; ++i) {
      _mm512_storeu_si512(weights_at(rows_.scores) + row * 64 + i * kTileBytes, pairs[i]);
    }
    return false;
  }

  [[gnu::always_inline]] RowExponents<kCode> find_exponents(int64_t row, uint64_t seen) const {
    RowExponents<kCode> exponents;
    const F32x16 shift = Simd::set(rows_.tile.shift[row]);
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      F32x16& exponent = exponents.at[g];
      exponent = scaled_group<kCode>(rows_, row, g, score_scale_[g], shift);
      if constexpr (!kFull) {
        exponent.v = _mm512_mask_mov_ps(Simd::set(ExponentRange<kCode>::kLeast).v,
                                        group_of(seen, g), exponent.v);
      }
    }
    return exponents;
  }

 private:
  WeightMaker<kCode, kFull> maker_;
  F32x16 score_scale_[kKeyGroups];
  F32x16 least_;
  __m512i begin_;
  TileRows rows_;
  int64_t row_ = 0;
  uint32_t skipped_ = 0;
};

/// ExponentRange::kBase minus the largest score that a row sees.
template <int kCode>
float shift_to_top(const TileRows& rows, int64_t row) {
  F32x16 largest = Simd::set(kLowest);
  const uint64_t seen = rows.seen_by(row);
  for (int64_t g = 0; g < kKeyGroups; ++g) {
    const F32x16 score = scaled_group<kCode>(rows, row, g, rows.score_scale(g), Simd::set(0.0F));
    largest.v = _mm512_mask_max_ps(largest.v, group_of(seen, g), score.v, largest.v);
  }
  const float top = Simd::reduce_max(largest);
  return ExponentRange<kCode>::kBase - (rows.whole_tops ? __builtin_ceilf(top) : top);
}

/// Makes a row's largest score its top and rescales its sums.
template <int kCode>
void raise_top(const TileTask& t, const TileRows& rows, int64_t row_tile, int64_t row) {
  const float shift = shift_to_top<kCode>(rows, row);
  const F32x16 factor = Simd::set(exp2_weight(shift - rows.tile.shift[row]));
  rows.tile.shift[row] = shift;
  float* sums = rows.tile.sums[row];
  Simd::store(sums, Simd::mul(Simd::load(sums), factor));
  for (int64_t d = 0; d < 2 * t.width; ++d) {
    auto* acc = reinterpret_cast<float*>(acc_tile(t, row_tile, d) + row * 64);
    Simd::store(acc, rescaled(Simd::load(acc), factor));
  }
}

/// Weighs rows with exponents out of range: raises the tops of those with high ones.
template <int kCode>
[[gnu::noinline]] void weigh_skipped(const TileTask& t,
                                     const TileRows& rows,
                                     int64_t row_tile,
                                     uint32_t skipped) {
  RowWeigher<kCode, false> weigher(rows);
  const auto too_high = [&](int64_t row) {
    RowExponents<kCode> exponents = weigher.find_exponents(row, rows.seen_by(row));
    exponents.clamp();
    return exponents.too_high();
  };
  for (; skipped != 0; skipped &= skipped - 1) {
    const int64_t row = __builtin_ctz(skipped);
    if (too_high(row)) {
      raise_top<kCode>(t, rows, row_tile, row);
      if (too_high(row)) {
        Simd::store(rows.tile.sums[row], Simd::set(__builtin_nanf("")));
      }
    }
    weigher.template weigh<true>(row);
  }
}

/// Raises the tops of rows that have seen no key: they have nothing to rescale.
template <int kCode>
[[gnu::noinline]] void find_first_tops(const TileRows& rows) {
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.tile.shift[row] == ExponentRange<kCode>::kBase - kLowest) {
      rows.tile.shift[row] = shift_to_top<kCode>(rows, row);
    }
  }
}

/// The rows of a row tile, but for those that are returned: with exponents out of range.
template <int kCode>
uint32_t weigh_rows(const TileRows& rows, const TileRange& range) {
  if (rows.have_no_top<kCode>()) {
    find_first_tops<kCode>(rows);
  }
  return range.masked ? RowWeigher<kCode, false>(rows).finish()
                      : RowWeigher<kCode, true>(rows).finish();
}

}  // namespace
}  // namespace nibble::cpu
