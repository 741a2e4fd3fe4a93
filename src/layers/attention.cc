#include "layers/attention.h"

#include <cmath>
#include <utility>

#include "base/check.h"

namespace nibble {

Attention::Attention(Parts parts,
                     const AttentionShape& shape,
                     std::shared_ptr<const RopeTable> rope)
    : parts_(std::move(parts)), shape_(shape), rope_(std::move(rope)) {
  CHECK_EQ(parts_.qkv.n(), (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim);
  CHECK_EQ(parts_.output.k(), shape_.heads * shape_.head_dim);
  CHECK_EQ(static_cast<int64_t>(rope_->inv_freq.size()) * 2, shape_.head_dim);
  CHECK(parts_.q_norm.has_value() == parts_.k_norm.has_value());
}

void Attention::normalize_heads(const ForwardContext& context) const {
  if (!parts_.q_norm) {
    return;
  }
  const int64_t stride = parts_.qkv.n();
  for (int64_t row = 0; row < context.rows; ++row) {
    float* q = context.qkv + row * stride;
    float* k = q + shape_.heads * shape_.head_dim;
    parts_.q_norm->forward(q, shape_.heads, q, context.backend);
    parts_.k_norm->forward(k, shape_.kv_heads, k, context.backend);
  }
}

void Attention::forward(float* hidden, const ForwardContext& context) {
  Backend& backend = context.backend;
  const int64_t stride = parts_.qkv.n();
  parts_.qkv.forward(
      {.x = hidden, .m = context.rows, .y = context.qkv, .input = parts_.norm.input()}, backend);
  normalize_heads(context);
  backend.rope_append_kv(RopeAppendArgs{.qkv = context.qkv,
                                        .stride = stride,
                                        .heads = shape_.heads,
                                        .inv_freq = rope_->inv_freq.data(),
                                        .attention_factor = rope_->attention_factor,
                                        .kv = context.kv,
                                        .sequences = context.sequences});
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  backend.attention(AttentionArgs{.q = context.qkv,
                                  .q_stride = stride,
                                  .out = context.attended,
                                  .out_stride = shape_.heads * shape_.head_dim,
                                  .heads = shape_.heads,
                                  .scale = scale,
                                  .sliding_window = shape_.sliding_window,
                                  .kv = context.kv,
                                  .sequences = context.sequences});
  parts_.output.forward(
      {.x = context.attended, .m = context.rows, .y = hidden, .output = GemmOutput::kAdd}, backend);
}

}  // namespace nibble
