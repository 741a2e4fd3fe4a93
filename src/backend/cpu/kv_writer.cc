#include "backend/cpu/kv_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/range_report.h"
#include "base/check.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cpu {
namespace {

constexpr float kMiddleCode = 8.0F;  // of int4_static: stands for the mean

void write_fp8(const float* values, int64_t dim, float scale, uint8_t* row) {
  const float factor = 1.0F / scale;  // as GPUs do
  std::transform(values, values + dim, row,
                 [&](float value) { return encode_e4m3(value * factor); });
}

/// A number rounded to fp16, whose bits go to `stored`.
float store_f16(float x, uint8_t* stored) {
  const uint16_t bits = f32_to_f16(x);
  std::memcpy(stored, &bits, sizeof bits);
  return f16_to_f32(bits);
}

float inverse_of(float step) { return step > 0.0F ? 1.0F / step : 0.0F; }

}  // namespace

KvWriter::Place KvWriter::place(const KvSlot& slot, const KvHalf& half) const {
  uint8_t* head =
      layout_.pages + slot.page * layout_.page_bytes + slot.kv_head * layout_.head_bytes;
  return {head + half.rows + slot.slot * layout_.row_bytes,
          head + half.sets + slot.slot / half.set_tokens * half.set_bytes};
}

void KvWriter::write_row(const Place& place, const float* x, float fp8_scale) const {
  if (kv_.code == KvCode::kFp8) {
    return write_fp8(x, kv_.head_dim, fp8_scale, place.row);
  }
  kernels_.write_kv(layout_, x, place.row, reinterpret_cast<float*>(place.params));
}

void KvWriter::write_static(const float* steps, const float* x, uint8_t* row) const {
  const int64_t dim = kv_.head_dim;
  float inverses[kMaxHeadDim];
  float offsets[kMaxHeadDim];
  int64_t far = 0;
  for (int64_t d = 0; d < dim; ++d) {
    inverses[d] = inverse_of(steps[d]);
    offsets[d] = -kMiddleCode * steps[d];
    far += std::fabs(x[d]) <= kFarSteps * steps[d] ? 0 : 1;
  }
  if (far > 0) {
    far_outside_ += far;
  }
  kernels_.code_int4(x, {.dim = dim, .inverses = inverses, .offsets = offsets}, row);
}

void KvWriter::write_key(const KvSlot& slot, float* x) const {
  if (kv_has_residual(kv_.code)) {
    std::transform(x, x + kv_.head_dim,
                   kv_.residual_key(slot.residual_page, slot.kv_head, slot.slot), f32_to_bf16);
    return;
  }
  const Place to = place(slot, layout_.keys);
  if (kv_.basis.key_step != nullptr) {
    return write_static(kv_.basis.key_step + slot.kv_head * kv_.head_dim, x, to.row);
  }
  write_row(to, x, kv_.scales.k);
}

void KvWriter::write_value(const KvSlot& slot, float* x) const {
  const Place to = place(slot, layout_.values);
  if (kv_.basis.value_step != nullptr) {
    return write_static(kv_.basis.value_step + slot.kv_head * kv_.head_dim, x, to.row);
  }
  if (!kv_has_residual(kv_.code)) {
    return write_row(to, x, kv_.scales.v);
  }
  write_int4_line(x, kv_.head_dim, to);
}

/// Codes of `count` numbers and their line in fp16.
void KvWriter::write_int4_line(const float* x, int64_t count, const Place& to) const {
  float line[2];
  kernels_.fit_int4(x, count, line);
  float inverses[kMaxHeadDim];
  float offsets[kMaxHeadDim];
  std::fill_n(inverses, count, inverse_of(store_f16(line[0], to.params)));
  std::fill_n(offsets, count, store_f16(line[1], to.params + 2));
  kernels_.code_int4(x, {.dim = count, .inverses = inverses, .offsets = offsets}, to.row);
}

void KvWriter::write_latent(const KvSlot& slot, const float* x) const {
  const Place to = place(slot, layout_.keys);
  if (!layout_.widened()) {
    return kernels_.write_kv(layout_, x, to.row, nullptr);
  }
  write_latent_codes(to, x);
  uint8_t* key = to.row + kv_row_bytes(kv_.code, kv_.latent_rank);
  kernels_.store(x + kv_.latent_rank, kv_.rope_dim(), {key, Element::kBf16});
}

void KvWriter::write_latent_codes(const Place& to, const float* x) const {
  const int64_t rank = kv_.latent_rank;
  if (kv_.code == KvCode::kFp8) {
    float codes[kMaxHeadDim];
    const float scale = kernels_.quantize_fp8(x, rank, 0.0F, codes);
    std::transform(codes, codes + rank, to.row, encode_e4m3);
    std::memcpy(to.params, &scale, sizeof scale);
  } else if (kv_.code == KvCode::kInt8) {
    KvLayout latent = layout_;
    latent.head_dim = rank;
    kernels_.write_kv(latent, x, to.row, reinterpret_cast<float*>(to.params));
  } else {
    CHECK(kv_.code == KvCode::kInt4);
    Place group = to;
    for (int64_t i = 0; i < rank; i += layout_.latent_group) {
      const int64_t count = std::min(layout_.latent_group, rank - i);
      write_int4_line(x + i, count, group);
      group.row += count / 2;
      group.params += 4;
    }
  }
}

void KvWriter::code_keys(const KvSlot& slot, float* scratch) const {
  const int64_t dim = kv_.head_dim;
  const uint16_t* keys = kv_.residual_key(slot.residual_page, slot.kv_head, slot.slot);
  float* rows = scratch;
  float* columns = rows + kChannelTokens * dim;
  float* inverses = columns + kChannelTokens * dim;
  float* offsets = inverses + dim;
  for (int64_t t = 0; t < kChannelTokens; ++t) {
    for (int64_t d = 0; d < dim; ++d) {
      const float key = bf16_to_f32(keys[t * dim + d]);
      rows[t * dim + d] = key;
      columns[d * kChannelTokens + t] = key;
    }
  }
  const Place first = place(slot, layout_.keys);
  for (int64_t d = 0; d < dim; ++d) {
    float line[2];
    kernels_.fit_int4(columns + d * kChannelTokens, kChannelTokens, line);
    inverses[d] = inverse_of(store_f16(line[0], first.params + 2 * d));
    offsets[d] = store_f16(line[1], first.params + 2 * (dim + d));
  }
  for (int64_t t = 0; t < kChannelTokens; ++t) {
    kernels_.code_int4(rows + t * dim, {.dim = dim, .inverses = inverses, .offsets = offsets},
                       first.row + t * layout_.row_bytes);
  }
}

}  // namespace nibble::cpu
