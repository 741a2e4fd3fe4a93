#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/f16.h"
#include "ops/attention.h"
#include "ops/reference/int4_line.h"
#include "ops/reference/latent_rows.h"
#include "quant/codec.h"
#include "quant/hadamard.h"

namespace nibble {
namespace {

using reference::code_of;
using reference::fit_int4;
using reference::FittedLine;
using reference::int4_code;
using reference::store_code;

enum class Half { kKeys, kValues };

/// The keys or the values of one head in one page.
struct HalfPage {
  const KvView& kv;
  std::byte* memory;
  float scale;  // of formats with parameters per tensor
  Half half;

  [[nodiscard]] std::byte* row(int64_t slot) const {
    return memory + slot * kv_row_bytes(kv.code, kv.head_dim);
  }
  [[nodiscard]] float* params(int64_t slot) const {
    return reinterpret_cast<float*>(memory + kv.params_offset()) + slot * kv_row_params(kv.code);
  }
  /// The fp16 scale and offset of an element, `apart` numbers from each other.
  struct Line {
    uint16_t* scale;
    int64_t apart;
  };
  [[nodiscard]] Line line(int64_t slot, int64_t d) const {
    auto* params = reinterpret_cast<uint16_t*>(memory + kv.params_offset());
    return half == Half::kValues
               ? Line{params + 2 * slot, 1}
               : Line{params + 2 * kv.head_dim * (slot / kChannelTokens) + d, kv.head_dim};
  }
};

HalfPage half_of(const KvView& kv, Half half, int64_t page, int64_t kv_head) {
  return half == Half::kKeys ? HalfPage{kv, kv.keys(page, kv_head), kv.scales.k, half}
                             : HalfPage{kv, kv.values(page, kv_head), kv.scales.v, half};
}

double read_element(const HalfPage& half, int64_t slot, int64_t d) {
  if (half.kv.latent()) {
    return reference::read_latent(half.kv, half.memory, slot, d);
  }
  const std::byte* row = half.row(slot);
  const float* params = half.params(slot);
  switch (half.kv.code) {
    case KvCode::kF32:
      return reinterpret_cast<const float*>(row)[d];
    case KvCode::kBf16:
      return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[d]);
    case KvCode::kInt8:
      return static_cast<double>(reinterpret_cast<const int8_t*>(row)[d]) * params[0];
    case KvCode::kInt4:
      return static_cast<double>(int4_code(row, d)) * params[0] + params[1];
    case KvCode::kInt4Page: {
      const auto [scale, apart] = half.line(slot, d);
      return static_cast<double>(int4_code(row, d)) * f16_to_f32(*scale) + f16_to_f32(scale[apart]);
    }
    case KvCode::kInt4Static:  // in steps: queries and results have their sizes
      return int4_code(row, d) - 8;
    case KvCode::kFp8:
      return static_cast<double>(decode_e4m3(static_cast<uint8_t>(row[d]))) * half.scale;
  }
  return 0.0;
}

void write_int8(const float* values, int64_t dim, std::byte* row, float* params) {
  float absmax = 0.0F;
  for (int64_t d = 0; d < dim; ++d) {
    absmax = std::max(absmax, std::fabs(values[d]));
  }
  params[0] = absmax / 127.0F;
  for (int64_t d = 0; d < dim; ++d) {
    const float code = params[0] > 0.0F ? std::nearbyint(values[d] / params[0]) : 0.0F;
    row[d] = static_cast<std::byte>(static_cast<int8_t>(std::clamp(code, -127.0F, 127.0F)));
  }
}

void write_int4(const float* values, int64_t dim, std::byte* row, float* params) {
  const FittedLine line = fit_int4(values, dim);
  for (int64_t d = 0; d < dim; ++d) {
    store_code(row, d, code_of(values[d], line.scale, line.offset));
  }
  params[0] = static_cast<float>(line.end_scale);
  params[1] = static_cast<float>(line.end_offset);
}

/// The line of int4_page, as its fp16 parameters say; they go to `to`.
std::pair<double, double> rounded_line(const float* values, int64_t count, HalfPage::Line to) {
  const FittedLine line = fit_int4(values, count);
  to.scale[0] = f32_to_f16(static_cast<float>(line.end_scale));
  to.scale[to.apart] = f32_to_f16(static_cast<float>(line.end_offset));
  return {f16_to_f32(to.scale[0]), f16_to_f32(to.scale[to.apart])};
}

void write_page_value(const HalfPage& half, int64_t slot, const float* values) {
  const auto [scale, offset] = rounded_line(values, half.kv.head_dim, half.line(slot, 0));
  for (int64_t d = 0; d < half.kv.head_dim; ++d) {
    store_code(half.row(slot), d, code_of(values[d], scale, offset));
  }
}

/// Codes the keys of a group from `slot` on, by channel.
void code_keys(const HalfPage& half, int64_t residual_page, int64_t kv_head, int64_t slot) {
  for (int64_t d = 0; d < half.kv.head_dim; ++d) {
    std::vector<float> channel;
    for (int64_t t = slot; t < slot + kChannelTokens; ++t) {
      channel.push_back(bf16_to_f32(half.kv.residual_key(residual_page, kv_head, t)[d]));
    }
    const auto [scale, offset] = rounded_line(channel.data(), kChannelTokens, half.line(slot, d));
    for (int64_t t = 0; t < kChannelTokens; ++t) {
      store_code(half.row(slot + t), d, code_of(channel[static_cast<size_t>(t)], scale, offset));
    }
  }
}

void write_static(const HalfPage& half, int64_t slot, const float* values, const float* steps) {
  for (int64_t d = 0; d < half.kv.head_dim; ++d) {
    store_code(half.row(slot), d, code_of(values[d], steps[d], -8.0 * steps[d]));
  }
}

void write_row(const HalfPage& half, int64_t slot, const float* values) {
  const int64_t dim = half.kv.head_dim;
  std::byte* row = half.row(slot);
  switch (half.kv.code) {
    case KvCode::kF32:
      std::copy(values, values + dim, reinterpret_cast<float*>(row));
      return;
    case KvCode::kBf16:
      std::transform(values, values + dim, reinterpret_cast<uint16_t*>(row), f32_to_bf16);
      return;
    case KvCode::kInt8:
      return write_int8(values, dim, row, half.params(slot));
    case KvCode::kInt4:
      return write_int4(values, dim, row, half.params(slot));
    case KvCode::kFp8:
      std::transform(values, values + dim, row, [&](float value) {
        return static_cast<std::byte>(encode_e4m3(value / half.scale));
      });
      return;
    case KvCode::kInt4Page:
      return write_page_value(half, slot, values);
    case KvCode::kInt4Static:
      CHECK_MSG(false, "int4_static is written with its steps");
      return;
  }
}

/// A row's place in its sequence.
struct RowPlace {
  int64_t position;
  int64_t rotated_length;
};

void rotate(float* head, const RowPlace& place, const RopeAppendArgs& args) {
  const int64_t dim = args.kv.head_dim;
  const double growth = base_growth(args.dynamic, place.rotated_length);
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float frequency =
        growth == 1.0 ? args.inv_freq[i] : grown_frequency(args.inv_freq[i], growth, i, dim);
    const double angle = static_cast<double>(place.position) * frequency;
    const double cosine = std::cos(angle) * args.attention_factor;
    const double sine = std::sin(angle) * args.attention_factor;
    const double a = head[i];
    const double b = head[i + dim / 2];
    head[i] = static_cast<float>(a * cosine - b * sine);
    head[i + dim / 2] = static_cast<float>(b * cosine + a * sine);
  }
}

/// AttentionForm::kShared.
void round_row(float* head, int64_t dim, int places) {
  float largest = 0.0F;
  for (int64_t i = 0; i < dim; ++i) {
    largest = std::max(largest, std::fabs(head[i]));
  }
  if (largest > 0.0F) {
    const double unit = std::ldexp(1.0, std::ilogb(largest) - places);
    for (int64_t i = 0; i < dim; ++i) {
      head[i] = static_cast<float>(std::nearbyint(head[i] / unit) * unit);
    }
  }
}

/// hadamard() in double precision, by its matrix; `back`: the inverse.
void turn(float* head, int64_t dim, bool back) {
  const int64_t block = hadamard_block(dim);
  std::vector<double> sums(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t first = i / block * block;
    for (int64_t j = 0; j < block; ++j) {
      const auto both = static_cast<uint64_t>((i - first) & j);
      const bool minus = (std::popcount(both) % 2 != 0) != hadamard_flips(back ? i - first : j);
      sums[static_cast<size_t>(i)] += minus ? -head[first + j] : head[first + j];
    }
  }
  for (int64_t i = 0; i < dim; ++i) {
    head[i] =
        static_cast<float>(sums[static_cast<size_t>(i)] / std::sqrt(static_cast<double>(block)));
  }
}

/// Attention of one query head over the keys first..last (inclusive) of its sequence.
void attend(const AttentionArgs& args, size_t index, int64_t row, int64_t head) {
  const KvView& kv = args.kv;
  const SequenceSpan& sequence = args.sequences[index];
  const int64_t last = sequence.kv_len - sequence.q_len + (row - sequence.q_begin);
  const int64_t first =
      args.sliding_window > 0 ? std::max<int64_t>(0, last - args.sliding_window + 1) : 0;
  const int64_t kv_head = head / (args.heads / kv.kv_heads);
  const float* q = args.q.f32() + row * args.q_stride + head * kv.head_dim;
  std::vector<double> scores(static_cast<size_t>(last - first + 1));
  for (int64_t t = first; t <= last; ++t) {
    const HalfPage keys = half_of(kv, Half::kKeys, sequence.pages[t / kv.page_size], kv_head);
    const bool as_it_is = kv_has_residual(kv.code) && t / kChannelTokens == last / kChannelTokens;
    const uint16_t* key = as_it_is ? kv.residual_key(args.residuals[index].pages[t / kv.page_size],
                                                     kv_head, t % kv.page_size)
                                   : nullptr;
    double dot = 0.0;
    for (int64_t d = 0; d < kv.head_dim; ++d) {
      dot += q[d] * (as_it_is ? bf16_to_f32(key[d]) : read_element(keys, t % kv.page_size, d));
    }
    scores[static_cast<size_t>(t - first)] = dot * args.scale;
  }
  double top = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  if (args.sinks != nullptr) {
    top = std::max<double>(top, args.sinks[head]);
    total = std::exp(args.sinks[head] - top);
  }
  for (double& score : scores) {
    score = std::exp(score - top);
    total += score;
  }
  for (int64_t d = 0; d < kv.head_dim; ++d) {
    double sum = 0.0;
    for (int64_t t = first; t <= last; ++t) {
      const HalfPage values = half_of(kv, Half::kValues, sequence.pages[t / kv.page_size], kv_head);
      sum += scores[static_cast<size_t>(t - first)] * read_element(values, t % kv.page_size, d);
    }
    args.out.f32()[row * args.out_stride + head * kv.head_dim + d] =
        static_cast<float>(sum / total);
  }
  float* out = args.out.f32() + row * args.out_stride + head * kv.head_dim;
  for (int64_t d = 0; kv.basis.value_step != nullptr && d < kv.head_dim; ++d) {
    out[d] *= kv.basis.value_step[kv_head * kv.head_dim + d];
  }
  if (kv.basis.turns_values) {
    turn(out, kv.head_dim, true);
  }
  for (int64_t d = 0; kv.basis.value_mean != nullptr && d < kv.head_dim; ++d) {
    out[d] += kv.basis.value_mean[kv_head * kv.head_dim + d];
  }
}

}  // namespace

void reference_attention(const AttentionArgs& args) {
  CHECK_EQ(args.heads % args.kv.kv_heads, 0);
  CHECK(args.sinks == nullptr ||
        (args.kv.basis.key_mean == nullptr && args.kv.basis.value_mean == nullptr));
  for (size_t index = 0; index < args.sequences.size(); ++index) {
    const SequenceSpan& sequence = args.sequences[index];
    for (int64_t i = 0; i < sequence.q_len; ++i) {
      for (int64_t head = 0; head < args.heads; ++head) {
        attend(args, index, sequence.q_begin + i, head);
      }
    }
  }
}

namespace {

void normalize(float* head, int64_t dim, const float* weight, float eps) {
  double squares = 0.0;
  for (int64_t i = 0; i < dim; ++i) {
    squares += static_cast<double>(head[i]) * head[i];
  }
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) {
    head[i] = static_cast<float>(head[i] * factor * weight[i]);
  }
}

void subtract(float* x, const float* mean, int64_t count) {
  for (int64_t i = 0; mean != nullptr && i < count; ++i) {
    x[i] -= mean[i];
  }
}

/// Keys and values of one position, changed as the basis says, into the cache.
void write_position(const RopeAppendArgs& args, size_t index, int64_t position, const float* k) {
  const KvView& kv = args.kv;
  const int64_t page = args.sequences[index].pages[position / kv.page_size];
  const int64_t slot = position % kv.page_size;
  for (int64_t head = 0; head < kv.kv_heads; ++head, k += kv.head_dim) {
    const float* v = k + kv.kv_heads * kv.head_dim;
    const HalfPage keys = half_of(kv, Half::kKeys, page, head);
    const HalfPage values = half_of(kv, Half::kValues, page, head);
    if (kv.basis.key_step != nullptr) {
      write_static(keys, slot, k, kv.basis.key_step + head * kv.head_dim);
      write_static(values, slot, v, kv.basis.value_step + head * kv.head_dim);
      continue;
    }
    write_row(values, slot, v);
    if (!kv_has_residual(kv.code)) {
      write_row(keys, slot, k);
      continue;
    }
    const int64_t residual = args.residuals[index].pages[position / kv.page_size];
    std::transform(k, k + kv.head_dim, kv.residual_key(residual, head, slot), f32_to_bf16);
    if ((slot + 1) % kChannelTokens == 0) {
      code_keys(keys, residual, head, slot + 1 - kChannelTokens);
    }
  }
}

}  // namespace

void reference_rope_append(const RopeAppendArgs& args) {
  const KvView& kv = args.kv;
  for (size_t index = 0; index < args.sequences.size(); ++index) {
    const SequenceSpan& sequence = args.sequences[index];
    for (int64_t i = 0; i < sequence.q_len; ++i) {
      const int64_t position = sequence.kv_len - sequence.q_len + i;
      float* q = args.qkv.f32() + (sequence.q_begin + i) * args.stride;
      float* k = q + args.heads * kv.head_dim;
      float* v = k + kv.kv_heads * kv.head_dim;
      for (int64_t head = 0; head < args.heads + kv.kv_heads; ++head) {
        const float* norm = head < args.heads ? args.q_norm : args.k_norm;
        if (norm != nullptr) {
          normalize(q + head * kv.head_dim, kv.head_dim, norm, args.norm_eps);
        }
        rotate(q + head * kv.head_dim, {position, rotated_length(sequence.prompt_len, position)},
               args);
        if (args.form == AttentionForm::kShared) {
          round_row(q + head * kv.head_dim, kv.head_dim,
                    head < args.heads ? kQueryPlaces : kKeyPlaces);
        }
      }
      subtract(k, kv.basis.key_mean, kv.kv_heads * kv.head_dim);
      subtract(v, kv.basis.value_mean, kv.kv_heads * kv.head_dim);
      for (int64_t head = 0; head < args.heads + 2 * kv.kv_heads; ++head) {
        const bool value = head >= args.heads + kv.kv_heads;
        if (value ? kv.basis.turns_values : kv.basis.turns_keys) {
          turn(q + head * kv.head_dim, kv.head_dim, false);
        }
      }
      for (int64_t head = 0; kv.basis.key_step != nullptr && head < args.heads; ++head) {
        const float* step = kv.basis.key_step + head / (args.heads / kv.kv_heads) * kv.head_dim;
        std::transform(step, step + kv.head_dim, q + head * kv.head_dim, q + head * kv.head_dim,
                       std::multiplies<>());
      }
      write_position(args, index, position, k);
    }
  }
}

}  // namespace nibble
