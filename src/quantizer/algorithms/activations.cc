#include "quantizer/algorithms/activations.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr float kInt8Max = 127.0F;
constexpr int64_t kFp8GroupSize = 128;

/// Numbers that share a scale.
void round_together(ActFormat act, float* x, int64_t count) {
  const float absmax = largest_magnitude(x, count);
  const bool integer = act == ActFormat::kInt8Token;
  const float top = integer ? kInt8Max : kE4M3Max;
  const float scale = absmax / top;
  const float factor = top / absmax;
  if (!(scale > 0) || !std::isfinite(factor)) {
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float code = x[i] * factor;
    x[i] = (integer ? round_half_even(code) : decode_e4m3(encode_e4m3(code))) * scale;
  }
}

/// As round_wide_blocks() does it.
void round_to_wide_blocks(const BlockPrecision& blocks, float* row) {
  std::vector<int16_t> codes(static_cast<size_t>(blocks.k()));
  std::vector<float> scales(static_cast<size_t>(scale_count(blocks, BlockScales::kWide)));
  round_wide_blocks(blocks, row, {codes.data(), scales.data()});
  size_t wide = 0;
  for (size_t b = 0; b < blocks.bits.size(); ++b) {
    const float scale = blocks.bits[b] == 16 ? scales[++wide] : scales[0];
    const auto first = static_cast<int64_t>(b) * blocks.block;
    for (int64_t i = first; i < first + blocks.block; ++i) {
      row[i] = static_cast<float>(codes[static_cast<size_t>(i)]) * scale;
    }
  }
}

/// As round_blocks() does it.
void round_to_blocks(const BlockPrecision& blocks, BlockScales form, float* row) {
  std::vector<int8_t> codes(static_cast<size_t>(blocks.k()));
  std::vector<float> scales(static_cast<size_t>(scale_count(blocks, form)));
  round_blocks(blocks, form, row, {codes.data(), scales.data()});
  for (int64_t i = 0; i < blocks.k(); ++i) {
    const auto block = static_cast<size_t>(i / blocks.block);
    row[i] = static_cast<float>(codes[static_cast<size_t>(i)]) *
             scales[form == BlockScales::kEach ? block : 0];
  }
}

}  // namespace

float largest_magnitude(const float* x, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
  }
  return largest;
}

void round_block(const BlockCodes& how, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = round_half_even(std::clamp(x[i] * how.factor, -how.top, how.top)) * how.scale;
  }
}

void round_to_fixed(float unit, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = round_half_even(bf16_to_f32(f32_to_bf16(x[i])) / unit) * unit;
  }
}

void round_row(const RowForm& form, float* row, int64_t k) {
  const ActFormat act = form.act.format;
  if (!rounds_rows(act)) {
    return;
  }
  if (in_blocks(act)) {
    CHECK(form.act.blocks != nullptr);
    CHECK_EQ(form.act.blocks->k(), k);
    act == ActFormat::kBf16Blocks ? round_to_wide_blocks(*form.act.blocks, row)
                                  : round_to_blocks(*form.act.blocks, form.scales, row);
    return;
  }
  const int64_t together = act == ActFormat::kFp8Group ? kFp8GroupSize : k;
  for (int64_t begin = 0; begin < k; begin += together) {
    round_together(act, row + begin, std::min(together, k - begin));
  }
}

void round_activations(const RowForm& form, const ActivationRows& rows, ThreadPool& pool) {
  if (rounds_rows(form.act.format)) {
    pool.parallel_for(rows.rows,
                      [&](int64_t row, int) { round_row(form, rows.x + row * rows.k, rows.k); });
  }
}

void order_channels(const std::vector<int32_t>& columns,
                    const ActivationRows& rows,
                    ThreadPool& pool) {
  CHECK_EQ(std::ssize(columns), rows.k);
  pool.parallel_for(rows.rows, [&](int64_t index, int) {
    float* row = rows.x + index * rows.k;
    const std::vector<float> old(row, row + rows.k);
    for (int64_t i = 0; i < rows.k; ++i) {
      row[i] = old[static_cast<size_t>(columns[static_cast<size_t>(i)])];
    }
  });
}

}  // namespace nibble
