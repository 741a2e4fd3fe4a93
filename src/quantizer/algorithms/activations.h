#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "quant/act_spec.h"
#include "quant/block_rounding.h"

namespace nibble {

/// Rows that enter a product.
struct ActivationRows {
  float* x = nullptr;  // [rows, k]
  int64_t rows = 0;
  int64_t k = 0;
};

/// Whether a product of this form rounds its rows to few bits.
[[nodiscard]] constexpr bool rounds_rows(ActFormat act) {
  return act != ActFormat::kFloat && act != ActFormat::kBf16;
}

/// How rows enter a product, all that decides what it makes of them.
struct RowForm {
  ActSpec act;
  BlockScales scales = BlockScales::kEach;  // of rows in blocks: as the product has them

  RowForm() = default;
  RowForm(ActFormat only_format) : act(only_format) {}  // NOLINT(google-explicit-constructor)
  RowForm(ActSpec spec, const WeightFormat& weight)
      : act(std::move(spec)), scales(block_scales_of(weight, act.format)) {}
};

/// A row [k] f32, finite, in the order of the weights' columns, as a product of this form
/// multiplies it: codes times their scale.
void round_row(const RowForm& form, float* row, int64_t k);
/// The same of several rows.
void round_activations(const RowForm& form, const ActivationRows& rows, ThreadPool& pool);
/// Puts the channels of rows into the order of the weights' columns: channel i becomes the old one
/// columns[i].
void order_channels(const std::vector<int32_t>& columns,
                    const ActivationRows& rows,
                    ThreadPool& pool);

/// Of finite numbers.
[[nodiscard]] float largest_magnitude(const float* x, int64_t count);
/// Finite numbers that share a scale, as codes times that scale.
void round_block(const BlockCodes& how, float* x, int64_t count);
/// Those of a block in BF16 of kBf16Blocks, by what it counts (fixed_unit()).
void round_to_fixed(float unit, float* x, int64_t count);

}  // namespace nibble
